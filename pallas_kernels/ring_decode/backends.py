"""The back ends of attention over a ring, and the choice between them.

Owns: what each serves and on which devices, and the words that say why one was chosen.
Does not know: how any of them works.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention_names import AUTO, RING_DECODE_BACKENDS
from pallas_kernels.devices import triton_device_limit
from pallas_kernels.ragged_paged_attention.backends import (
    AttentionHeads,
    BackendChoice,
    BackendLimits,
    any_device,
    choose_among,
)
from pallas_kernels.ragged_paged_attention.errors import AttentionArgumentError

BACKENDS = RING_DECODE_BACKENDS


class RingDecodeBackend(NamedTuple):
    """A row of the table.

    Attributes:
      name: what people ask for.
      device_limit: why it does not run on a device, except in interpret mode; None: it does.
      dtypes: of queries, keys and values that it serves; None: any.
      head_dims: elements of a head that it serves; None: any.
      groups: query heads per KV head that it serves; None: any.
    """

    name: str
    device_limit: Callable[[jax.Device], str | None] = any_device
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    groups: tuple[int, ...] | None = None


TABLE: dict[str, RingDecodeBackend] = {
    row.name: row
    for row in (
        RingDecodeBackend(
            name="pallas_triton",
            device_limit=triton_device_limit,
            dtypes=("bfloat16", "float16", "float32"),
            head_dims=(32, 64, 128, 256),
            groups=tuple(range(1, 65)),
        ),
        RingDecodeBackend(name="xla"),
    )
}
"""As "auto" tries them: the kernel reads a row's own columns, plain XLA the whole ring, on any device."""


def choose_backend(
    backend: str, heads: AttentionHeads, device: jax.Device | None = None, *, named_in: str = "backend"
) -> BackendChoice:
    """The back end that `backend` means for these heads.

    Args:
      backend: a name of the table, which is taken on any device, since kernels can be interpreted and lowered
        anywhere; or "auto": the first that serves these heads on `device`.
      heads: of one shard.
      device: where it runs; None: the first one.
      named_in: where the name was given, for the reason.

    Raises:
      AttentionArgumentError: there is no back end of this name, or it does not serve these heads.
    """
    limits = BackendLimits(device_limit, _heads_limit)
    return choose_among(BACKENDS, TABLE, limits, backend, heads, device, named_in=named_in)


def device_limit(backend: str, device: jax.Device) -> str | None:
    """Why the back end of this name does not run on `device`, except in interpret mode; None: it does."""
    return None if backend == AUTO else TABLE[backend].device_limit(device)


def _heads_limit(backend: str, heads: AttentionHeads) -> AttentionArgumentError | None:
    """Why the back end of this name cannot serve these heads, wherever it runs; None: it can."""
    row = TABLE[backend]
    checks: tuple[tuple[str, Any, tuple[Any, ...] | None, str], ...] = (
        ("dtype", jnp.dtype(heads.dtype).name, row.dtypes, f"{row.dtypes}"),
        ("head_dim", heads.head_dim, row.head_dims, f"{row.head_dims}"),
        (
            "num_q_heads / num_kv_heads",
            heads.group,
            row.groups,
            f"at most {row.groups[-1]} query heads per KV head" if row.groups else "",
        ),
    )
    for field, value, supported, words in checks:
        if supported is not None and value not in supported:
            return AttentionArgumentError(field, value, f"{row.name} serves {words}; use backend 'xla'")
    return None
