"""The project's own kernel as timed programs: its back ends, and the block sizes that `--sweep` tries.

Owns: the tried sizes, and which back ends serve a case here.
Does not know: how a program is timed or checked.
Called by the kernel benchmarks.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.attention_names import COMPILED_BACKENDS
from pallas_kernels.ragged_paged_attention import (
    AttentionArgumentError,
    BlockSizes,
    TileClass,
    TileSpec,
    build_tiles,
    byte_class,
    byte_prompt_class,
    device_limit,
    mosaic_class,
    ragged_paged_attention,
    tile_spec,
)
from pallas_kernels.ragged_paged_attention.backends import TABLE
from pallas_kernels.ragged_paged_attention.shapes import Case
from pensieve_lab.kernels.cases import Inputs
from pensieve_lab.kernels.timing import JaxProgram

BACKENDS: tuple[str, ...] = tuple(name for name in TABLE if name in COMPILED_BACKENDS)  # fastest first

# rows, block_kv, num_warps, num_stages, min_split_kv, target_programs, whole_loop
_SMALL_SWEEP = (
    (16, 32, 2, 4, 256, 2048, True), (16, 32, 2, 4, 256, 4096, True), (16, 32, 2, 4, 256, 8192, True),
    (16, 64, 2, 3, 256, 2048, True), (16, 64, 2, 4, 256, 2048, True), (16, 64, 4, 2, 256, 2048, False),
    (16, 64, 4, 3, 256, 2048, False), (16, 64, 4, 4, 256, 2048, False), (16, 64, 4, 4, 256, 4096, False),
    (16, 128, 4, 2, 256, 2048, False), (16, 128, 4, 2, 256, 2048, True), (16, 128, 4, 3, 256, 2048, False),
    (16, 128, 2, 2, 256, 2048, False), (16, 128, 8, 2, 256, 2048, False), (16, 128, 4, 2, 256, 8192, False),
    (32, 64, 4, 3, 256, 2048, True), (32, 64, 4, 3, 256, 2048, False),
)  # fmt: skip
_LARGE_SWEEP = (
    (128, 64, 8, 3, 1024, 528, True), (128, 64, 8, 2, 1024, 528, True), (128, 64, 8, 4, 1024, 528, True),
    (128, 128, 8, 2, 1024, 528, True), (128, 32, 8, 4, 1024, 528, True), (64, 64, 4, 3, 1024, 528, True),
    (64, 64, 4, 2, 1024, 528, True), (64, 128, 4, 2, 1024, 528, True), (128, 64, 4, 3, 1024, 528, True),
)  # fmt: skip
# rows, block_kv, num_stages, min_split_kv, target_programs
_MOSAIC_SMALL_SWEEP = (
    (64, 128, 3, 256, 264), (64, 64, 5, 256, 264), (64, 128, 3, 256, 132), (64, 64, 6, 256, 264),
    (64, 128, 3, 256, 528), (64, 128, 2, 256, 264),
)  # fmt: skip
# rows, block_kv, num_pairs, num_stages, min_split_kv, target_programs; then without a class for prompts
_BYTE_SWEEP = (
    (8, 64, 2, 6, 256, 264), (8, 64, 3, 3, 256, 396), (8, 128, 1, 6, 256, 132), (8, 128, 2, 2, 256, 264),
    (8, 128, 2, 3, 256, 528), (16, 64, 2, 5, 256, 264),
)  # fmt: skip
_BYTE_PROMPT_SWEEP = (
    (128, 128, 2, 1024, 264), (128, 64, 3, 1024, 264), (128, 64, 2, 1024, 264), (128, 128, 2, 1024, 528),
    (64, 128, 2, 1024, 264), (64, 64, 3, 1024, 264),
)  # fmt: skip
_MOSAIC_LARGE_SWEEP = (
    (128, 128, 2, 1024, 264), (128, 64, 4, 1024, 264), (128, 64, 5, 1024, 264), (128, 64, 3, 1024, 264),
    (128, 128, 2, 1024, 528), (64, 128, 3, 1024, 264),
)  # fmt: skip


def check_backends(names: list[str]) -> None:
    """Raise AttentionArgumentError for an unknown back end, or one that this device does not support."""
    for name in names:
        if name not in ("all", "auto", *BACKENDS):
            raise AttentionArgumentError("--backend", name, f"known are auto, all, {', '.join(BACKENDS)}")
        if name != "all" and (limit := device_limit(name, jax.devices()[0])) is not None:
            raise AttentionArgumentError("--backend", name, f"{limit}; give auto or xla")


def chosen_backends(names: list[str], case: Case, dtype: str, kv_dtype: str | None = None) -> list[str]:
    """Return the distinct back ends that `names` select for a case; "all" selects those that serve it."""
    found = []
    for name in names:
        if name == "all":
            found += _serving(case, dtype, kv_dtype)
        else:
            found.append(make_spec(case, dtype, name, kv_dtype=kv_dtype).backend)
    return list(dict.fromkeys(found))


def _serving(case: Case, dtype: str, kv_dtype: str | None) -> list[str]:
    found = []
    for name in BACKENDS:
        try:
            make_spec(case, dtype, name, kv_dtype=kv_dtype)
        except AttentionArgumentError:
            continue
        if device_limit(name, jax.devices()[0]) is None:
            found.append(name)
    return found


def make_spec(
    case: Case, dtype: str, backend: str, blocks: BlockSizes | None = None, kv_dtype: str | None = None
) -> TileSpec:
    """Return the tile specification of a bucket that matches this case exactly."""
    heads = case.heads
    return tile_spec(
        num_tokens=case.num_tokens, max_num_seqs=len(case.rows), num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, page_size=case.page_size, dtype=dtype,
        backend=backend, blocks=blocks, kv_dtype=kv_dtype, window=case.window,
    )  # fmt: skip


def backend_program(inputs: Inputs, backend: str, blocks: BlockSizes | None = None) -> JaxProgram:
    """Return the project's kernel as a program; its tile list is made on the host, as in a step."""
    spec = make_spec(inputs.case, inputs.q.dtype.name, backend, blocks, inputs.kv_dtype)
    kv_lens, _, cu_q_lens, num_seqs = inputs.rows
    tiles = jnp.asarray(build_tiles(spec, cu_q_lens, kv_lens, num_seqs))

    def attend(q: jax.Array, pool: jax.Array, tiles: jax.Array, *rows: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            q, pool, *rows, sm_scale=inputs.sm_scale, window=spec.window, metadata=(spec, tiles),
            kv_dtype=spec.kv_dtype,
        )  # fmt: skip

    rows = map(jnp.asarray, inputs.rows)
    return JaxProgram(describe(spec.blocks), attend, (inputs.q,), (inputs.pool, tiles, *rows))


