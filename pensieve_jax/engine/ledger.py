"""The turns in progress, and how each one leaves: committed, cancelled, or lost.

Owns: writing all turns that end in a step in one transaction before any is reported, and who
forgets a conversation that nothing was kept of.
Does not know: the device, or how tokens came about.
Called by: the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pensieve_jax.core.clock import Clock
from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.outputs import FinishReason
from pensieve_jax.engine.conversations import ConversationTable, LiveConversation
from pensieve_jax.engine.experience import ExperienceKeeper
from pensieve_jax.engine.loop import EngineLoop
from pensieve_jax.engine.stats import EngineStats
from pensieve_jax.engine.turn import Turn
from pensieve_jax.history import HistoryStore, TurnRecord
from pensieve_jax.scheduler import Request

Ending = tuple[Turn, FinishReason]


class TurnLedger:
    """Turns by request, from submission until they are done.

    Attributes:
      turns: those in progress, in order of arrival.
    """

    def __init__(
        self,
        store: HistoryStore,
        loop: EngineLoop[Any],
        conversations: ConversationTable,
        stats: EngineStats,
        clock: Clock,
    ) -> None:
        """No turns."""
        self.turns: dict[Request, Turn] = {}
        self._store = store
        self._loop = loop
        self._conversations = conversations
        self._stats = stats
        self._clock = clock
        self._keeper = ExperienceKeeper(store, loop.cache)

    def enter(self, turn: Turn) -> None:
        """A turn was submitted."""
        self.turns[turn.request] = turn

    def commit(self, endings: Sequence[Ending]) -> list[Turn]:
        """Write the turns that end in a step in one transaction; then they are done.

        Where the history cannot be written, that is the error of the turns it was to keep.
        """
        kept = [ending for ending in endings if not ending[0].request.conversation.one_off]
        try:
            if kept:
                self._store.commit([self._record(turn, reason) for turn, reason in kept])
        except PensieveError as error:
            for turn, _ in kept:
                self.lose(turn, error)
        for turn, reason in endings:
            if not turn.done:
                self._settle(turn, reason)
        self._keeper.count(len(kept))
        return [turn for turn, _ in endings]

    def cancel(self, turn: Turn) -> None:
        """End a turn as if it had never been sent."""
        turn.finish("cancelled")
        self._stats.num_turns_cancelled += 1
        self._roll_back(turn)

    def lose(self, turn: Turn, error: PensieveError) -> None:
        """End a turn with an error; its conversation is as it was before."""
        turn.error = error
        self._stats.num_turns_failed += 1
        self._roll_back(turn)

    def close(self) -> None:
        """Write what was learned; there are no turns any more."""
        self._keeper.write()

    def _record(self, turn: Turn, reason: FinishReason) -> TurnRecord:
        request, conversation = turn.request, turn.request.conversation
        prompt = conversation.token_ids[conversation.num_history_tokens : request.num_prompt_end]
        return TurnRecord(
            conversation_id=conversation.conversation_id,
            turn_index=conversation.num_turns,
            prompt_token_ids=tuple(prompt),
            output_token_ids=tuple(turn.token_ids),
            seed=request.seed,
            finish_reason=reason,
            created_at_s=self._clock.now(),
            messages=turn.messages,
            output_text=turn.text if turn.has_text else None,
        )

    def _settle(self, turn: Turn, reason: FinishReason) -> None:
        """A turn that was committed."""
        request, conversation = turn.request, turn.request.conversation
        # A step of look-ahead may have computed one token more than the reply has; it never counts.
        del conversation.token_ids[request.num_prompt_end + len(turn.token_ids) :]
        self._loop.settle(request, turn.finish(reason))
        self._leave(turn, forget=conversation.one_off)

    def _roll_back(self, turn: Turn) -> None:
        """Forget a turn that gave nothing to the history."""
        conversation = turn.request.conversation
        self._loop.withdraw(turn.request)
        self._leave(turn, forget=conversation.one_off or not conversation.num_turns)

    def _leave(self, turn: Turn, *, forget: bool) -> None:
        del self.turns[turn.request]
        live: LiveConversation = self._conversations.get(turn.request.conversation.conversation_id)
        live.busy = False
        if forget:
            self._conversations.forget(live)
