"""Serves conversations with too few pages, and compares the results with a dense stateless model.

    python -m pensieve_lab.programs.check_serving --model=random:llama2-13b-gqa10 --dtype=bfloat16

Conversations of seeded random ids take their turns together, statefully, in a pool that holds a part of them
(`--pool_fraction`). Then each whole conversation goes through the dense reference in one teacher-forced pass,
and the log-probabilities of the emitted tokens are compared. The program reports their differences, tokens/s
of each turn, memory against weights + pool + 2 GB, and compilations while serving. The last line is one JSON
document (see `--json`); the exit status is 1 if a target is missed.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from tqdm import tqdm

from model_defs import load_model, make_mesh
from pensieve_jax import LLM, ConfigError, Output, SamplingParams
from pensieve_jax.commands.engine_flags import define_engine_flags, engine_config, model_limits, open_llm
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_jax.decoding.device.weights import serving_dtype
from pensieve_jax.device.dense_reference import DenseReference
from pensieve_jax.model_source import resolve_model

FLAGS = flags.FLAGS
SLACK_BYTES = 2 * 10**9


class ServedConversation(NamedTuple):
    """Conversation with the prompt ids and the output of every turn."""

    prompts: list[list[int]]
    outputs: list[Output]

    @property
    def token_ids(self) -> list[int]:
        """Prompts and replies in order."""
        pairs = zip(self.prompts, self.outputs, strict=True)
        return [token_id for prompt, output in pairs for token_id in (*prompt, *output.token_ids)]


def make_prompts(vocab_size: int) -> list[list[list[int]]]:
    """Draw random ids by conversation and turn, about `prompt_tokens` each."""
    random = np.random.default_rng(FLAGS.data_seed)
    spread = FLAGS.prompt_tokens // 4
    return [
        [
            random.integers(
                3, vocab_size, FLAGS.prompt_tokens + random.integers(-spread, spread + 1)
            ).tolist()
            for _ in range(FLAGS.num_turns)
        ]
        for _ in range(FLAGS.num_conversations)
    ]


def serve(
    llm: LLM, prompts: Sequence[list[list[int]]]
) -> tuple[list[ServedConversation], list[dict[str, Any]]]:
    """Serve all conversations, one turn of each at a time; return them and figures of each turn."""
    params = SamplingParams(max_tokens=FLAGS.output_tokens, ignore_eos=True, logprobs=0)
    served = [ServedConversation(turns, []) for turns in prompts]
    names = [f"conversation-{i}" for i in range(len(prompts))]
    rows = []
    for turn in range(FLAGS.num_turns):
        num_steps, start_s = llm.stats()["num_steps"], time.perf_counter()
        outputs = llm.generate([turns[turn] for turns in prompts], params, conversation_ids=names)
        seconds = time.perf_counter() - start_s
        for conversation, output in zip(served, outputs, strict=True):
            conversation.outputs.append(output)
        totals = {
            name: sum(getattr(output.usage, name) for output in outputs)
            for name in ("reused_gpu_tokens", "recomputed_tokens", "prefilled_tokens", "output_tokens")
        }
        rows.append(
            {
                "turn": turn + 1,
                **totals,
                "num_suspensions": sum(output.usage.num_suspensions for output in outputs),
                "num_steps": int(llm.stats()["num_steps"] - num_steps),
                "seconds": seconds,
                "output_tokens_per_s": totals["output_tokens"] / seconds,
            }
        )
    return served, rows


def compare(served: Sequence[ServedConversation]) -> dict[str, float]:
    """Return differences of the emitted tokens' log-probabilities, and how many the dense model chooses."""
    config = engine_config()
    mesh = make_mesh(config.runner.tensor_parallel_size)
    model = load_model(
        resolve_model(FLAGS.model),
        dtype=serving_dtype(FLAGS.dtype),
        mesh=mesh,
        seed=config.runner.random_seed,
        max_position_embeddings=config.runner.max_position_embeddings,
        weights_dtype=config.runner.weights_dtype,
    )
    reference = DenseReference(model)
    # Every sequence is padded to one length, and everything after the shortest first prompt counts as
    # emitted, so that the reference is compiled once. Padding after a token does not change its logits.
    longest = max(len(one.token_ids) for one in served)
    num_first = min(len(one.prompts[0]) for one in served)
    params = SamplingParams(max_tokens=longest, ignore_eos=True)
    differences, agreed = [], []
    with tqdm(served, desc="dense reference", disable=None) as bar:
        for one in bar:
            padded = one.token_ids + [0] * (longest - len(one.token_ids))
            dense = reference.replay_turn([], padded[:num_first], padded[num_first:], params)
            end = -num_first  # rows of the reference begin there
            for prompt, output in zip(one.prompts, one.outputs, strict=True):
                start = end + len(prompt)
                end = start + len(output.token_ids)
                assert output.logprobs is not None
                logprobs = np.array([entry.logprob for entry in output.logprobs])
                differences.append(np.abs(logprobs - dense.logprobs[start:end]))
                agreed.append(dense.token_ids[start:end] == np.array(output.token_ids))
    values = np.concatenate(differences)
    return {
        "num_logprobs": len(values),
        "p99_abs_difference": float(np.percentile(values, 99)),
        "max_abs_difference": float(values.max()),
        "mean_abs_difference": float(values.mean()),
        "same_choice_fraction": float(np.concatenate(agreed).mean()),
    }


def device_peak_bytes() -> int | None:
    """Return the peak memory of the first device so far, or None if it is not reported."""
    peak: int | None = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return peak


