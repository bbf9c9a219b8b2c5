"""What it costs to recompute a chunk, by how much context it attends to (the paper's section 4.3.1).

Owns: `Cost(l)`, in seconds, non-decreasing in the context length `l`: a chunk's dense layers cost the
same wherever it stands, its attention grows with what comes before it. That is why leading chunks are
the cheap ones. The built-in model is analytic; a measured one is another `CostModel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class CostModel(Protocol):
    """Seconds to recompute one chunk."""

    def chunk_cost_s(self, context_len: int) -> float:
        """Cost of a chunk that ends at position `context_len`; never decreases with it."""
        ...


@dataclass(frozen=True)
class AnalyticCostModel:
    """Floating-point operations over a device's rate: what there is before anything was measured.

    Attributes:
      chunk_tokens: tokens of a chunk.
      num_weights: parameters of the layers, each a multiply-add a token.
      attention_width: num_layers * num_heads * head_dim; a token does two multiply-adds of this width
        (scores and values) for every token it attends to.
      flop_per_s: the device's rate. It scales every cost alike, so the order of eviction ignores it.
    """

    chunk_tokens: int
    num_weights: float
    attention_width: float
    flop_per_s: float = 4e14

    def chunk_cost_s(self, context_len: int) -> float:
        """Dense operations plus attention over `context_len` tokens, in seconds."""
        flop = 2 * self.num_weights + 4 * self.attention_width * context_len
        return self.chunk_tokens * flop / self.flop_per_s
