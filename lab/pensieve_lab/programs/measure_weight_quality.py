"""Measures how keeping a model's weights in 8 bits changes its answers, on your texts.

    python -m pensieve_lab.programs.measure_weight_quality --text=dialogues.jsonl.gz
    python -m pensieve_lab.programs.measure_weight_quality --model=path/to/model --text=book.txt

The model runs in float32, once with its weights as they are, and once with those of its layers in each format
of `--weights_dtype`. "bfloat16" is the unquantized model computed in bfloat16, for comparison. Each token's
distribution after its text is compared with the float32 one, and greedy replies with float32 ones. Then
conversations are served with the weights in 8 bits, in pools that hold all of them and in pools that do not:
the answers must be the same.

`--text` is as in `measure_kv_quality`. The last line is one JSON document (see `--json`); exit status 1 if an
answer depends on the pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags
from tqdm import tqdm

from model_defs import load_model, make_mesh
from model_defs.registry import Model
from pensieve_jax import (
    LLM,
    CacheConfig,
    ConfigError,
    EngineConfig,
    RunnerConfig,
    SamplingParams,
    SchedulerConfig,
)
from pensieve_jax.commands.engine_flags import define_model_flag, shows_progress
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_jax.config import WEIGHTS_DTYPES
from pensieve_jax.model_source import resolve_model
from pensieve_lab.kv_quality.flags import load_texts
from pensieve_lab.kv_quality.formats import EXACT
from pensieve_lab.kv_quality.quality import Passes, Sums, compare_logits, report
from pensieve_lab.kv_quality.replies import compared, greedy_replies
from pensieve_lab.kv_quality.texts import Text

FLAGS = flags.FLAGS
_BFLOAT16 = "bfloat16"
_NUM_CONVERSATIONS, _NUM_TURNS, _TURN_TOKENS = 6, 3, 48
_SERVED_REPLY_TOKENS, _CHUNK_TOKENS = 24, 16
_COLUMNS = {
    "perplexity": "perplexity",
    "divergence": "KL from float32",
    "divergence_p99": "KL, 99th percentile",
    "difference_p99": "log-probability, 99th percentile",
    "top_equal_percent": "top token equal, %",
}
_UNITS = {
    "perplexity": "perplexity of the texts' tokens, each after its whole text",
    "more_nats": "nats per token more than with the weights in float32",
    "divergence, divergence_p99": "KL of a next-token distribution from float32's: mean, 99th percentile",
    "difference_p99, rms_difference, max_difference": "differences of log-probabilities of the texts' tokens",
    "top_equal_percent": "tokens whose likeliest next token is the same",
    "interval": "95%, whole texts resampled",
    "identical_percent": "greedy replies that equal float32's to the end",
    "until_first_difference_percent": "share of a reply before its first token that differs from float32's",
    "served": "conversations in pools that hold all of them, and in pools that do not",
}


def models(source: str, names: Sequence[str]) -> dict[str, Model]:
    """Load the model in bfloat16, and in float32 with its weights in each format of `names`."""
    found = {_BFLOAT16: load_model(source, dtype=_BFLOAT16, mesh=make_mesh(1))}
    for name in names:
        found[name] = load_model(source, dtype="float32", mesh=make_mesh(1), weights_dtype=name)
    return found


def measure(plain: Model, others: dict[str, Model], texts: Sequence[Text]) -> dict[str, dict[str, Any]]:
    """Compare the distributions of each model with those of `plain`, token by token."""
    exact_passes, passes = Passes(plain), {name: Passes(model) for name, model in others.items()}
    rows: dict[str, list[list[float]]] = {name: [] for name in others}
    each: dict[str, list[np.ndarray]] = {name: [] for name in others}  # [2, tokens]: difference, divergence
    for text in tqdm(texts, unit="text", disable=not shows_progress()):
        exact = exact_passes.logits(text.token_ids, EXACT)
        num_targets = len(text.token_ids) - 1
        targets = np.pad(text.token_ids[1:], (0, exact.shape[0] - num_targets))
        for name, one in passes.items():
            found = compare_logits(exact, one.logits(text.token_ids, EXACT), targets)
            nats, exact_nats, divergence, top_equal = (
                np.asarray(part, np.float64)[:num_targets] for part in found
            )
            difference = np.abs(nats - exact_nats)
            sums = [part.sum() for part in (nats, exact_nats, divergence, top_equal, difference**2)]
            rows[name].append([num_targets, *map(float, sums), float(difference.max())])
            each[name].append(np.stack([difference, divergence]))
    results = {}
    for name, parts in each.items():
        differences, divergences = np.concatenate(parts, axis=1)
        results[name] = {
            **report(Sums(*np.array(rows[name]).T), FLAGS.seed),
            "difference_p99": float(np.percentile(differences, 99)),
            "divergence_p99": float(np.percentile(divergences, 99)),
        }
    return results


def reply(plain: Model, others: dict[str, Model], texts: Sequence[Text]) -> dict[str, dict[str, float]]:
    """Compare greedy replies of each model with those of `plain`."""
    limit = plain.config.max_position_embeddings - FLAGS.reply_tokens
    prompts = [ids[:start] for ids, start in texts if 0 < start <= limit][: FLAGS.num_replies]
    if not prompts:
        return {}
    exact = greedy_replies(plain, prompts, EXACT, FLAGS.reply_tokens)
    return {
        name: {"num": len(prompts)}
        | compared(exact, greedy_replies(model, prompts, EXACT, FLAGS.reply_tokens))
        for name, model in others.items()
    }


def serve(weights_dtype: str, texts: Sequence[Text]) -> dict[str, Any]:
    """Serve the texts' beginnings in turns, in pools of both sizes; return how many answers differ."""
    turns = [
        [text.token_ids[i * _TURN_TOKENS :][:_TURN_TOKENS].tolist() for i in range(_NUM_TURNS)]
        for text in texts
        if len(text.token_ids) >= _NUM_TURNS * _TURN_TOKENS
    ][:_NUM_CONVERSATIONS]
    context = _NUM_TURNS * (_TURN_TOKENS + _SERVED_REPLY_TOKENS)
    all_pages = len(turns) * -(-context // _CHUNK_TOKENS)
    answers, recomputed = [], 0
    params = SamplingParams(max_tokens=_SERVED_REPLY_TOKENS, ignore_eos=True)
    for num_pages, num_slots in ((all_pages, 0), (max(all_pages // 3, -(-context // _CHUNK_TOKENS)), 2)):
        config = EngineConfig(
            cache=CacheConfig(gpu_pages=num_pages, cpu_pages=num_slots, chunk_tokens=_CHUNK_TOKENS),
            scheduler=SchedulerConfig(
                max_num_running=2,
                max_num_batched_tokens=64,
                token_buckets=(64,),
                max_context_tokens=context,
            ),
            runner=RunnerConfig(weights_dtype=weights_dtype),
        )
        with LLM(FLAGS.model, dtype="float32", config=config, progress=False) as llm:
            found = [
                llm.generate([turn[number]], params, conversation_ids=[str(name)])[0]
                for number in range(_NUM_TURNS)
                for name, turn in enumerate(turns)
            ]
        answers.append([one.token_ids for one in found])
        recomputed = sum(one.usage.recomputed_tokens for one in found)
    num_different = sum(one != other for one, other in zip(*answers, strict=True))
    return {"num_turns": len(answers[0]), "num_different": num_different, "recomputed_tokens": recomputed}


def main() -> int:
    names = list(dict.fromkeys(FLAGS.weights_dtype))
    if not names or not set(names) <= set(WEIGHTS_DTYPES):
        limit = f"one or more of {', '.join(WEIGHTS_DTYPES)}"
        raise ConfigError("--weights_dtype", ",".join(FLAGS.weights_dtype), limit)
    source = resolve_model(FLAGS.model)
    plain = load_model(source, dtype="float32", mesh=make_mesh(1))
    if FLAGS.context_tokens > plain.config.max_position_embeddings:
        limit = f"at most the model's {plain.config.max_position_embeddings}"
        raise ConfigError("--context_tokens", FLAGS.context_tokens, limit)
    texts = load_texts(source, plain, FLAGS.num_texts, FLAGS.context_tokens)
    others = models(source, names)
    results: dict[str, Any] = {
        "model": FLAGS.model,
        "num_texts": len(texts),
        "num_tokens": sum(len(text.token_ids) - 1 for text in texts),
        "formats": measure(plain, others, texts),
        "replies": reply(plain, {name: others[name] for name in names}, texts),
        "served": {name: serve(name, texts) for name in names},
    }
    rows = [[name, *(one[column] for column in _COLUMNS)] for name, one in results["formats"].items()]
    print(table(["weights", *_COLUMNS.values()], rows))
    if results["replies"]:
        columns = ["num", "num_identical", "until_first_difference_percent"]
        rows = [[name, *(one[column] for column in columns)] for name, one in results["replies"].items()]
        print(table(["replies", *columns], rows))
    print(
        table(
            ["served", "turns", "different", "recomputed"],
            [[n, *o.values()] for n, o in results["served"].items()],
        )
    )
    print_document(json_line("measure_weight_quality", results, units=_UNITS, device=device_name()))
    return EXIT_FAILED if any(one["num_different"] for one in results["served"].values()) else 0


def define_flags() -> None:
    define_model_flag()
    flags.DEFINE_string("text", None, "Dialogues (.jsonl, .jsonl.gz) or plain text; default: lines of ours.")
    flags.DEFINE_list("weights_dtype", list(WEIGHTS_DTYPES), f"Formats: {', '.join(WEIGHTS_DTYPES)}.")
    flags.DEFINE_integer("num_texts", 60, "Dialogues, or pieces of a plain text, to measure.", lower_bound=1)
    flags.DEFINE_integer(
        "context_tokens", 512, "Maximum length of texts, which are cut there.", lower_bound=16
    )
    flags.DEFINE_integer("num_replies", 60, "Number of texts for which a reply is generated.", lower_bound=0)
    flags.DEFINE_integer("reply_tokens", 32, "Maximum length of a reply.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Seed of our lines and of resampling.", lower_bound=0)
    flags.DEFINE_bool("progress", None, "Show progress bars; default: on a terminal.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
