"""A turn that has ended, as the history tells it.

Owns: how a record becomes the output that its replica did not live to send.
Does not know: replicas, or when somebody asks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from pensieve_jax.core.errors import UnknownTurnError
from pensieve_jax.core.outputs import FinishReason, Output, Usage
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.history.reader import HistoryReader, TurnView
from pensieve_jax.server.workers import far


def kept_outputs(reader: HistoryReader) -> Callable[[TurnSpec], Awaitable[Output | None]]:
    """What finds the output of a turn in a history; it raises HistoryError."""

    async def kept(spec: TurnSpec) -> Output | None:
        node = spec.node
        if node is None or not node.durable:
            return None
        try:
            view = await far(node.owner, reader.turn, node.owner, node.turn_id)
        except UnknownTurnError:
            return None
        return output_of(view, spec)

    return kept


def output_of(view: TurnView, spec: TurnSpec) -> Output:
    """The output of a committed turn; log-probabilities are not kept."""
    usage = view.usage or Usage(
        prompt_tokens=len(spec.prompt_token_ids),
        reused_gpu_tokens=0,
        swapped_in_tokens=0,
        recomputed_tokens=0,
        prefilled_tokens=view.num_tokens - len(view.output_token_ids),
        output_tokens=len(view.output_token_ids),
    )
    return Output(
        conversation_id=None,
        token_ids=view.output_token_ids,
        text=view.output_text or "",
        finish_reason=cast(FinishReason, view.finish_reason),
        usage=usage,
        seed=spec.params.seed or 0,
        ended_at_s=view.created_at_s,
    )
