"""Gated MLPs of a mixture of experts: each token's row goes through the few experts that it chose."""

from pallas_kernels.grouped_matmul.api import (
    BACKENDS,
    ExpertArgumentError,
    choose_backend,
    device_limit,
    expert_mlp,
    shape_limit,
)
from pallas_kernels.grouped_matmul.groups import GroupedRows, GroupSpec, group_rows, sum_choices
from pallas_kernels.grouped_matmul.tiles import (
    ExpertTile,
    Products,
    block_rows,
    default_products,
    with_long_ring,
)

__all__ = [
    "BACKENDS",
    "ExpertArgumentError",
    "ExpertTile",
    "GroupSpec",
    "GroupedRows",
    "Products",
    "block_rows",
    "choose_backend",
    "default_products",
    "device_limit",
    "expert_mlp",
    "group_rows",
    "shape_limit",
    "sum_choices",
    "with_long_ring",
]
