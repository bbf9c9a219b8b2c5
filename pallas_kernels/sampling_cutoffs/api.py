"""Public call of the sampling cutoffs: argument checks and choice of the back end.

Owns: the definition of a cutoff. Does not know: temperatures, noise, or how scores become keys and masses.

A row's *keys* are its scores as integers with the same order. Its *masses* are the probabilities of its ids,
in units of 2**-24 of the most likely one. Top-k keeps the k largest keys and all that tie with the last of
them. Of these, top-p keeps the largest that have at least the fraction p of their mass, and all ties.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.devices import triton_device_limit
from pallas_kernels.sampling_cutoffs.rule import MASS_BITS, MAX_VOCAB_SIZE
from pallas_kernels.sampling_cutoffs.xla import xla_cutoffs

__all__ = ["MASS_BITS", "MAX_VOCAB_SIZE", "CutoffArgumentError", "choose_backend", "cutoffs"]

_BACKENDS = ("xla", "pallas_triton")


class CutoffArgumentError(ValueError):
    """An argument is not supported by any back end; the message names it and the limit."""


def choose_backend(device: jax.Device) -> str:
    """Return the fastest back end on `device`."""
    return "pallas_triton" if triton_device_limit(device) is None else "xla"


def cutoffs(
    keys: jax.Array,
    masses: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    *,
    backend: str = "xla",
    interpret: bool = False,
) -> jax.Array:
    """Return per row the least key that both cuts keep; 0 where nothing is cut.

    All back ends return the same bits.

    Args:
      keys: u32[S, V], V at most 2**19.
      masses: u32[S, V], at most 2**24 each.
      top_k: i32[S]; 0 disables it, and more than V cuts nothing.
      top_p: f32[S]; 1 disables it, and any lower value keeps at least one id that has mass.
      backend: "xla" or "pallas_triton"; see `choose_backend`.
      interpret: run the Triton kernel without a GPU, slowly.

    Returns:
      u32[S].

    Raises:
      CutoffArgumentError: shapes or dtypes do not match, or the back end is unknown.
    """
    _check(keys, masses, top_k, top_p)
    if backend not in _BACKENDS:
        raise CutoffArgumentError(f"backend is {backend!r}, but must be one of {_BACKENDS}")
    if backend == "pallas_triton":
        # Imported late: upstream has deprecated this back end, and only its own file may depend on it.
        from pallas_kernels.sampling_cutoffs.pallas_triton import triton_cutoffs

        return triton_cutoffs(keys, masses, top_k, top_p, interpret=interpret)
    return xla_cutoffs(keys, masses, top_k, top_p)


def _check(keys: jax.Array, masses: jax.Array, top_k: jax.Array, top_p: jax.Array) -> None:
    if keys.ndim != 2 or not (keys.size and keys.shape[1] <= MAX_VOCAB_SIZE):
        raise CutoffArgumentError(
            f"keys are {keys.shape}, but must be one row or more, each of 1 to {MAX_VOCAB_SIZE} ids"
        )
    wanted = {
        "keys": (keys, keys.shape, jnp.uint32),
        "masses": (masses, keys.shape, jnp.uint32),
        "top_k": (top_k, keys.shape[:1], jnp.int32),
        "top_p": (top_p, keys.shape[:1], jnp.float32),
    }
    for name, (array, shape, dtype) in wanted.items():
        if array.shape != shape or array.dtype != dtype:
            found = f"{array.dtype.name}{list(array.shape)}"
            raise CutoffArgumentError(f"{name} are {found}, but must be {jnp.dtype(dtype).name}{list(shape)}")
