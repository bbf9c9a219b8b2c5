"""Runners of one model: weights are loaded once, and programs are compiled for each kind of ring.

Owns: the model, reuse of runners, and the report of device memory and back ends.
Does not know: methods, loads, or what is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from model_defs import ModelConfig, make_mesh, source_config
from model_defs.registry import resolve_dtype
from pensieve_jax.decoding.device.weights import ProgressBar, load_weights, serving_dtype
from pensieve_jax.model_source import resolve_model
from pensieve_jax.rebatching import RebatchingConfig
from pensieve_jax.rebatching.device.runner import DeviceRunner
from pensieve_jax.rebatching.ring_shapes import RingShape
from pensieve_jax.runtime.compilation import keep_compilations_in
from pensieve_lab.rebatching.methods import runner_config

MEMORY_UNITS = {
    "peak_bytes_in_use": "peak of the first device since the process began, other runners included",
    "peak_before_runs_bytes": "peak after the warm-up, which runs every program once",
    "kv_bytes": "budget of the KV cache",
    "max_kv_bytes": "largest KV cache (ring and rows beside it) of any run by the engine's own count; "
    "it must not exceed the budget",
    "layer_bytes": "keys of one layer of the largest ring, which exist twice while its shape changes",
    "temporary_bytes": "largest temporary memory of each kind of program, without inputs and outputs",
    "attention_backend, decode_backend": "attention back ends of prompts and of decode steps, and why",
}
_PROGRAMS = ("decode", "shape", "prefill", "insert", "take_row", "relayout", "choose")


class Runners:
    """Runners of one model.

    Attributes:
      model_config: configuration of the model.
    """

    def __init__(self, model: str | Path, dtype: str, config: RebatchingConfig, *, progress: bool) -> None:
        """Load the weights; `config` says how. Configurations of runners may differ in all other fields.

        Raises:
          ConfigError, model_defs.ModelError: see `PaddedLLM`.
        """
        source = resolve_model(model)
        self.model_config: ModelConfig = source_config(source, config.max_position_embeddings)
        self._progress = progress
        if config.compilation_cache_dir is not None:
            keep_compilations_in(config.compilation_cache_dir)
        self._mesh = make_mesh(config.tensor_parallel_size)
        self._model = load_weights(
            source,
            dtype,
            self._mesh,
            seed=config.random_seed,
            max_position_embeddings=config.max_position_embeddings,
            progress=progress,
        )
        self._dtype = resolve_dtype(serving_dtype(dtype), self.model_config)
        # By whether it is shaped, the latest runner and the configuration that it was compiled for.
        self._kept: dict[bool, tuple[RebatchingConfig, DeviceRunner]] = {}

    def runner(self, config: RebatchingConfig) -> DeviceRunner:
        """Return a warm, empty runner for an engine of `config`; an earlier runner of its kind is reset."""
        wanted = runner_config(config)
        is_shaped = wanted.insertion == "shape"
        kept = self._kept.get(is_shaped)
        if kept is not None and kept[0] == wanted:
            kept[1].reset(())
            return kept[1]
        self._kept.pop(is_shaped, None)
        del kept
        runner = DeviceRunner(self._model, wanted, self._mesh, self._dtype)
        with ProgressBar("compiling", self._progress) as bar:
            runner.warm_up(bar)
        self._kept[is_shaped] = wanted, runner
        return runner


def memory(runner: DeviceRunner, kv_bytes: int) -> dict[str, Any]:
    """Return the back ends, and the process's peak memory of the first device beside the planned memory."""
    return {
        **runner.backends.describe(),
        "peak_bytes_in_use": peak_bytes(),
        "weights_bytes": runner.weights_bytes,
        "kv_bytes": kv_bytes,
        "layer_bytes": max(_layer_bytes(runner, shape) for shape in runner.ring_shapes.shapes),
        "temporary_bytes": _temporary_bytes(runner),
    }


def peak_bytes() -> int | None:
    """Return the process's peak memory of the first device, or None if the device does not report it."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _layer_bytes(runner: DeviceRunner, shape: RingShape) -> int:
    """Return the bytes of one layer's keys on one device, which exist twice while the ring changes."""
    num_columns = shape.batch * shape.length
    return num_columns * runner.storage.token_bytes // (2 * runner.storage.model.num_layers)


def _temporary_bytes(runner: DeviceRunner) -> dict[str, int | None]:
    """Return the largest temporary memory per kind of program; None if it is not reported."""
    found: dict[str, int | None] = {}
    for name in _PROGRAMS:
        programs = getattr(runner.programs, name).values()
        sizes = [_temporaries(one) for one in programs]
        reported = [size for size in sizes if size is not None]
        if sizes:
            found[name] = max(reported) if len(reported) == len(sizes) else None
    return found


def _temporaries(program: Any) -> int | None:
    try:
        return getattr(program.memory_analysis(), "temp_size_in_bytes", None)
    except jax.errors.JaxRuntimeError:  # an executable that was loaded from a file reports no memory
        return None
