"""Settings of the Figure 11 measurements by model and number of devices, and the commands of their parts.

Owns: the flags of the committed documents, the order of load points, which flags go to which part, and the
environment of all.
Does not know: time limits, documents, or a part's results.
Called by `programs.run_figure11` and `parallel.progress`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from absl import flags

from model_defs import PRESETS
from pensieve_jax import ConfigError
from pensieve_jax.commands.engine_flags import engine_config, engine_flag_names, model_limits
from pensieve_lab.parallel.case_flags import CASE_FLAGS
from pensieve_lab.serving.load_points import named_loads

FLAGS = flags.FLAGS
flags.disclaim_key_flags()
type Load = tuple[str, float]
TOKENS, STEPS, LOOPS = "tokens", "steps", "loops"
PARTS = (TOKENS, STEPS, LOOPS)
_PROGRAMS = {TOKENS: "check_parallel", STEPS: "profile_parallel", LOOPS: "benchmark_serving"}
_RANDOM = "random:"

_ALIKE = {
    "dtype": "bfloat16",
    "think": "exponential:20",
    "warm_up_s": 12,
    "window_s": 45,
    "drain_s": 8,
    "max_num_running": 256,
    "max_position_embeddings": 16384,
    "max_num_batched_tokens": 512,
    "token_buckets": "32,64,128,256,512",
    "num_repeats": 4,
}
_OPT = {"max_num_staged_pages": 64}
SETTINGS: dict[tuple[str, int], dict[str, object]] = {
    ("llama2-70b", 2): {
        "gpu_pages": 6103,
        "cpu_bytes": "100GB",
        "loads": "pensieve:2.0,stateless:0.5,pensieve-gpu:1.0,pensieve:1.5,stateless:0.75,pensieve-gpu:1.25,"
        "pensieve:2.5",
    },
    ("llama2-70b", 4): {
        "gpu_pages": 6103,
        "cpu_bytes": "160GB",
        "loads": "stateless:1.0,pensieve:2.5,pensieve-gpu:1.5,stateless:1.5,pensieve:3.5,pensieve-gpu:1.0",
    },
    ("opt-66b", 2): _OPT
    | {
        "gpu_pages": 1589,
        "cpu_bytes": "100GB",
        "loads": "pensieve:0.5,stateless:0.4,pensieve-gpu:0.5,stateless:0.5,pensieve:0.6,pensieve-gpu:0.6",
        "decodes": "32",  # 128 contexts do not fit beside the weights
    },
    ("opt-66b", 4): _OPT
    | {
        "gpu_pages": 1854,
        "cpu_bytes": "200GB",
        "loads": "pensieve:1.1,stateless:0.75,pensieve-gpu:0.9,pensieve:0.9,stateless:0.9,stateless:1.0,"
        "pensieve-gpu:1.0",
    },
}
"""Settings by model and number of devices: memory, and loads in the order of measurement."""
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.94",
}
"""Variables for a model with settings, unless the environment sets them."""

_STEP_FLAGS = (  # engine flags; its sizes follow from the steps
    *("model", "dtype", "tensor_parallel_size", "attention_backend", "all_reduce", "decode_matmul"),
    *("chunk_tokens", "kv_dtype", "num_layer_groups", "random_seed"),
)
_LOOP_FLAGS = (
    *("workload", "num_conversations", "trace", "trace_format", "tokenizer", "think", "time_scale"),
    *("mid_life_s", "seed", "warm_up_s", "window_s", "drain_s", "max_client_lag_s"),
)
_NOT_HERE = (
    *("rates", "seeds", "arrivals", "recorded_arrivals"),
    *("num_turns", "prompt_tokens", "output_tokens"),
)
_NOT_OF_LOOPS = ("compilation_cache_dir", "progress")  # they do not affect figures


def model_name() -> str:
    """Return the model's name for file names."""
    return FLAGS.model.removeprefix(_RANDOM).replace("/", "_")


