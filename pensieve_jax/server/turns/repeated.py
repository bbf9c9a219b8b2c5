"""The stored turn of an earlier request, in the form of running turns.

Owns: its deltas and its output, as the engine gave them.
Does not know: why a request is repeated, or how its reply is written.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import numpy as np

from pensieve_jax.core.outputs import FinishReason, Output, Usage
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.history.codec import unpack_logprobs
from pensieve_jax.server.async_engine import AsyncDelta
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.turns.idempotency import StoredReply
from pensieve_jax.text.reply_tokens import ReplyTokens


class RepeatedTurn:
    """An iterator of the deltas of a stored turn, one for each token.

    Attributes:
      output: the result of the turn.
    """

    def __init__(self, reply: StoredReply, params: SamplingParams, services: Services) -> None:
        """Read the reply; by the request's `params`, its text follows from its tokens."""
        record, token_ids = reply.record, reply.turn.output_token_ids
        logprobs = None if record.logprobs is None else unpack_logprobs(record.logprobs)
        ending_ids = params.ending_ids(services.engine.info.limits.eos_token_ids)
        template = record.template_input
        read = ReplyTokens(params, ending_ids, len(token_ids), services.tokenizer, template)
        none: np.ndarray[Any, Any] = np.empty(0)
        deltas = []
        for index, token_id in enumerate(token_ids):
            num_pieces = len(read.pieces)
            read.accept(token_id, 0.0, none, none)
            text = "".join(read.pieces[num_pieces:])
            deltas.append(AsyncDelta(text, (token_id,), None if logprobs is None else (logprobs[index],)))
        self._deltas: Iterator[AsyncDelta] = iter(deltas)
        self.output = Output(
            conversation_id=None,
            token_ids=token_ids,
            text=record.output_text or "",
            finish_reason=cast(FinishReason, record.finish_reason),
            usage=Usage(**json.loads(record.usage or "")),
            seed=0,
            logprobs=logprobs,
            stop_string=read.stop_string,
        )

    def __aiter__(self) -> AsyncIterator[AsyncDelta]:
        return self

    async def __anext__(self) -> AsyncDelta:
        """Return the next delta."""
        for delta in self._deltas:
            return delta
        raise StopAsyncIteration


class RepeatedTurns:
    """The one turn of a request that was answered before.

    Attributes:
      turns: that turn.
    """

    def __init__(self, turn: RepeatedTurn) -> None:
        self.turns = (turn,)

    async def results(self) -> list[Output]:
        """Return the result of the turn."""
        return [self.turns[0].output]

    def charge_unread(self) -> None:
        """Charge nothing: no further output arrives."""

    async def close(self) -> None:
        """Do nothing: the turn has ended."""
