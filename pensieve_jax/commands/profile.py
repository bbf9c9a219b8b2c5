"""Measure the cost to recompute a chunk by context length: the profile of `Cost(l)` (the paper's 4.3.1).

    pensieve profile --model=random:llama2-13b-gqa10 --dtype=bfloat16 \\
        --output=costs.json --plot=costs.png

This times steps of the real runner that recompute a chunk ending at context length l, for l = one chunk and
its doublings. Sequences grow chunk by chunk, so that attention reads KV cache that the model wrote to
scattered pages. At each l two steps are timed:
  alone     one chunk and nothing else, as in the paper. This mostly reads the weights.
  in_batch  one chunk of each of `--num_batched_chunks` sequences, divided by their number. This is the cost
            of one more chunk in the engine's batches.
Of both steps, the attention of all layers is also timed alone, with the same kernel, pages and work list.
Launches follow each other without waiting, as in the engine. Samples of all steps alternate, and medians
count. `rest` is the whole step minus its attention at the shortest context. `--cost` selects the step that
the cache uses. The program prints a table and, as the last line, one JSON document (see `--json`). Pass the
output file to `CacheConfig.cost_profile`.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from pallas_kernels.attention_names import ATTENTION_BACKENDS, KV_DTYPES
from pensieve_jax.cache.order.cost import COST_KINDS, DEFAULT_COST_KIND
from pensieve_jax.commands.cost_plot import check_can_plot, plot_costs
from pensieve_jax.commands.engine_flags import COMPILATION_CACHE_HELP, define_model_flag, take_model_word
from pensieve_jax.commands.launch import check_can_write
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_jax.config import WEIGHTS_DTYPES
from pensieve_jax.model_source import resolve_model

FLAGS = flags.FLAGS


def check_files() -> None:
    """Raise ConfigError for an output file that cannot be written, before anything is measured."""
    if FLAGS.output is not None:
        check_can_write("--output", Path(FLAGS.output))
    if FLAGS.plot is not None:
        check_can_plot("--plot", Path(FLAGS.plot))


def main() -> int:
    """Measure, print and write the profile; return the exit status."""
    check_files()
    source = resolve_model(FLAGS.model)
    from pensieve_jax.commands.profile_steps import measure_profile  # after the checks, since it imports JAX

    profile, rows = measure_profile(source)
    columns = ["cost", "context_len", "attention ms", "rest ms", "total ms", "spread %"]
    print(table(columns, rows))
    print(f"Cost(l) is {profile.cost}: {COST_KINDS[profile.cost]}")
    if FLAGS.output is not None:
        profile.save(FLAGS.output)
    if FLAGS.plot is not None:
        plot_costs(profile, Path(FLAGS.plot))
    document = profile.to_json()
    units = {**document.pop("units"), "spread_percent": "interquartile range of total_s over its median"}
    document["spread_percent"] = {
        kind: [row[-1] for row in rows if row[0] == kind] for kind in profile.curves
    }
    print_document(json_line("recompute_costs", document, units=units, device=device_name()))
    return 0


def define_flags() -> None:
    """Define the command-line flags of `pensieve profile`."""
    define_model_flag()
    take_model_word()
    flags.DEFINE_enum(
        "dtype",
        "auto",
        ["auto", "float32", "bfloat16", "float16"],
        "Type of weights, and of the KV cache unless --kv_dtype is set.",
    )
    flags.DEFINE_enum("kv_dtype", None, KV_DTYPES, "Type of the KV cache; default: --dtype.")
    flags.DEFINE_enum(
        "weights_dtype", None, WEIGHTS_DTYPES, "Format in 8 bits of the layers' weights; default: --dtype."
    )
    flags.DEFINE_integer("chunk_tokens", 32, "Tokens of a chunk: 16, 32 or 64.", lower_bound=1)
    flags.DEFINE_integer(
        "max_context_tokens", None, "The longest context measured; default: the model's, at most 16,384."
    )
    flags.DEFINE_integer(
        "num_batched_chunks", 16, "Chunks of the larger step, each of a different sequence.", lower_bound=2
    )
    kinds = "; ".join(f"{kind}: {meaning}" for kind, meaning in COST_KINDS.items())
    flags.DEFINE_enum("cost", DEFAULT_COST_KIND, list(COST_KINDS), f"Cost(l) of the cache. {kinds}.")
    flags.DEFINE_string("output", None, "File for the profile, as JSON.")
    flags.DEFINE_string("plot", None, "File for the plot, e.g. costs.png; needs matplotlib.")
    flags.DEFINE_integer("repeats", 9, "Number of samples; the median counts.", lower_bound=1)
    flags.DEFINE_float("sample_ms", 50.0, "Approximate length of a sample, in ms.", lower_bound=0.0)
    flags.DEFINE_enum("attention_backend", "auto", ATTENTION_BACKENDS, "Attention kernel.")
    flags.DEFINE_integer("tensor_parallel_size", 1, "Devices that each layer is split over.", lower_bound=1)
    flags.DEFINE_integer(
        "max_position_embeddings", None, "Context of the model, in tokens; default: its own."
    )
    flags.DEFINE_integer("random_seed", 0, "Seed of random: weights.", lower_bound=0)
    flags.DEFINE_string("compilation_cache_dir", None, COMPILATION_CACHE_HELP)
    flags.DEFINE_bool("progress", None, "Show progress bars; default: on a terminal.")
    define_document_flag()
