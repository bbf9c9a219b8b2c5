"""Copies of whole pages between the pools of several layers and arrays that hold one page of all layers.

Such an array holds the page unchanged or packed.
"""

from pallas_kernels.page_copies.api import PageCopyError, choose_backend, gather_pages, scatter_pages
from pallas_kernels.page_copies.packed_copies import gather_packed, scatter_packed
from pallas_kernels.page_copies.packing import PackedTile, packed_tile

__all__ = [
    "PackedTile",
    "PageCopyError",
    "choose_backend",
    "gather_packed",
    "gather_pages",
    "packed_tile",
    "scatter_packed",
    "scatter_pages",
]
