"""Loading a model's weights onto a mesh, with a progress bar, for any engine.

Owns: the dtype that a model is served with on this platform, and the refusal of weights that do not fit.
Does not know: configurations of engines, or checkpoints (`model_defs.loading`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from model_defs import Model, load_model, parameter_bytes, source_config, source_weights_dtype
from pensieve_jax.runtime.device_memory import check_weights_fit, weights_out_of_memory_as_config_error


def load_weights(
    source: str,
    dtype: str,
    mesh: Mesh,
    *,
    seed: int,
    max_position_embeddings: int | None,
    progress: bool,
    weights_dtype: str | None = None,
) -> Model:
    """Load a model with its arrays on `mesh`.

    Args:
      source: the result of `model_source.resolve_model`.
      dtype: as in `LLM`.
      mesh: mesh with one axis, "tp".
      seed: seed of random weights.
      max_position_embeddings: as in `RunnerConfig`.
      progress: show a progress bar.
      weights_dtype: as in `RunnerConfig`.

    Raises:
      ConfigError: the weights do not fit the device's memory.
      model_defs.ModelError: the checkpoint or the architecture cannot be served.
    """
    devices = list(mesh.devices.flat)
    weights_bytes = parameter_bytes(
        source_config(source, max_position_embeddings),
        dtype=serving_dtype(dtype),
        tensor_parallel_size=len(devices),
        weights_dtype=source_weights_dtype(source, weights_dtype),
    )
    check_weights_fit(source, weights_bytes, devices)
    guard = weights_out_of_memory_as_config_error(source, weights_bytes, devices)
    with guard, ProgressBar("loading weights", progress) as bar:
        return load_model(
            source,
            dtype=serving_dtype(dtype),
            mesh=mesh,
            seed=seed,
            max_position_embeddings=max_position_embeddings,
            weights_dtype=weights_dtype,
            progress=bar,
        )


def serving_dtype(dtype: str) -> str:
    """Return the dtype to load a model with: "auto" is float32 on a CPU, else the checkpoint's choice."""
    return "float32" if dtype == "auto" and jax.default_backend() == "cpu" else dtype


class ProgressBar:
    """A progress bar; call it with (number done, total number, what was done)."""

    def __init__(self, title: str, shown: bool) -> None:
        """Show nothing unless `shown`."""
        self._bar = tqdm(desc=title, disable=not shown, leave=False)

    def __call__(self, num_done: int, num_all: int, name: str) -> None:
        """Set the progress to `num_done` of `num_all`, and show `name`."""
        self._bar.total = num_all
        self._bar.set_postfix_str(name, refresh=False)
        self._bar.update(num_done - self._bar.n)

    def __enter__(self) -> Callable[[int, int, str], None]:
        """Return the bar, to be called."""
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
