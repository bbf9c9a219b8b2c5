"""Flags of the benchmark of padded batches.

Owns: their names, help and checks, and how they become a configuration and loads.
Does not know: what is measured.
"""

from __future__ import annotations

from collections.abc import Callable

from absl import flags

from pensieve_jax.commands.engine_flags import (
    COMPILATION_CACHE_HELP,
    TINY_MODEL,
    define_model_flag,
    num_bytes,
)
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.rebatching import RebatchingConfig
from pensieve_jax.rebatching.ring_shapes import RingShape
from pensieve_lab.rebatching.loads import Load, poisson, table1, table2
from pensieve_lab.workload import Trace, read_trace

FLAGS = flags.FLAGS
flags.disclaim_key_flags()
_PARTS = ("table1", "table2", "load", "steps")
_CONTEXT_OF_TRACES = 2048
_LENGTH_MULTIPLE = 4 * 32  # a quarter of `--length` must be a multiple of 32 columns


def define_rebatching_flags() -> None:
    """Define all flags except `--methods` and `--json`."""
    flags.DEFINE_enum("part", "table2", _PARTS, "Part of the benchmark to run; see above.")
    define_model_flag(TINY_MODEL)
    flags.DEFINE_enum(
        "dtype", "auto", ["auto", "float32", "bfloat16", "float16"], "Data type of weights and KV cache."
    )
    flags.DEFINE_list("max_batch", ["4"], "Batch sizes (rows), measured one after the other.")
    flags.DEFINE_string(
        "kv_bytes",
        None,
        "Device memory for the KV cache; sizes separated by commas are measured one after the other. "
        "Default: 1GiB; with --part=steps, the minimum.",
    )
    flags.DEFINE_string("host_bytes", "4GiB", "Host memory for parked rows.")
    flags.DEFINE_list("lengths", [], "Ring lengths to compile. Default: see RebatchingConfig.")
    flags.DEFINE_float("length_scale", 1.0, "Factor of all lengths of a load.", lower_bound=1e-6)
    flags.DEFINE_boolean(
        "doubled", False, "table1: double the lengths, as in the first row of the paper's Table 1."
    )
    flags.DEFINE_list("seeds", ["0"], "Seeds of lengths, order, arrivals and prompts.")
    flags.DEFINE_list("rates", ["2"], "load: arrivals per second.")
    flags.DEFINE_float("seconds", 5.0, "load: duration of the arrivals.", lower_bound=0.01)
    flags.DEFINE_float("share_urgent", 0.05, "load: share of queries with priority 1.", lower_bound=0.0)
    flags.DEFINE_string("trace", None, "load: file of lengths, e.g. ShareGPT's.")
    flags.DEFINE_string("trace_format", "lengths", "Format of --trace.")
    flags.DEFINE_integer("batch", 4, "steps: rows of the ring.", lower_bound=1)
    flags.DEFINE_integer("length", 512, "steps: columns of the ring.", lower_bound=_LENGTH_MULTIPLE)
    help = "Longest context. Default: that of the load; 2048 for a trace, whose longer queries are left out."
    flags.DEFINE_integer("max_context_tokens", None, help, lower_bound=2)
    flags.DEFINE_integer(
        "max_position_embeddings", None, "Override of the model's number of positions.", lower_bound=2
    )
    flags.DEFINE_integer("prefill_batch", 4, "Maximum number of prompts per prefill program.", lower_bound=1)
    flags.DEFINE_integer(
        "prefill_tokens", 4096, "Maximum tokens of a program with several prompts.", lower_bound=32
    )
    flags.DEFINE_integer(
        "tensor_parallel_size", 1, "Number of devices that share every layer.", lower_bound=1
    )
    flags.DEFINE_string("attention_backend", "auto", "Attention back end of prompts.")
    flags.DEFINE_string("decode_backend", "auto", "Attention back end of decode steps.")
    flags.DEFINE_string("compilation_cache_dir", None, COMPILATION_CACHE_HELP)
    flags.DEFINE_boolean("progress", None, "Show progress bars. Default: on a terminal.")


