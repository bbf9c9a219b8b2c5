"""A fake engine over a real history: it commits finished turns, as an engine's process does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.core.errors import PensieveError, UnknownTurnError
from pensieve_jax.core.outputs import FinishReason
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.history.opening import open_store
from pensieve_jax.history.reader import HistoryReader
from pensieve_jax.history.server_tables.changes import HistoryChange
from pensieve_jax.history.store import TurnRecord
from pensieve_jax.server.context.resolver import Resolver
from pensieve_jax.server.context.turn_index import HistoryTurns, TurnIndex
from pensieve_jax.text import ReplyReader, Tokenizer
from pensieve_jax.text.tool_formats import AUTOMATIC, Parsers
from tests.server.fakes import FakeEngine, FakeTurn

FINGERPRINT = "fingerprint"


class StoredEngine(FakeEngine):
    """Fake engine that commits durable turns at their end, and refuses a turn whose parent is unknown.

    Attributes:
        memory: owners and ids of turns that are not in the history.
    """

    def __init__(
        self, path: Path | str, clock: VirtualClock, script: Callable[[FakeTurn], None] | None = None
    ) -> None:
        super().__init__(script)
        self.clock = clock
        self.store = open_store(path, fingerprint=FINGERPRINT)
        self.memory: set[tuple[str, str]] = set()
        self.num_committed = 0

    def submit_all(self, specs: Sequence[TurnSpec]) -> list[Any]:
        for spec in specs:
            node = spec.node
            if node is not None and node.parent_id is not None and not self._has(node.owner, node.parent_id):
                self.refuse.append(UnknownTurnError(node.parent_id))
                break
        turns = super().submit_all(specs)
        for turn in turns:
            self._watch(turn)
        return turns

    def restart(self) -> None:
        """Forget the turns that were in memory only."""
        self.memory.clear()
        self.epoch += 1

    async def apply(self, change: HistoryChange) -> None:
        await super().apply(change)
        self.store.apply(change)

    async def call(self, name: str, *arguments: Any) -> Any:
        """Answer as an engine that has the KV cache of every turn that it knows."""
        if name not in ("push_out_turn", "forget_turn_state", "explain_turn"):
            return await super().call(name, *arguments)
        self.calls.append((name, arguments))
        if not self._has(*arguments):
            raise UnknownTurnError(arguments[1])
        if name == "push_out_turn":
            return 1
        if name == "explain_turn":
            return {"num_tokens": 0, "policy": "retention", "idle_s": None, "chunks": [], "lines": []}
        self.memory.discard(arguments)
        return None

    def _has(self, owner: str, turn_id: str) -> bool:
        if (owner, turn_id) in self.memory:
            return True
        try:
            self.store.load_turn(owner, turn_id)
        except UnknownTurnError:
            return False
        return True

    def _watch(self, turn: FakeTurn) -> None:
        """Commit a turn before its end is reported."""
        if turn.output is not None:
            turn.output, output = None, turn.output
            self._commit(turn, output)
            return
        finish = turn.finish

        def finish_and_commit(reason: FinishReason = "stop", **usage: int) -> None:
            finish(reason, **usage)
            if reason == "cancelled":
                return
            turn.output, output = None, turn.output
            self._commit(turn, output)

        turn.finish = finish_and_commit  # type: ignore[method-assign]

    def _commit(self, turn: FakeTurn, output: Any) -> None:
        node = turn.spec.node
        if node is None or not node.durable:
            if node is not None:
                self.memory.add((node.owner, node.turn_id))
            turn.output = output
            return
        index, keep = 0, None
        if node.parent_id is not None:
            before = self.store.load_turn(node.owner, node.parent_id)
            index = len(before.turns)
            keep = None if turn.spec.keep == len(before.token_ids) else turn.spec.keep
        record = TurnRecord(
            keep=keep,
            conversation_id="",
            turn_index=index,
            prompt_token_ids=tuple(turn.spec.prompt_token_ids),
            output_token_ids=output.token_ids,
            seed=output.seed,
            finish_reason=output.finish_reason,
            created_at_s=self.clock.now(),
            messages=turn.spec.messages,
            output_text=output.text,
            turn_id=node.turn_id,
            parent_id=node.parent_id,
            owner=node.owner,
            chain=node.chain,
            usage=output.usage,
            logprobs=output.logprobs,
            template_input=turn.spec.template_input,
        )
        refused: PensieveError | None = self.store.commit([record], [node.attachment]).get(0)
        if refused is not None:
            turn.fail(refused)
            return
        self.num_committed += 1
        turn.output = dataclasses.replace(output, ended_at_s=record.created_at_s)


def resolving(tokenizer: Tokenizer, reader: HistoryReader, parsers: Parsers = AUTOMATIC) -> Resolver:
    index = TurnIndex(HistoryTurns(reader, ReplyReader(tokenizer)))
    return Resolver(tokenizer, FINGERPRINT, index, parsers=parsers)