def memory(llm: LLM) -> dict[str, Any]:
    """Return bytes per device, as the compiler reports them, and the device's peak."""
    analysis = llm.memory_analysis()
    buckets = analysis["buckets"]
    limit = analysis["weights_bytes"] + analysis["kv_pool_bytes"] + SLACK_BYTES
    compiled = max(bucket["peak_bytes"] for bucket in buckets.values())
    peak = device_peak_bytes()
    return {
        "weights_bytes": analysis["weights_bytes"],
        "kv_pool_bytes": analysis["kv_pool_bytes"],
        "temp_bytes": {str(bucket): sizes["temp_bytes"] for bucket, sizes in buckets.items()},
        "compiled_peak_bytes": compiled,
        "device_peak_bytes": peak,
        "limit_bytes": limit,
        "pool_updated_in_place": all(
            sizes["alias_bytes"] >= analysis["kv_pool_bytes"] for sizes in buckets.values()
        ),
        "within_limit": compiled <= limit and (peak is None or peak <= limit),
    }


def check_flags() -> None:
    """Raise ConfigError for impossible sizes; choose a small `--gpu_pages` if it was not given."""
    least = {"num_conversations": 1, "num_turns": 1, "output_tokens": 1, "prompt_tokens": 4}
    for name, minimum in least.items():
        value: int = getattr(FLAGS, name)
        if value < minimum:
            raise ConfigError(f"--{name}", value, f"at least {minimum}")
    tokens = FLAGS.num_turns * (FLAGS.prompt_tokens * 5 // 4 + FLAGS.output_tokens)
    if FLAGS["gpu_pages"].using_default_value:
        pages_each = -(-tokens // FLAGS.chunk_tokens)
        FLAGS.gpu_pages = max(int(FLAGS.pool_fraction * FLAGS.num_conversations * pages_each), 2 * pages_each)
    _, max_context_tokens = model_limits()
    if tokens > max_context_tokens:
        raise ConfigError(
            "--num_turns",
            FLAGS.num_turns,
            f"few enough for the context of {max_context_tokens} tokens",
            f"a conversation may have {tokens} tokens; lower --num_turns, --prompt_tokens or --output_tokens",
        )


def check(results: dict[str, Any]) -> dict[str, bool]:
    """Return the targets by name, and whether each is met."""
    return {
        f"99th percentile of differences at most {FLAGS.tolerance}": (
            results["logprobs"]["p99_abs_difference"] <= FLAGS.tolerance
        ),
        "some state was dropped": results["num_dropped_chunks"] > 0,
        "no compilation while serving": results["num_compilations_while_serving"] == 0,
        "memory within weights + pool + 2 GB": results["memory"]["within_limit"],
        "pool updated in place": results["memory"]["pool_updated_in_place"],
    }


def measure() -> dict[str, Any]:
    """Serve, free the model, and compare."""
    start_s = time.perf_counter()
    with open_llm() as llm:
        start_up_s = time.perf_counter() - start_s
        before, start_up_peak = llm.stats(), device_peak_bytes()
        served, turns = serve(llm, make_prompts(llm.model_config.vocab_size))
        stats = llm.stats()
        peaks = {**memory(llm), "start_up_peak_bytes": start_up_peak}
    del llm  # free its weights and pools for the reference
    gc.collect()
    return {
        "model": FLAGS.model,
        "dtype": FLAGS.dtype,
        "gpu_pages": FLAGS.gpu_pages,
        "num_conversations": FLAGS.num_conversations,
        "num_buckets": stats["num_buckets"],
        "start_up_s": start_up_s,
        "num_dropped_chunks": stats["num_dropped_chunks"] - before["num_dropped_chunks"],
        "num_compilations_at_start": before["num_compilations"],
        "num_compilations_while_serving": stats["num_compilations"] - before["num_compilations"],
        "turns": turns,
        "logprobs": compare(served),
        "memory": peaks,
    }


def main() -> int:
    check_flags()
    results = measure()
    checks = check(results)
    turns = results["turns"]
    print(table(list(turns[0]), [list(row.values()) for row in turns]))
    print(table(["logprobs", "value"], list(results["logprobs"].items())))
    print(table(["memory", "value"], [[key, str(value)] for key, value in results["memory"].items()]))
    print(table(["check", "result"], [[name, "met" if ok else "MISSED"] for name, ok in checks.items()]))
    units = {"*_bytes": "bytes per device", "*_s": "seconds", "*_difference": "nats", "*_per_s": "1/second"}
    print_document(json_line("serving", {**results, "checks": checks}, units=units, device=device_name()))
    return 0 if all(checks.values()) else EXIT_FAILED


def define_flags() -> None:
    flags.DEFINE_integer("num_conversations", 64, "Conversations.")
    flags.DEFINE_integer("num_turns", 3, "Turns of each conversation.")
    flags.DEFINE_integer("prompt_tokens", 38, "Tokens of a prompt, plus or minus a quarter.")
    flags.DEFINE_integer("output_tokens", 64, "Tokens of a reply.")
    flags.DEFINE_float(
        "pool_fraction", 0.6, "Pages as a share of what all conversations fill; see --gpu_pages."
    )
    flags.DEFINE_float("tolerance", 0.05, "Largest 99th percentile of the differences of log-probabilities.")
    flags.DEFINE_integer("data_seed", 0, "Seed of the prompts.", lower_bound=0)
    define_engine_flags()
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
