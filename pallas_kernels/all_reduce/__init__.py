"""Sums of partial products over devices that see each other's memory, also with the norm that follows.

A few rows are summed in the time that it takes to write them to the peer and see what came: no library call,
and no kernel between. Of many rows each device sums and norms its share, and writes it to all.
`ExchangeMemory` is what devices write to; the rest is called inside `shard_map`. docs/kernels.md
"""

from pallas_kernels.all_reduce.affine import Affine
from pallas_kernels.all_reduce.api import (
    SumArgumentError,
    devices_limit,
    shares_are_faster,
    sum_and_norm,
    sum_and_norm_of_shares,
    sum_over_devices,
    supports,
    supports_shares,
)
from pallas_kernels.all_reduce.memory import ExchangeMemory
from pallas_kernels.all_reduce.specs import MAX_DEVICES, MAX_ROW_BYTES, MAX_ROWS, fits_in_peer_buffers

__all__ = [
    "MAX_DEVICES",
    "MAX_ROWS",
    "MAX_ROW_BYTES",
    "Affine",
    "ExchangeMemory",
    "SumArgumentError",
    "devices_limit",
    "fits_in_peer_buffers",
    "shares_are_faster",
    "sum_and_norm",
    "sum_and_norm_of_shares",
    "sum_over_devices",
    "supports",
    "supports_shares",
]
