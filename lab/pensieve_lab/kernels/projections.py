"""The matrix products of a decoder layer, as one of several devices computes them.

Owns: their names and sizes. Does not know: how a product is computed or timed.
"""

from __future__ import annotations

from typing import NamedTuple

from model_defs import ModelConfig


class Projection(NamedTuple):
    """Matrix product of a layer."""

    name: str
    depth: int
    width: int
    gated: bool = False

    @property
    def num_columns(self) -> int:
        """Columns of the weights."""
        return self.width * (1 + self.gated)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in 16 bits."""
        return 2 * self.depth * self.num_columns


def projections(model: ModelConfig, num_devices: int) -> list[Projection]:
    """Return the projections of a decoder layer, as one of `num_devices` computes them."""
    heads, kv_heads = (num // num_devices * model.head_dim for num in (model.num_heads, model.num_kv_heads))
    wide, gated = model.intermediate_size // num_devices, model.is_gated
    return [
        Projection("gate and up" if gated else "up", model.hidden_size, wide, gated=gated),
        Projection("down", wide, model.hidden_size),
        Projection("qkv", model.hidden_size, heads + 2 * kv_heads),
        Projection("out", heads, model.hidden_size),
    ]
