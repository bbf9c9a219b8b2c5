"""The turns in progress, and their outcomes: committed, cancelled, or lost.

Owns: the commit of all turns that end in a step, in one transaction before any of them is reported. It also
removes conversations without stored turns, and detects turns that no caller references any more.
If another program has locked the history, complete turns wait here, outside the batch, for at most
`LOCK_WAIT_S`. Other turns go on meanwhile, so nothing in a step waits for that lock.
Does not know: the device, how tokens are computed, or the content of a turn's attachment.
Called by the engine and the submission of turns.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, KeysView, Sequence
from typing import Any, Final

from pensieve_jax.core.clock import Clock
from pensieve_jax.core.errors import (
    ConversationChangedError,
    HistoryBusyError,
    LogitsError,
    PensieveError,
    forget_frames,
)
from pensieve_jax.core.outputs import FinishReason
from pensieve_jax.core.turn_node import new_turn_id
from pensieve_jax.engine.conversations import ConversationTable
from pensieve_jax.engine.drafting import HistoryDrafter
from pensieve_jax.engine.late_rows import LateRow, LateRows
from pensieve_jax.engine.learned_state_store import LearnedStateStore
from pensieve_jax.engine.live import Branch, LiveConversation
from pensieve_jax.engine.loop import EngineLoop
from pensieve_jax.engine.stats import EngineStats
from pensieve_jax.engine.turn import Deltas, ReplyState, Turn, take_deltas
from pensieve_jax.history import HistoryStore, TurnRecord
from pensieve_jax.history.store import LOCK_WAIT_S
from pensieve_jax.scheduler import Request

Ending = tuple[ReplyState, FinishReason]
_RETRY_S: Final = 0.05
"""Time between two attempts to write turns while another program has locked the history."""


class TurnLedger:
    """The replies in progress by request, from submission to the outcome.

    Attributes:
      replies: replies in progress, in order of arrival.
      touched: requests that got a token since the last `take_deltas`.
    """

    def __init__(
        self,
        store: HistoryStore,
        loop: EngineLoop[Any],
        conversations: ConversationTable,
        late_rows: LateRows,
        drafter: HistoryDrafter | None,
        stats: EngineStats,
        clock: Clock,
    ) -> None:
        self.replies: dict[Request, ReplyState] = {}
        self.touched: dict[Request, None] = {}
        self._turns: dict[Request, weakref.ref[Turn]] = {}
        # Weak references append themselves here when their turn is dropped. The append runs in C, so that no
        # interrupt can come in between.
        self._dropped: deque[weakref.ref[Turn]] = deque()
        self._store = store
        self._loop = loop
        self._conversations = conversations
        self._late_rows = late_rows
        self._drafter = drafter
        self._stats = stats
        self._clock = clock
        self._state_store = LearnedStateStore(store, loop.cache)
        # Complete turns that wait for a lock of another program, with the time at which each gives up.
        self._unwritten: dict[Request, tuple[Ending, float]] = {}
        self._next_try_s = 0.0

    @property
    def turns(self) -> list[Turn]:
        """Turns in progress that a caller still references, in order of arrival."""
        return self._held(self._turns.values())

    def enter(
        self,
        reply: ReplyState,
        late_row: LateRow | None = None,
        related: Callable[[], Sequence[Sequence[int]]] = list,
    ) -> Turn:
        """Add a submitted turn; returns the handle that its caller must keep.

        `late_row` masks its choices, if given; such a turn has no drafts. `related` is that of
        `HistoryDrafter.add`.
        """
        turn = Turn(reply)
        if late_row is not None:
            self._late_rows.add(reply.request, late_row)
        elif self._drafter is not None:
            self._drafter.add(reply.request, related)
        self._turns[reply.request] = weakref.ref(turn, self._dropped.append)
        self.replies[reply.request] = reply
        return turn

    def take_deltas(self) -> Deltas:
        """Return the new tokens since the last call, of turns that a caller still references."""
        held = self._turns
        deltas = take_deltas([turn for request in self.touched if (turn := held[request]()) is not None])
        self.touched.clear()
        return deltas

    @property
    def in_use(self) -> frozenset[str]:
        """Ids of the parents of all turns in progress."""
        nodes = (reply.node for reply in self.replies.values())
        return frozenset(node.parent_id for node in nodes if node is not None and node.parent_id is not None)

    @property
    def has_dropped(self) -> bool:
        """Whether the caller of a turn in progress may have dropped its handle."""
        return bool(self._dropped)

    def cancel_dropped(self) -> None:
        """Cancel the turns whose handles no caller references any more."""
        self._dropped.clear()  # first, so that a turn dropped from here on is recorded again
        for request, turn in tuple(self._turns.items()):
            if turn() is None:
                self.cancel(self.replies[request])

    @property
    def complete(self) -> KeysView[Request]:
        """Requests of turns in progress that have their whole reply and wait to be written."""
        return self._unwritten.keys()

    def commit(self, endings: Sequence[Ending]) -> list[Turn]:
        """Write the turns that end in a step in one transaction, finish them, and return the finished ones.

        If the history cannot be written, all durable turns get that error. If it refuses a single turn, for
        example because another replica was first, only that turn gets the error. If another program has
        locked it, the durable turns wait for a later call, and get that error after `LOCK_WAIT_S`.
        """
        durable = [*self._waiting(), *(ending for ending in endings if ending[0].durable)]
        others = [ending for ending in endings if not ending[0].durable]
        turns = self._held(self._turns[reply.request] for reply, _ in (*durable, *others))
        now_s = self._clock.now()  # once, so that a turn's output and the history have the same time
        if self._unwritten and time.monotonic() < self._next_try_s:
            self._hold(durable)
        elif durable:
            self._write(durable, now_s)
        for reply, reason in others:
            self._settle(reply, reason, now_s)
        return [turn for turn in turns if turn.done]

    def retry(self) -> list[Turn]:
        """Try again to write complete turns, and return the finished ones.

        If no other turn is in progress, this first waits a moment, since there is nothing else to do.
        """
        if not self._unwritten:
            return []
        if len(self._unwritten) == len(self.replies):
            time.sleep(max(0.0, self._next_try_s - time.monotonic()))
        return self.commit(())

    def cancel(self, reply: ReplyState) -> None:
        """End a turn as if it had never been sent."""
        reply.finish("cancelled", self._clock.now())
        self._stats.num_turns_cancelled += 1
        self._roll_back(reply)

    def cancel_all(self) -> None:
        """End every turn as if it had never been sent."""
        for reply in tuple(self.replies.values()):
            self.cancel(reply)

    def lose(self, replies: Sequence[ReplyState], error: PensieveError) -> list[Turn]:
        """End turns with an error, and restore their conversations."""
        turns = self._held(self._turns[reply.request] for reply in replies)
        forget_frames(error)  # callers may keep their turns, and so this error, for a long time
        for reply in replies:
            reply.error = error
            self._stats.num_turns_failed += 1
            # A conversation that another replica changed is loaded again at its next use.
            self._roll_back(
                reply,
                forget=isinstance(error, ConversationChangedError),
                distrust=isinstance(error, LogitsError),
            )
        return turns

    def lose_to_logits(self, replies: Sequence[ReplyState]) -> list[Turn]:
        """End turns whose logits are not finite, each with an error of its own."""
        self._stats.num_logits_errors += len(replies)
        return [turn for reply in replies for turn in self.lose([reply], LogitsError(len(reply.token_ids)))]

    def close(self) -> None:
        """Write the learned state; no turn may be in progress."""
        self._state_store.write()

    def forget_experience(self) -> None:
        """Discard what a learning order has learned, in memory and in the history; raises HistoryError."""
        self._state_store.forget()

    def _waiting(self) -> list[Ending]:
        return [ending for ending, _ in self._unwritten.values()]

    def _hold(self, endings: Sequence[Ending]) -> None:
        """Take complete turns out of the batch until they can be written."""
        until_s = time.monotonic() + LOCK_WAIT_S
        for reply, reason in endings:
            request = reply.request
            if request not in self._unwritten:
                self._cut_look_ahead(reply)
                self._loop.hold(request)
                self._forget_rows(request)
                self._unwritten[request] = (reply, reason), until_s

    def _write(self, durable: Sequence[Ending], now_s: float) -> None:
        """Write durable turns in one transaction and finish them, or let them wait for a lock."""
        try:
            records = [self._record(reply, reason, now_s) for reply, reason in durable]
            attachments = [None if reply.node is None else reply.node.attachment for reply, _ in durable]
            began_s = time.perf_counter()
            refused = self._store.commit(records, attachments, self.in_use)
            self._stats.count_commit(time.perf_counter() - began_s)
            for position, (record, (reply, _)) in enumerate(zip(records, durable, strict=True)):
                if position in refused:
                    self.lose([reply], refused[position])
                elif reply.node is None:
                    reply.request.conversation.head = record.turn_id
        except HistoryBusyError as error:
            self._hold(durable)
            self._next_try_s = time.monotonic() + _RETRY_S
            late = [one for (one, _), until_s in self._unwritten.values() if until_s < self._next_try_s]
            self.lose(late, error)
            return
        except PensieveError as error:
            self.lose([reply for reply, _ in durable], error)
        for reply, reason in durable:
            if not reply.done:
                self._settle(reply, reason, now_s)
        self._state_store.count(len(durable))

    def _held(self, turns: Iterable[weakref.ref[Turn]]) -> list[Turn]:
        return [turn for held in turns if (turn := held()) is not None]

    def _record(self, reply: ReplyState, reason: FinishReason, now_s: float) -> TurnRecord:
        request, conversation = reply.request, reply.request.conversation
        prompt = conversation.token_ids[conversation.num_history_tokens : request.num_prompt_end]
        node = reply.node
        return TurnRecord(
            conversation_id=conversation.conversation_id if node is None else "",
            turn_index=conversation.num_turns,
            prompt_token_ids=tuple(prompt),
            output_token_ids=tuple(reply.token_ids),
            seed=request.seed,
            finish_reason=reason,
            created_at_s=now_s,
            messages=reply.messages,
            output_text=reply.text if reply.has_text else None,
            turn_id=new_turn_id(conversation.head) if node is None else node.turn_id,
            parent_id=conversation.head if node is None else node.parent_id,
            owner="" if node is None else node.owner,
            chain=b"" if node is None else node.chain,
            usage=reply.usage(),
            logprobs=None if reply.logprobs is None else tuple(reply.logprobs),
            keep=conversation.num_history_tokens if conversation.replaced else None,
            template_input=reply.template_input,
        )

    def _settle(self, reply: ReplyState, reason: FinishReason, now_s: float) -> None:
        """Finish a turn that was committed or needs no commit."""
        request, conversation = reply.request, reply.request.conversation
        self._cut_look_ahead(reply)
        replaced = conversation.replaced
        self._stats.num_turns_rewritten += conversation.num_replaced_computed > 0
        self._loop.settle(request, reply.finish(reason, now_s))
        live = self._live_of(reply)
        if reply.node is not None and isinstance(live, Branch):
            self._conversations.branches.settled(live, reply.node, request.num_history_tokens, replaced)
        self._leave(reply, forget=reply.is_transient)

    def _cut_look_ahead(self, reply: ReplyState) -> None:
        """Discard the token that the look-ahead step may have added behind a complete reply."""
        request = reply.request
        del request.conversation.token_ids[request.num_prompt_end + len(reply.token_ids) :]

    def _roll_back(self, reply: ReplyState, *, forget: bool = False, distrust: bool = False) -> None:
        """Remove a turn that was not stored.

        With `forget`, remove its conversation from memory as well. With `distrust`, drop the conversation's
        KV cache: the turn may have recomputed a part of the history, too.
        """
        conversation = reply.request.conversation
        self._loop.withdraw(reply.request)
        if distrust:
            self._loop.cache.distrust(reply.request.sequence)
        forget = forget or conversation.one_off or not conversation.num_turns
        live = self._live_of(reply)
        if reply.node is not None and reply.origin is not None and isinstance(live, Branch):
            forget = self._conversations.branches.withdrawn(live, reply.node, reply.origin)
        self._leave(reply, forget=forget)

    def _leave(self, reply: ReplyState, *, forget: bool) -> None:
        del self.replies[reply.request]
        self._unwritten.pop(reply.request, None)
        self._forget_rows(reply.request)
        self.touched.pop(reply.request, None)
        del self._turns[reply.request]  # from here on its caller may drop it
        live = self._live_of(reply)
        live.busy = False
        if forget:
            self._conversations.forget(live)

    def _forget_rows(self, request: Request) -> None:
        self._late_rows.drop(request)
        if self._drafter is not None:
            self._drafter.drop(request)

    def _live_of(self, reply: ReplyState) -> LiveConversation:
        return self._conversations.get(reply.request.conversation.conversation_id)