def settings() -> dict[str, object]:
    """Return the measured settings of the flags' model and devices; may be empty."""
    own = SETTINGS.get((FLAGS.model.removeprefix(_RANDOM), FLAGS.tensor_parallel_size))
    return {} if own is None else _ALIKE | own


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of every part."""
    return {**(ENVIRONMENT if settings() else {}), **variables}


def take_settings() -> None:
    """Use `settings` for flags that were not given; raises ConfigError for invalid combinations."""
    for name, value in settings().items():
        if not (name == "cpu_bytes" and FLAGS.cpu_pages is not None):
            FLAGS.set_default(name, value)
    for name in _NOT_HERE:
        if FLAGS[name].present:
            limit = "left out: points come from --loads, and another --seed needs another document"
            raise ConfigError(f"--{name}", FLAGS[name].value, limit)
    num_devices: int = engine_config().runner.tensor_parallel_size
    if num_devices < 2:
        raise ConfigError("--tensor_parallel_size", num_devices, "at least 2")
    model_limits()
    if not asked_loads():
        known = ", ".join(f"{name} on {count}" for name, count in SETTINGS)
        raise ConfigError("--loads", "", f"given as comma-separated SYSTEM:RATE, except for {known}")


def asked_loads() -> list[Load]:
    """Return the distinct loads of `--loads`, interleaved so that each system gets a point before a second.

    Raises ConfigError.
    """
    return interleaved(list(dict.fromkeys(named_loads())))


def interleaved(loads: Sequence[Load]) -> list[Load]:
    """Return first points of all systems, then second ones; otherwise the order is kept."""
    turn: dict[Load, int] = {}
    counts: dict[str, int] = {}
    for load in loads:
        counts[load[0]] = counts.get(load[0], 0) + 1
        turn[load] = counts[load[0]]
    return sorted(loads, key=lambda load: turn[load])


def load_name(load: Load) -> str:
    """Return the load in the notation of `--loads`."""
    return f"{load[0]}:{load[1]:g}"


def part_flags(part: str) -> list[str]:
    """Return the flags of a part that affect its figures, without `--loads` and output paths."""
    if part == TOKENS:
        model, _ = model_limits()
        tiny = f"{model.architecture}-tiny"
        if tiny not in PRESETS:
            raise ConfigError(
                "--model", FLAGS.model, "of a family with a tiny preset, whose tokens are checked"
            )
        return [f"--model={_RANDOM}{tiny}", f"--tensor_parallel_size={FLAGS.tensor_parallel_size}"]
    if part == STEPS:
        return ["--noapart", "--variants=default", *_given_flags(_STEP_FLAGS + CASE_FLAGS)]
    names = (*engine_flag_names(), *_LOOP_FLAGS)
    return ["--noprogress", *_given_flags(name for name in names if name not in _NOT_OF_LOOPS)]


def command(part: str, document: Path, loads: Sequence[Load], *, max_run_s: float) -> list[str]:
    """Return the command of a part, which writes its document to `document`; loops write a line per load."""
    stored = FLAGS.compilation_cache_dir
    store = [f"--compilation_cache_dir={stored}"] if stored else []
    whole = [sys.executable, "-m", f"pensieve_lab.programs.{_PROGRAMS[part]}", *part_flags(part), *store]
    if part != LOOPS:
        return [*whole, f"--json={document}"]
    return [
        *whole,
        f"--loads={','.join(map(load_name, loads))}",
        f"--max_run_s={max_run_s:.0f}",
        f"--output_json={document}",
    ]


def _given_flags(names: Iterable[str]) -> list[str]:
    """Return the flags that were given or that `settings` set, as they are written."""
    ours = (*settings(), "model", "tensor_parallel_size")
    given = [FLAGS[name] for name in names if FLAGS[name].present or name in ours]
    return [flag.serialize() for flag in given if flag.value is not None]
