"""The table of attention back ends, and the choice among them.

Owns: the limits and devices of each back end, and the text of the reason for a choice.
Does not know: how any back end works, or what a tile is.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention_names import AUTO, KV_DTYPES, BackendName
from pallas_kernels.devices import mosaic_device_limit, triton_device_limit
from pallas_kernels.ragged_paged_attention.errors import AttentionArgumentError

DTYPES = ("bfloat16", "float16", "float32")
_TRITON_HEAD_DIMS = (32, 64, 128, 256)
_TRITON_GROUPS = tuple(range(1, 65))
MAX_WINDOW = 2**30
"""Most keys of a window: differences of positions and windows fit 32 bits."""
SCORE_OPTIONS = ("window", "softcap", "sinks")
"""Options of attention that change its scores, under their names in `ragged_paged_attention`."""


def any_device(device: jax.Device) -> None:
    """Return None: the back end runs on every device."""


class ByteLimits(NamedTuple):
    """Limits of a back end's separate kernel for pages in 8 bits; fields as in `AttentionBackend`."""

    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    groups: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """A row of the table.

    Attributes:
      name: name in options.
      module: module of this package that implements it.
      device_limit: returns why it does not run on a device, except in interpret mode; None if it does.
      dtypes: supported dtypes of queries and pages.
      head_dims: supported numbers of elements of a head; None means any.
      groups: supported numbers of query heads per KV head; None means any.
      untried_groups: groups that have not been measured; "auto" skips them unless pages are in 8 bits.
      tried: exceptions from `untried_groups`, each a group and the elements of a head.
      kv_dtypes: formats in which pages may be stored, beside the model's dtype.
      score_options: supported names of `SCORE_OPTIONS`.
      byte_limits: limits for pages in 8 bits; None means the same ones. "auto" accepts all of them, although
        for Mosaic only four query heads per KV head have been measured (docs/kernels.md says why).
      instead: hint for arguments that it does not support.
      has_tiles: it takes tile lists.
      has_mosaic_tiles: some of its tile classes may be Mosaic's.
      auto_place: position in the order of "auto", from 1; None means never.
      package: Python package that it needs beside JAX.
      extra: extra of pensieve-jax that installs this package.
    """

    name: BackendName
    module: str
    device_limit: Callable[[jax.Device], str | None] = any_device
    dtypes: tuple[str, ...] = DTYPES
    head_dims: tuple[int, ...] | None = None
    groups: tuple[int, ...] | None = None
    untried_groups: tuple[int, ...] = ()
    tried: tuple[tuple[int, int], ...] = ()
    kv_dtypes: tuple[str, ...] = KV_DTYPES
    score_options: tuple[str, ...] = SCORE_OPTIONS
    byte_limits: ByteLimits | None = None
    instead: str = ""
    has_tiles: bool = False
    has_mosaic_tiles: bool = False
    auto_place: int | None = None
    package: str | None = None
    extra: str | None = None


# The fastest first. On an H200 the Mosaic kernel takes about 0.7 of the Triton kernel's time for prompts, and
# 0.93 to 0.99 for decoding and short queries. `block_sizes` says which steps it leaves to Triton. It supports
# groups that give a warpgroup a few rows of each head. Padding the group to a power of two may waste at most
# 25% of the rows: more would cost a prompt what the kernel gains. It supports nothing that Triton does not,
# since Triton computes its small tiles.
_ROWS = (
    AttentionBackend(
        name="pallas_mosaic_gpu",
        module="pallas_mosaic_gpu",
        device_limit=mosaic_device_limit,
        dtypes=("bfloat16", "float16"),
        head_dims=(64, 128),
        groups=(1, 2, 3, 4, 6, 7, 8, 12, 13, 14, 15, 16),
        untried_groups=(3, 6, 7, 12, 13, 14, 15),
        tried=((7, 128),),
        byte_limits=ByteLimits(("bfloat16",), (128,), tuple(range(1, 17))),
        score_options=("window", "sinks"),
        instead="use backend 'pallas_triton' or 'xla'",
        has_tiles=True,
        has_mosaic_tiles=True,
        auto_place=1,
    ),
    AttentionBackend(
        name="pallas_triton",
        module="pallas_triton",
        device_limit=triton_device_limit,
        head_dims=_TRITON_HEAD_DIMS,
        groups=_TRITON_GROUPS,
        instead="use backend 'xla'",
        has_tiles=True,
        auto_place=2,
    ),
    AttentionBackend(
        name="jax_triton",
        module="jax_triton",
        device_limit=triton_device_limit,
        head_dims=_TRITON_HEAD_DIMS,
        groups=_TRITON_GROUPS,
        kv_dtypes=(),
        score_options=(),
        instead="use backend 'xla'",
        has_tiles=True,
        package="jax_triton",
        extra="triton",
    ),
    AttentionBackend(name="xla", module="xla", auto_place=3),
    AttentionBackend(name="reference", module="reference"),  # numpy: not inside a jit
)
TABLE: dict[str, AttentionBackend] = {row.name: row for row in _ROWS}
BACKENDS = (AUTO, *TABLE)
AUTO_BACKENDS: tuple[str, ...] = tuple(
    row.name for row in sorted(_ROWS, key=lambda row: row.auto_place or 0) if row.auto_place is not None
)
"""Back ends that "auto" tries, best first; the last one supports everything on every device."""
TILED_BACKENDS: tuple[str, ...] = tuple(row.name for row in _ROWS if row.has_tiles)


