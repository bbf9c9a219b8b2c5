"""From what a caller sends to requests: all turns of a call, or none.

Owns: the way of a turn from its check to its place among those in progress: which turns of a call are choices
of one prompt, which conversation each runs in, and what it adds to that conversation.
Does not know: steps, or how a turn ends.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.turn_node import TurnNode, TurnOrigin
from pensieve_jax.decoding.turn_spec import ModelLimits, TurnSpec
from pensieve_jax.engine.branches import TurnPosition
from pensieve_jax.engine.conversations import ConversationTable
from pensieve_jax.engine.ledger import TurnLedger
from pensieve_jax.engine.live import Branch, LiveConversation
from pensieve_jax.engine.loop import EngineLoop
from pensieve_jax.engine.prefixes import PrefixTable
from pensieve_jax.engine.turn import ReplyState, Turn
from pensieve_jax.engine.validation import check_turns
from pensieve_jax.text import Tokenizer

type _Choice = tuple[str, str | None, tuple[int, ...]]


class TurnSubmitter:
    """Checks, places and queues turns: all turns of a call, or none."""

    def __init__(
        self,
        loop: EngineLoop[Any],
        ledger: TurnLedger,
        placing: TurnPlacer,
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

    def _queue(self, spec: TurnSpec, placed: PlacedTurn) -> Turn:
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
            reply = ReplyState(request, self._tokenizer, *rest)
        except PensieveError:
            # It is queued, and its conversation busy: it leaves as a turn does that is cancelled.
            self._ledger.cancel(self._ledger.enter(ReplyState(request, None, *rest)).reply)
            raise
        return self._ledger.enter(reply)


class TurnPlacer:
    """Finds turns their conversations.

    Attributes:
      conversations: in memory and in the history.
    """

    def __init__(self, conversations: ConversationTable, prefixes: PrefixTable, *, stateful: bool) -> None:
        self.conversations = conversations
        self._prefixes = prefixes
        self._stateful = stateful

    def each(
        self, specs: Sequence[TurnSpec], places: Sequence[TurnPosition | None]
    ) -> Iterator[tuple[TurnSpec, PlacedTurn]]:
        """Every turn of a call with where it runs: busy from then on, with its prompt.

        A turn must be queued before the next one is asked for. `places` are what `check_turns` returned.
        """
        num_alike = Counter(_choice(spec, spec.node) for spec in specs if spec.node is not None)
        first: dict[_Choice, Branch] = {}
        for spec, place in zip(specs, places, strict=True):
            if spec.node is None or place is None:
                placed = PlacedTurn(self.conversations.get_or_create(spec.conversation_id), None)
            else:
                choice = _choice(spec, spec.node)
                branch, origin = self.conversations.branches.begin(
                    spec.node, place, choice[2], twin=first.get(choice), has_twins=num_alike[choice] > 1
                )
                first.setdefault(choice, branch)
                placed = PlacedTurn(branch, origin)
            self._add(spec, placed.live)
            yield spec, placed

    def _add(self, spec: TurnSpec, live: LiveConversation) -> None:
        live.busy = True
        if spec.prefix is not None:
            live.conversation.token_ids += spec.prefix.token_ids
            if self._stateful and not live.sequence.chunks:
                self._prefixes.begin(live.sequence, spec.prefix)
        live.conversation.token_ids += map(int, spec.prompt_token_ids)  # numpy's ints become Python's


class PlacedTurn(NamedTuple):
    """The conversation that a turn runs in, and what it was found to go on from, if its caller placed it."""

    live: LiveConversation
    origin: TurnOrigin | None


def _choice(spec: TurnSpec, node: TurnNode) -> _Choice:
    return node.owner, node.parent_id, tuple(map(int, spec.prompt_token_ids))
