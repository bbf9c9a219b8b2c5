"""Copies of whole pages between the pools of several layers and arrays that hold one page of all of them."""

from pallas_kernels.page_copies.api import PageCopyError, choose_backend, gather_pages, scatter_pages

__all__ = ["PageCopyError", "choose_backend", "gather_pages", "scatter_pages"]
