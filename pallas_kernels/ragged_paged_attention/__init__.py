"""Causal attention of ragged query ranges over a paged KV pool, and the writes to that pool."""

from pallas_kernels.ragged_paged_attention.api import PAGE_SIZES, ragged_paged_attention, tile_spec
from pallas_kernels.ragged_paged_attention.backends import (
    BACKENDS,
    AttentionHeads,
    BackendChoice,
    choose_backend,
    device_limit,
    import_backend,
)
from pallas_kernels.ragged_paged_attention.block_sizes import (
    BlockSizes,
    TileClass,
    byte_class,
    byte_prompt_class,
    mosaic_class,
)
from pallas_kernels.ragged_paged_attention.errors import AttentionArgumentError
from pallas_kernels.ragged_paged_attention.kv_write import write_kv
from pallas_kernels.ragged_paged_attention.metadata import build_tiles
from pallas_kernels.ragged_paged_attention.page_formats import page_dtype, page_shape, stored_as
from pallas_kernels.ragged_paged_attention.tile_specs import TileSpec

__all__ = [
    "BACKENDS",
    "PAGE_SIZES",
    "AttentionArgumentError",
    "AttentionHeads",
    "BackendChoice",
    "BlockSizes",
    "TileClass",
    "TileSpec",
    "build_tiles",
    "byte_class",
    "byte_prompt_class",
    "choose_backend",
    "device_limit",
    "import_backend",
    "mosaic_class",
    "page_dtype",
    "page_shape",
    "ragged_paged_attention",
    "stored_as",
    "tile_spec",
    "write_kv",
]
