"""Products of few rows with weights kept in 8 bits, bound by the bandwidth of device memory."""

from pallas_kernels.byte_matmul.api import (
    BACKENDS,
    CODE_DTYPES,
    GATES,
    MAX_ROWS,
    ByteMatmulArgumentError,
    byte_matmul,
    choose_backend,
    supports,
)
from pallas_kernels.byte_matmul.tiles import ByteTile, default_tile

__all__ = [
    "BACKENDS",
    "CODE_DTYPES",
    "GATES",
    "MAX_ROWS",
    "ByteMatmulArgumentError",
    "ByteTile",
    "byte_matmul",
    "choose_backend",
    "default_tile",
    "supports",
]
