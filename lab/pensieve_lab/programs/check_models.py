"""Checks every model family against its reference: logits of transformers, and greedy turns that lose their
KV.

    python -m pensieve_lab.programs.check_models

For each directory in tests/models/golden, in float32, the program reports two figures. One is the largest
difference between its logits, which transformers computed, and those of the model here. The other is how many
tokens of conversations that alternate in too small pools are the choice of one dense pass over the whole
sequence. The last line is one JSON document. Exit status 1 if logits differ by more than a target, a token
differs from the dense one's where the choice is certain, or no KV was lost, so that the check shows nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from model_defs import load_model, make_mesh
from pensieve_jax import (
    LLM,
    CacheConfig,
    ConfigError,
    EngineConfig,
    RunnerConfig,
    SamplingParams,
    SchedulerConfig,
)
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_jax.device.dense_reference import MIN_MARGIN, DenseReference

FLAGS = flags.FLAGS
GOLDEN = Path(__file__).parents[3] / "tests" / "models" / "golden"
MAX_LOGIT_DIFFERENCE = 1e-4
NUM_CONVERSATIONS, NUM_TURNS = 4, 3
PROMPT_TOKENS, OUTPUT_TOKENS = 10, 6  # three turns fill the 48 positions that some of the models have
_PARAMS = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
_COLUMNS = {
    "family": "family",
    "variant": "variant",
    "max_logit_difference": "max |logit difference|",
    "num_equal_tokens": "equal tokens",
    "num_tokens": "of",
    "swapped_in_tokens": "swapped in",
    "recomputed_tokens": "recomputed",
}
_UNITS = {
    "max_logit_difference": "largest of 40 tokens' logits, against transformers in float32",
    "num_tokens, num_equal_tokens": "greedy tokens served, and those that a dense pass would choose",
    "num_wrong_tokens": f"tokens among the others that logits off by {MIN_MARGIN} would not choose either",
    "reused_gpu_tokens, swapped_in_tokens, recomputed_tokens": "history tokens by where they were",
}


class TokenCounts(NamedTuple):
    """Counts of tokens of the served conversations, and where their histories were."""

    num_tokens: int
    num_equal_tokens: int
    num_wrong_tokens: int
    reused_gpu_tokens: int
    swapped_in_tokens: int
    recomputed_tokens: int


def engine(source: Path) -> LLM:
    """Make an engine whose device memory holds two conversations, and whose host memory holds one."""
    config = EngineConfig(
        # No page of six is reserved, so a third conversation joins and KV has to be evicted.
        cache=CacheConfig(gpu_pages=6, cpu_pages=3, chunk_tokens=16, reserve_fraction=0.0),
        scheduler=SchedulerConfig(max_num_running=4, max_num_batched_tokens=32, token_buckets=(32,)),
        runner=RunnerConfig(num_layer_groups=1),
    )
    return LLM(str(source), dtype="float32", config=config, progress=False)


def serve(source: Path, reference: DenseReference, vocab_size: int) -> TokenCounts:
    """Serve all turns of all conversations, and judge them by teacher-forced dense passes."""
    random = np.random.default_rng(0)
    names = [f"c{number}" for number in range(NUM_CONVERSATIONS)]
    histories: dict[str, list[int]] = {name: [] for name in names}
    counts = np.zeros(len(TokenCounts._fields), int)
    with engine(source) as llm:
        for _ in range(NUM_TURNS):
            prompts = random.integers(4, vocab_size, (len(names), PROMPT_TOKENS)).tolist()
            outputs = llm.generate(prompts, _PARAMS, conversation_ids=names)
            for name, prompt, output in zip(names, prompts, outputs, strict=True):
                replay = reference.replay_turn(histories[name], prompt, output.token_ids, _PARAMS)
                is_equal = replay.token_ids == np.asarray(output.token_ids)
                usage = output.usage
                counts += (
                    len(is_equal),
                    is_equal.sum(),
                    (~replay.possible).sum(),
                    usage.reused_gpu_tokens,
                    usage.swapped_in_tokens,
                    usage.recomputed_tokens,
                )
                histories[name] += [*prompt, *output.token_ids]
    return TokenCounts(*counts.tolist())


def check(variant: str) -> dict[str, Any]:
    """Check one golden directory and return its report."""
    source = GOLDEN / variant
    model = load_model(source, dtype="float32", mesh=make_mesh(1))
    with np.load(source / "logits.npz") as golden:
        token_ids, expected = golden["input_ids"].tolist(), golden["logits"]
    reference = DenseReference(model, min_padded_tokens=model.config.max_position_embeddings)
    difference = np.abs(reference.logits(token_ids) - expected).max()
    served = serve(source, reference, model.config.vocab_size)
    return {
        "family": model.config.architecture,
        "variant": variant,
        "max_logit_difference": float(difference),
        **served._asdict(),
    }


def missed_targets(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence per missed target."""
    missed = []
    for result in results:
        variant = result["variant"]
        if not result["max_logit_difference"] <= MAX_LOGIT_DIFFERENCE:
            missed.append(f"{variant}: logits differ by more than {MAX_LOGIT_DIFFERENCE}")
        if result["num_wrong_tokens"]:
            missed.append(f"{variant}: {result['num_wrong_tokens']} tokens are not the dense reference's")
        if not min(result["swapped_in_tokens"], result["recomputed_tokens"]):
            missed.append(f"{variant}: no KV was swapped in, or none was recomputed")
    return missed


def main() -> int:
    """Check the models; return 0, or `EXIT_FAILED` if a target is missed."""
    names = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
    for name in FLAGS.variants:
        if name not in names:
            raise ConfigError("--variants", name, f"one of {', '.join(names)}")
    results = [check(name) for name in FLAGS.variants or names]
    results.sort(key=lambda result: result["family"])
    print(table(list(_COLUMNS.values()), [[result[key] for key in _COLUMNS] for result in results]))
    missed = missed_targets(results)
    for sentence in missed:
        print(f"missed: {sentence}")
    print_document(json_line("check_models", {"variants": results}, units=_UNITS, device=device_name()))
    return EXIT_FAILED if missed else 0


def define_flags() -> None:
    flags.DEFINE_list("variants", [], "Directories of tests/models/golden to check; default: all.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