def numbers(flag: str, at_least: int = 1) -> list[int]:
    """Parse a flag of whole numbers; raises ConfigError for other values."""
    return [int(one) for one in _values(flag, int, at_least)]


def rates() -> list[float]:
    """Parse `--rates`; raises ConfigError."""
    return _values("rates", float, 1e-6)


def loads() -> list[Load]:
    """Make a load per seed, and with `--part=load` per rate and seed; raises ConfigError."""
    seeds = numbers("seeds", 0)
    if FLAGS.part == "table1":
        return [table1(seed, FLAGS.length_scale, doubled=FLAGS.doubled) for seed in seeds]
    if FLAGS.part == "table2":
        return [table2(seed, FLAGS.length_scale) for seed in seeds]
    arriving, trace = rates(), _trace()
    return [
        poisson(
            trace,
            rate=rate,
            seconds=FLAGS.seconds,
            seed=seed,
            share_urgent=FLAGS.share_urgent,
            length_scale=FLAGS.length_scale,
            max_context_tokens=FLAGS.max_context_tokens or _CONTEXT_OF_TRACES,
        )
        for rate in arriving
        for seed in seeds
    ]


def budgets() -> list[int]:
    """Parse `--kv_bytes` for tables and loads; raises ConfigError."""
    return [num_bytes("--kv_bytes", word) for word in (FLAGS.kv_bytes or "1GiB").split(",")]


def config(max_batch: int, kv_bytes: int, max_context_tokens: int) -> RebatchingConfig:
    """Return the base configuration of tables and loads, before a method changes it; raises ConfigError."""
    return _config(
        max_batch=max_batch,
        kv_bytes=kv_bytes,
        lengths=tuple(numbers("lengths", 32)) if FLAGS.lengths else None,
        max_context_tokens=FLAGS.max_context_tokens or max_context_tokens,
    )


def steps_config(token_bytes: int) -> RebatchingConfig:
    """Return the configuration of `--part=steps`: rings of `--length`, a half and a quarter of it."""
    length = FLAGS.length
    if length % _LENGTH_MULTIPLE:
        raise ConfigError("--length", length, f"a multiple of {_LENGTH_MULTIPLE}")
    shape = RingShape(FLAGS.batch, length)
    least = (shape.batch + 1) * shape.length * token_bytes
    given = least if FLAGS.kv_bytes is None else num_bytes("--kv_bytes", FLAGS.kv_bytes)
    if given < least:
        raise ConfigError("--kv_bytes", FLAGS.kv_bytes, f"at least {least:,}, for one row beside {shape}")
    return _config(max_batch=FLAGS.batch, kv_bytes=given, lengths=(length // 4, length // 2, length))


def _config(**values: object) -> RebatchingConfig:
    return RebatchingConfig(
        host_bytes=num_bytes("--host_bytes", FLAGS.host_bytes),
        prefill_batch=FLAGS.prefill_batch,
        prefill_tokens=FLAGS.prefill_tokens,
        attention_backend=FLAGS.attention_backend,
        decode_backend=FLAGS.decode_backend,
        tensor_parallel_size=FLAGS.tensor_parallel_size,
        max_position_embeddings=FLAGS.max_position_embeddings,
        compilation_cache_dir=FLAGS.compilation_cache_dir or None,
        **values,  # type: ignore[arg-type]
    )


def _trace() -> Trace:
    if FLAGS.trace is None:
        raise ConfigError("--trace", None, "a file of lengths, for --part=load")
    try:
        return read_trace(FLAGS.trace, format=FLAGS.trace_format)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError("--trace", FLAGS.trace, "a file that can be read", reason) from error


def _values(flag: str, kind: Callable[[str], float], at_least: float) -> list[float]:
    words: list[str] = getattr(FLAGS, flag)
    try:
        found = [kind(one) for one in words]
    except ValueError:
        found = []
    if not found or min(found) < at_least:
        limit = f"numbers of at least {at_least:g} separated by commas"
        raise ConfigError(f"--{flag}", ",".join(words), limit)
    return found
