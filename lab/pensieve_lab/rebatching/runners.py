"""Runners of one model: its weights are loaded once, and programs are compiled for each kind of ring.

Owns: the model, which runner can be used again, and what is said of the device's memory and of back ends.
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
    "peak_bytes_in_use": "of the first device, the most since the process began, other runners included",
    "peak_before_runs_bytes": "the same behind the start, which runs every program once",
    "kv_bytes": "the budget",
    "max_kv_bytes": "the most that the ring and rows beside it took in any run, by the engine's own count; "
    "no run may exceed the budget",
    "layer_bytes": "keys of one layer of the largest ring: what is there twice while its shape changes",
    "temporary_bytes": "of each kind of program the most that one needs beside what it reads and gives",
    "attention_backend, decode_backend": "what computed attention of prompts and of steps, and why that",
}
_PROGRAMS = ("decode", "shape", "prefill", "insert", "take_row", "relayout", "choose")


class Runners:
    """Of one model.

    Attributes:
      model_config: what the model is.
    """

    def __init__(self, model: str | Path, dtype: str, config: RebatchingConfig, *, progress: bool) -> None:
        """Load the weights; `config` says how, and of it other configurations may change all else.

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
        # The last of each kind, with what it was compiled for.
        self._kept: dict[bool, tuple[RebatchingConfig, DeviceRunner]] = {}

    def runner(self, config: RebatchingConfig) -> DeviceRunner:
        """One that is warm and empty, for an engine of `config`; what ran on it before is lost."""
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
    """The most that the process ever took of the first device, where it tells, beside what was meant.

    And by which back ends.
    """
    return {
        **runner.backends.describe(),
        "peak_bytes_in_use": peak_bytes(),
        "weights_bytes": runner.weights_bytes,
        "kv_bytes": kv_bytes,
        "layer_bytes": max(_layer_bytes(runner, shape) for shape in runner.ring_shapes.shapes),
        "temporary_bytes": _temporary_bytes(runner),
    }


def peak_bytes() -> int | None:
    """The most that the process ever took of the first device, where it tells."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _layer_bytes(runner: DeviceRunner, shape: RingShape) -> int:
    """Keys, or values, of one layer on one device: what is there twice while the ring changes."""
    num_columns = shape.batch * shape.length
    return num_columns * runner.storage.token_bytes // (2 * runner.storage.model.num_layers)


def _temporary_bytes(runner: DeviceRunner) -> dict[str, int | None]:
    """Of each kind of program the most that one needs beside what it reads and gives; None: not told."""
    found: dict[str, int | None] = {}
    for name in _PROGRAMS:
        programs = getattr(runner.programs, name).values()
        sizes = [_temporaries(one) for one in programs]
        told = [size for size in sizes if size is not None]
        if sizes:
            found[name] = max(told) if len(told) == len(sizes) else None
    return found


def _temporaries(program: Any) -> int | None:
    try:
        return getattr(program.memory_analysis(), "temp_size_in_bytes", None)
    except jax.errors.JaxRuntimeError:  # of an executable that was read from a file, where they cannot tell
        return None
