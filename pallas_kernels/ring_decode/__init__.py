"""Attention of one query per row over a ring of columns; each row owns the columns up to the newest."""

from pallas_kernels.ring_decode.api import ring_decode_attention
from pallas_kernels.ring_decode.backends import BACKENDS, TABLE, choose_backend, device_limit
from pallas_kernels.ring_decode.blocks import DecodeBlock, default_block
from pallas_kernels.ring_decode.xla import masked_attention

__all__ = [
    "BACKENDS",
    "TABLE",
    "DecodeBlock",
    "choose_backend",
    "default_block",
    "device_limit",
    "masked_attention",
    "ring_decode_attention",
]
