"""Public interface of the sampling cutoffs: argument checks and choice of the back end.

Owns: the definition of a cutoff. Does not know: temperatures, noise, or how scores become keys and masses.

A row's *keys* are its scores as integers with the same order. Its *masses* are the probabilities of its ids,
in units of 2**-24 of the most likely one. Top-k keeps the k largest keys and all ties of the k-th. Of
these, top-p keeps the largest ones, as few as have the fraction p of their total mass, and ties of the last.
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp

from pallas_kernels.devices import triton_device_limit
from pallas_kernels.sampling_cutoffs.rule import MASS_BITS, MAX_VOCAB_SIZE
from pallas_kernels.sampling_cutoffs.xla import xla_cutoffs

__all__ = ["MASS_BITS", "MAX_VOCAB_SIZE", "CutoffArgumentError", "choose_backend", "cutoffs"]

_BACKENDS = ("xla", "pallas_triton")


class CutoffArgumentError(ValueError):
    """Error of an argument that no back end supports; the message names the argument and its limit."""


def choose_backend(device: jax.Device) -> str:
    """Return the fastest back end on `device`."""
    return "pallas_triton" if triton_device_limit(device) is None else "xla"


def cutoffs(
    keys: Annotated[jax.Array, "u32[S, V]"],
    masses: Annotated[jax.Array, "u32[S, V]"],
    top_k: Annotated[jax.Array, "i32[S]"],
    top_p: Annotated[jax.Array, "f32[S]"],
    *,
    backend: str = "xla",
    interpret: bool = False,
) -> Annotated[jax.Array, "u32[S]"]:
    """Return the smallest key per row that both top-k and top-p keep; 0 for a row that keeps every key.

    All back ends return the same bits.

    Args:
      keys: u32[S, V], V at most 2**19.
      masses: u32[S, V], at most 2**24 each.
      top_k: i32[S]; 0 disables top-k, and a value of at least V keeps every id.
      top_p: f32[S]; 1 disables top-p; any lower value keeps at least one id with a mass above 0.
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
        # Imported here, because JAX has deprecated Pallas' Triton back end: no other import may need it.
        from pallas_kernels.sampling_cutoffs.pallas_triton import triton_cutoffs

        return triton_cutoffs(keys, masses, top_k, top_p, interpret=interpret)
    return xla_cutoffs(keys, masses, top_k, top_p)


def _check(keys: jax.Array, masses: jax.Array, top_k: jax.Array, top_p: jax.Array) -> None:
    if keys.ndim != 2 or not (keys.size and keys.shape[1] <= MAX_VOCAB_SIZE):
        raise CutoffArgumentError(
            f"keys are {keys.shape}, but must be [S, V], S at least 1, V from 1 to {MAX_VOCAB_SIZE}"
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
