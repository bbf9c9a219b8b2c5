"""Products of few rows with large weights, bound by the bandwidth of device memory."""

from pallas_kernels.decode_matmul.api import (
    BACKENDS,
    GATES,
    MAX_ROWS,
    MatmulArgumentError,
    choose_backend,
    decode_matmul,
    device_limit,
    supports,
)
from pallas_kernels.decode_matmul.tiles import MatmulTile, default_tile

__all__ = [
    "BACKENDS",
    "GATES",
    "MAX_ROWS",
    "MatmulArgumentError",
    "MatmulTile",
    "choose_backend",
    "decode_matmul",
    "default_tile",
    "device_limit",
    "supports",
]
