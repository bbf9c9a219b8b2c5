"""Shared memory for lane programs that are computed for all lanes outside of a kernel."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


class Memory:
    """Array that is read and written as a whole, like a reference."""

    def __init__(self, array: Any) -> None:
        self.array = jnp.asarray(array)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __getitem__(self, _: Any) -> Any:
        return self.array

    def __setitem__(self, _: Any, array: Any) -> None:
        assert array.shape == self.array.shape and array.dtype == self.array.dtype
        self.array = array
