"""Back ends of ring attention, and the choice between them.

Owns: the limits and devices of each back end, and the text of the reason for a choice.
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
      name: name in options.
      device_limit: returns why it does not run on a device, except in interpret mode; None if it does.
      dtypes: supported dtypes of queries, keys and values; None means any.
      head_dims: supported numbers of elements of a head; None means any.
      groups: supported numbers of query heads per KV head; None means any.
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
"""Back ends in the order in which "auto" tries them. The kernel reads only a row's own columns; plain XLA
reads the whole ring and runs on any device."""


def choose_backend(
    backend: str, heads: AttentionHeads, device: jax.Device | None = None, *, named_in: str = "backend"
) -> BackendChoice:
    """Return the back end that `backend` means for these heads.

    Args:
      backend: "auto" for the first that supports these heads on `device`; or a name of the table, which is
        accepted on any device, since kernels can be interpreted and lowered anywhere.
      heads: heads of one shard.
      device: the device to run on; None means the first one.
      named_in: the option that has the name, for the reason.

    Raises:
      AttentionArgumentError: there is no back end of this name, or it does not support these heads.
    """
    limits = BackendLimits(device_limit, _heads_limit)
    return choose_among(BACKENDS, TABLE, limits, backend, heads, device, named_in=named_in)


def device_limit(backend: str, device: jax.Device) -> str | None:
    """Return why this back end does not run on `device`, except in interpret mode; None if it does."""
    return None if backend == AUTO else TABLE[backend].device_limit(device)


def _heads_limit(backend: str, heads: AttentionHeads) -> AttentionArgumentError | None:
    """Return why this back end does not support these heads on any device; None if it does."""
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
            return AttentionArgumentError(field, value, f"{row.name} supports {words}; use backend 'xla'")
    return None