def block_variants(case: Case, dtype: str, backend: str, kv_dtype: str | None = None) -> Iterator[BlockSizes]:
    """Yield block sizes to try for the class that does the case's work; the other class keeps its own."""
    spec = make_spec(case, dtype, backend, kv_dtype=kv_dtype)
    default = spec.blocks.classes
    if not default:
        return
    mostly_short = max(q_len for q_len, _ in case.rows) * spec.group <= 32
    tried_classes = [TileClass(*values) for values in (_SMALL_SWEEP if mostly_short else _LARGE_SWEEP)]
    if default[0].in_bytes and mostly_short:
        tried_classes = [byte_class(*values) for values in _BYTE_SWEEP]
        yield BlockSizes(default[:1])
    elif default[0].in_bytes:
        tried_classes = [byte_prompt_class(*values) for values in _BYTE_PROMPT_SWEEP]
    elif TABLE[spec.backend].has_mosaic_tiles and kv_dtype is None:
        sweep = _MOSAIC_SMALL_SWEEP if mostly_short else _MOSAIC_LARGE_SWEEP
        tried_classes = [mosaic_class(*values) for values in sweep]
    for tried in tried_classes:
        others = [c for c in default if (c.rows > tried.rows if mostly_short else c is default[0])]
        classes = sorted({tried, *others}, key=lambda c: c.rows)
        if tried.rows >= spec.group and len({c.rows for c in classes}) == len(classes):
            yield BlockSizes(tuple(classes))


def describe(blocks: BlockSizes) -> str:
    """Return rows x block_kv, warps, stages, smallest split and programs of every class.

    M: Mosaic, B: Mosaic for decoding over bytes, MB: for prompts over bytes.
    """
    return " ".join(
        "M" * c.mosaic
        + "B" * c.in_bytes
        + f"{c.rows}x{c.block_kv}w{c.num_warps}s{c.num_stages}/{c.min_split_kv}/{c.target_programs}"
        + ("" if c.whole_loop else "m")
        for c in blocks.classes
    )
