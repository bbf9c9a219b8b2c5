"""Measures how storing the KV cache in 8 bits changes a model's answers, on your texts.

    python -m pensieve_lab.programs.measure_kv_quality --text=dialogues.jsonl.gz
    python -m pensieve_lab.programs.measure_kv_quality --model=path/to/model --text=book.txt \\
        --context_tokens=2048

The model runs in float32. Its KV cache is stored exactly, in bfloat16, in int8 and e4m3 with a scale for each
token and KV head, and in e4m3 without scales. Each token's distribution after its text is compared with the
exact one, and greedy replies with exact ones. Then outliers are planted: weights are changed so that a
channel of each head is larger, and the function is the same. "int8_balanced" is int8 on weights whose
channels were scaled to similar magnitudes.

`--text` is a file of dialogues (.jsonl, .jsonl.gz; a line is {"turns": [["U", text], ["A", text], ...]}),
which are formatted with the model's chat template, or of plain text, cut into pieces. Without it, the program
uses dialogue lines of ours. The last line is one JSON document (see `--json`); exit status 1 if a planted
outlier changed the function.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from tqdm import tqdm

from model_defs import load_model, make_mesh
from model_defs.registry import Model
from pensieve_jax import ConfigError
from pensieve_jax.commands.engine_flags import define_model_flag, shows_progress
from pensieve_jax.commands.launch import EXIT_FAILED, check_can_write, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_jax.model_source import resolve_model
from pensieve_lab.kv_quality.channels import magnitudes
from pensieve_lab.kv_quality.flags import load_texts, outlier_scales
from pensieve_lab.kv_quality.formats import EXACT, FORMATS
from pensieve_lab.kv_quality.outliers import COMPARED, MAX_LOGIT_DIFFERENCE, Sweep, averages, run_sweep
from pensieve_lab.kv_quality.picture import draw
from pensieve_lab.kv_quality.quality import Passes, Sums, compare, report
from pensieve_lab.kv_quality.replies import compared, greedy_replies
from pensieve_lab.kv_quality.texts import Text

FLAGS = flags.FLAGS
_NUM_CALIBRATION = 4
_NUM_THIRDS = 3
_COLUMNS = {
    "perplexity": "perplexity",
    "more_nats": "more nats/token",
    "divergence": "KL from float32",
    "top_equal_percent": "top token equal, %",
    "rms_difference": "rms",
    "max_difference": "largest",
}
_UNITS = {
    "perplexity": "perplexity of the texts' tokens, each after its whole text",
    "more_nats": "nats per token more than with a float32 KV cache",
    "divergence": "KL of a next-token distribution from that with a float32 KV cache, nats per token",
    "top_equal_percent": "tokens whose likeliest next token is the same",
    "rms_difference, max_difference": "differences of log-probabilities of the texts' tokens",
    "interval": "95%, whole texts resampled",
    "thirds": "divergence of three disjoint thirds of the texts",
    "identical_percent": "greedy replies that equal float32's to the end",
    "until_first_difference_percent": "share of a reply before its first token that differs from float32's",
    "magnitudes": "maximum of a head's largest channel over that of its median channel",
    "outliers": "a row per model: part and scale say what was planted, seed in which channels; "
    "max_logit_difference is with a float32 KV cache, from the original model",
    "mean_outliers": "[mean, smallest, largest] divergence over the seeds",
}


def measured_texts(source: str, model: Model, context_tokens: int) -> list[Text]:
    """Return texts for calibration, followed by those to measure; raises ConfigError and a tokenizer's
    errors."""
    texts = load_texts(source, model, _NUM_CALIBRATION + FLAGS.num_texts, context_tokens)
    if len(texts) <= _NUM_CALIBRATION:
        limit = f"a file of more than {_NUM_CALIBRATION} texts of {context_tokens} tokens or less"
        raise ConfigError("--text", FLAGS.text, limit, "the first {_NUM_CALIBRATION} texts only calibrate")
    return texts


def measure(model: Model, texts: Sequence[Text]) -> dict[str, dict[str, Any]]:
    """Measure every format over the texts."""
    with tqdm(total=len(texts) * (1 + len(FORMATS)), unit="pass", disable=not shows_progress()) as bar:
        found = compare(Passes(model), texts, FORMATS, bar.update)
    results = {}
    for name, sums in found.items():
        thirds = [Sums(*(part[i::_NUM_THIRDS] for part in sums)) for i in range(_NUM_THIRDS)]
        each = [float(one.divergence.sum() / one.tokens.sum()) for one in thirds if len(one.tokens)]
        results[name] = {**report(sums, FLAGS.seed), "thirds": each}
    exact = next(iter(found.values()))
    results[EXACT] = {"perplexity": float(np.exp(exact.exact_nats.sum() / exact.tokens.sum()))}
    return results


def reply(model: Model, texts: Sequence[Text]) -> dict[str, dict[str, float]]:
    """Compare greedy replies in every format with exact ones."""
    limit = model.config.max_position_embeddings - FLAGS.reply_tokens
    prompts = [ids[:start] for ids, start in texts if 0 < start <= limit][: FLAGS.num_replies]
    if not prompts:
        return {}
    names = (EXACT, *FORMATS)
    with tqdm(total=len(prompts) * len(names), unit="reply", disable=not shows_progress()) as bar:
        replies = {
            name: greedy_replies(model, prompts, name, FLAGS.reply_tokens, bar.update) for name in names
        }
    return {name: {"num": len(prompts), **compared(replies[EXACT], replies[name])} for name in FORMATS}


def plant(model: Model, sweep: Sweep) -> list[dict[str, Any]]:
    """Run the whole sweep of planted outliers."""
    with tqdm(total=sweep.num_passes, unit="pass", disable=not shows_progress()) as bar:
        return run_sweep(model, sweep, bar.update)


def print_tables(results: dict[str, Any]) -> None:
    """Print figures of each format, of replies, and of planted outliers."""
    formats, replies = results["formats"], results["replies"]
    rows = [[name, *(formats[name][column] for column in _COLUMNS)] for name in FORMATS]
    print(f"float32 KV cache: perplexity {formats[EXACT]['perplexity']:.4f}")
    print(table(["stored as", *_COLUMNS.values()], rows))
    if replies:
        print(table(["replies", *replies["int8"]], [[name, *one.values()] for name, one in replies.items()]))
    print("largest channel over the median one:", results["magnitudes"])
    rows = [[p["part"], p["scale"], *(p[name][0] for name in COMPARED)] for p in results["mean_outliers"]]
    print(table(["KL with outliers in", "times", *COMPARED], rows))


def _draw(points: Sequence[dict[str, Any]]) -> None:
    """Draw the picture; if that fails, the figures are still reported."""
    try:
        draw(points, f"Planted outliers, {FLAGS.model}", Path(FLAGS.plot))
    except (ImportError, OSError) as error:
        print(f"no picture: {error}")


def main() -> int:
    scales = [scale for scale in outlier_scales() if scale != 1]  # the unchanged model is measured anyway
    if FLAGS.plot:
        check_can_write("--plot", Path(FLAGS.plot))
    source = resolve_model(FLAGS.model)
    model = load_model(source, dtype="float32", mesh=make_mesh(1))
    context_tokens = FLAGS.context_tokens
    if context_tokens > model.config.max_position_embeddings:
        limit = f"at most the model's {model.config.max_position_embeddings}"
        raise ConfigError("--context_tokens", context_tokens, limit)
    every = measured_texts(source, model, context_tokens)
    texts = every[_NUM_CALIBRATION:]
    shortest = min(len(text.token_ids) for text in every[:_NUM_CALIBRATION])
    calibration = [text.token_ids[:shortest] for text in every[:_NUM_CALIBRATION]]
    sweep = Sweep(texts[: FLAGS.num_outlier_texts], calibration, scales, FLAGS.num_seeds)
    results: dict[str, Any] = {
        "num_texts": len(texts),
        "num_tokens": sum(len(text.token_ids) - 1 for text in texts),
        "num_outlier_texts": len(sweep.texts),
        "formats": measure(model, texts),
        "replies": reply(model, texts),
        "magnitudes": magnitudes(model, calibration).outliers(),
        "outliers": plant(model, sweep),
    }
    results["mean_outliers"] = averages(results["outliers"])
    print_tables(results)
    moved = max((row.get("max_logit_difference", 0.0) for row in results["outliers"]), default=0.0)
    results["max_logit_difference"] = moved
    is_missed = not moved <= MAX_LOGIT_DIFFERENCE
    if is_missed:
        print(f"missed: planted outliers change float32 logits by more than {MAX_LOGIT_DIFFERENCE}")
    if FLAGS.plot:
        _draw(results["mean_outliers"])
    print_document(json_line("measure_kv_quality", results, units=_UNITS, device=device_name()))
    return EXIT_FAILED if is_missed else 0


def define_flags() -> None:
    define_model_flag()
    flags.DEFINE_string("text", None, "Dialogues (.jsonl, .jsonl.gz) or plain text; default: lines of ours.")
    flags.DEFINE_integer("num_texts", 60, "Dialogues, or pieces of a plain text, to measure.", lower_bound=1)
    flags.DEFINE_integer(
        "context_tokens", 512, "Maximum length of texts, which are cut there.", lower_bound=16
    )
    flags.DEFINE_integer("num_replies", 60, "Number of texts for which a reply is generated.", lower_bound=0)
    flags.DEFINE_integer("reply_tokens", 32, "Maximum length of a reply.", lower_bound=1)
    flags.DEFINE_list("outlier_scales", ["4", "16", "64"], "Factors of planted channels.")
    flags.DEFINE_integer(
        "num_outlier_texts", 12, "Number of texts measured with planted outliers.", lower_bound=1
    )
    flags.DEFINE_integer("num_seeds", 3, "Random choices of the channels per scale.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Seed of our lines and of resampling.", lower_bound=0)
    flags.DEFINE_string("plot", None, "File for a plot of outliers, e.g. kv.png; needs matplotlib.")
    flags.DEFINE_bool("progress", None, "Show progress bars; default: on a terminal.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
