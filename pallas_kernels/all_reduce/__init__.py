"""All-reduce of partial products over GPUs that access each other's memory, optionally with a norm.

Few rows take one exchange: each device writes its rows to all peers and sums what arrives, without a library
call and without another kernel. For many rows each device sums and norms a share, and writes it to all peers.
Devices write to `ExchangeMemory`. Call the functions inside `shard_map`. See docs/kernels.md.
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
