"""From what a caller sends to requests: all turns of a call, or none.

Owns: the way of a turn from its check to its place among those in progress.
Does not know: steps, or how a turn ends.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.decoding.turn_spec import ModelLimits, TurnSpec
from pensieve_jax.engine.ledger import TurnLedger
from pensieve_jax.engine.loop import EngineLoop
from pensieve_jax.engine.placing import Placed, Placing
from pensieve_jax.engine.reply import Reply
from pensieve_jax.engine.turn import Turn
from pensieve_jax.engine.validation import check_turns
from pensieve_jax.text import Tokenizer


class Intake:
    """Queues turns."""

    def __init__(
        self,
        loop: EngineLoop[Any],
        ledger: TurnLedger,
        placing: Placing,
        limits: ModelLimits,
        tokenizer: Tokenizer | None,
    ) -> None:
        """Into `loop` and `ledger`."""
        self._loop = loop
        self._ledger = ledger
        self._placing = placing
        self._limits = limits
        self._tokenizer = tokenizer

    def submit(self, specs: Sequence[TurnSpec]) -> list[Turn]:
        """Queue turns, in order; raises what `check_turns` raises, and HistoryError, with nothing queued."""
        places = check_turns(specs, self._limits, self._placing.conversations, self._tokenizer)
        turns: list[Turn] = []
        try:
            for spec, placed in self._placing.each(specs, places):
                turns.append(self._queue(spec, placed))
        except PensieveError:
            for turn in turns:
                self._ledger.cancel(turn.reply)
            raise
        return turns

    def _queue(self, spec: TurnSpec, placed: Placed) -> Turn:
        params = spec.params
        request = self._loop.submit(
            placed.live.conversation,
            placed.live.sequence,
            params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            ending_ids=params.ending_ids(self._limits.eos_token_ids),
            max_context_tokens=self._limits.max_context_tokens,
        )
        rest = spec.messages, spec.node, placed.origin
        try:
            reply = Reply(request, self._tokenizer, *rest)
        except PensieveError:
            # It is queued, and its conversation busy: it leaves as a turn does that is cancelled.
            self._ledger.cancel(self._ledger.enter(Reply(request, None, *rest)).reply)
            raise
        return self._ledger.enter(reply)