@dataclass(frozen=True)
class AttentionHeads:
    """Heads that a back end must support: those of one shard, the queries' dtype, and the format of pages.

    Without a `kv_dtype` pages have the queries' dtype. `window`, `softcap` and `has_sinks` are the options of
    `ragged_paged_attention` that the heads need. Raises AttentionArgumentError if `num_q_heads` is not a
    multiple of `num_kv_heads`, or an option is out of range.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: Any
    kv_dtype: str | None = None
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def __post_init__(self) -> None:
        """Raise AttentionArgumentError for values that no back end can support."""
        if self.num_kv_heads < 1 or self.num_q_heads % self.num_kv_heads:
            limit = f"must be a multiple of num_kv_heads = {self.num_kv_heads}"
            raise AttentionArgumentError("num_q_heads", self.num_q_heads, limit)
        if self.window is not None and not (isinstance(self.window, int) and 1 <= self.window <= MAX_WINDOW):
            limit = f"must be None or an integer from 1 to {MAX_WINDOW}"
            raise AttentionArgumentError("window", self.window, limit)
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise AttentionArgumentError("softcap", self.softcap, "must be None, or positive and finite")

    @property
    def score_options(self) -> dict[str, Any]:
        """The options of `SCORE_OPTIONS` that these heads need, with their values."""
        options = {"window": self.window, "softcap": self.softcap, "sinks": self.has_sinks or None}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    def __str__(self) -> str:
        heads = f"{self.num_q_heads} query heads on {self.num_kv_heads} KV heads of {self.head_dim}"
        stored = "" if self.kv_dtype is None else f", stored as {self.kv_dtype}"
        options = [f"{name} {value}" for name, value in self.score_options.items() if name != "sinks"]
        options += ["sinks"] * self.has_sinks
        return ", ".join([f"{heads} in {jnp.dtype(self.dtype).name}{stored}", *options])


@dataclass(frozen=True)
class BackendChoice:
    """A chosen back end and the reason for the choice.

    Attributes:
      name: name of a row of the table.
      reason: text without a full stop.
    """

    name: str
    reason: str


def choose_backend(
    backend: str, heads: AttentionHeads, device: jax.Device | None = None, *, named_in: str = "backend"
) -> BackendChoice:
    """Return the back end that `backend` means for these heads.

    Args:
      backend: "auto" for the fastest that supports these heads on `device`; or a name of the table, which is
        accepted on any device, since kernels can be interpreted and lowered anywhere.
      heads: heads of one shard.
      device: the device to run on; None means the first one.
      named_in: the option that has the name, for the reason.

    Raises:
      AttentionArgumentError: there is no back end of this name, or it does not support these heads, or with
        "auto" none does.
    """
    limits = BackendLimits(device_limit, _auto_limit if backend == AUTO else heads_limit)
    return choose_among(BACKENDS, AUTO_BACKENDS, limits, backend, heads, device, named_in=named_in)


class BackendLimits(NamedTuple):
    """Functions that return why a back end, given by name, cannot be used; None if it can.

    Attributes:
      of_device: limit of the device, except in interpret mode.
      of_heads: limit of the heads, on any device.
    """

    of_device: Callable[[str, jax.Device], str | None]
    of_heads: Callable[[str, AttentionHeads], AttentionArgumentError | None]


def choose_among(
    known: tuple[str, ...],
    tried: Iterable[str],
    limits: BackendLimits,
    backend: str,
    heads: AttentionHeads,
    device: jax.Device | None,
    *,
    named_in: str,
) -> BackendChoice:
    """Choose as `choose_backend` from any table with the names `known`; "auto" tries `tried` in order."""
    if backend not in known:
        raise AttentionArgumentError("backend", backend, f"must be one of {known}")
    if backend != AUTO:
        if (unsupported := limits.of_heads(backend, heads)) is not None:
            raise unsupported
        return BackendChoice(backend, f"named in {named_in}")
    device = device or jax.devices()[0]
    passed_over = ""
    for name in tried:
        limit = limits.of_device(name, device) or limits.of_heads(name, heads)
        if limit is None:
            reason = f"the fastest that serves {heads} on {device.device_kind}"
            return BackendChoice(name, reason + passed_over)
        passed_over += f"; not {name}: {limit}"
    raise AttentionArgumentError("backend", backend, f"none serves {heads}{passed_over}")


def device_limit(backend: str, device: jax.Device) -> str | None:
    """Return why this back end does not run on `device`, except in interpret mode; None if it does."""
    return None if backend == AUTO else TABLE[backend].device_limit(device)


def heads_limit(backend: str, heads: AttentionHeads) -> AttentionArgumentError | None:
    """Return why this back end does not support these heads on any device; None if it does."""
    row = TABLE[backend]
    if row.package is not None and importlib.util.find_spec(row.package) is None:
        package = row.package.replace("_", "-")
        limit = f"needs the package {package}, which the extra {row.extra!r} of pensieve-jax installs"
        return AttentionArgumentError("backend", backend, limit)
    dtypes, head_dims, groups = row.dtypes, row.head_dims, row.groups
    supports = f"{backend} supports"
    if heads.kv_dtype is not None and row.byte_limits is not None:
        dtypes, head_dims, groups = row.byte_limits
        supports = f"for pages of {heads.kv_dtype} {supports}"
    if (dtype := jnp.dtype(heads.dtype).name) not in dtypes:
        return AttentionArgumentError("dtype", dtype, f"{supports} {dtypes}; {row.instead}")
    if head_dims is not None and heads.head_dim not in head_dims:
        limit = f"{supports} {head_dims}; pad the heads or {row.instead}"
        return AttentionArgumentError("head_dim", heads.head_dim, limit)
    if groups is not None and heads.group not in groups:
        limit = f"{supports} {_numbers(groups)} query heads per KV head; {row.instead}"
        return AttentionArgumentError("num_q_heads / num_kv_heads", heads.group, limit)
    if heads.kv_dtype is not None and heads.kv_dtype not in row.kv_dtypes:
        supported = " or ".join(["the queries' dtype", *row.kv_dtypes])
        return AttentionArgumentError(
            "kv_dtype", heads.kv_dtype, f"{backend} reads {supported}; {row.instead}"
        )
    for name, value in heads.score_options.items():
        if name not in row.score_options:
            return AttentionArgumentError(name, value, f"{backend} does not support it; {row.instead}")
    return None


def _auto_limit(backend: str, heads: AttentionHeads) -> AttentionArgumentError | None:
    """Return as `heads_limit` why "auto" skips a back end. For pages in 8 bits it accepts untried groups."""
    group, row = heads.group, TABLE[backend]
    is_untried = group in row.untried_groups and (group, heads.head_dim) not in row.tried
    if heads.kv_dtype is None and is_untried:
        limit = f"{backend} has not been measured with this many query heads per KV head; name it to use it"
        return AttentionArgumentError("num_q_heads / num_kv_heads", group, limit)
    return heads_limit(backend, heads)


def import_backend(backend: str) -> None:
    """Import the module that a compiled program of this back end needs at run time.

    Lowering a program imports it; a process that loads a compiled program must call this. For example, the
    module of Mosaic sets the environment variable through which its runtime is found.
    """
    if backend != AUTO:
        importlib.import_module(f"{__package__}.{TABLE[backend].module}")


def _numbers(counts: tuple[int, ...]) -> str:
    """Return the numbers as text, or only the largest if they are all numbers from 1 to it."""
    return (
        f"at most {counts[-1]}" if counts == (*range(1, counts[-1] + 1),) and len(counts) > 1 else f"{counts}"
    )
