"""A chain's cell that computes nothing, for tests of the policy alone, and a request of `num` such cells."""

from __future__ import annotations

from typing import Any, ClassVar

from pensieve_jax.cellular.cells import Int


class Step:
    """Cell of a chain that computes nothing."""

    state: ClassVar = {"x": Int()}
    immediates = ("token",)


STEP = Step()


def chain(num: int, graph: Any) -> None:
    """Unfold a request of `num` cells."""
    graph.returns(graph.chain(STEP, range(num))[-1])
