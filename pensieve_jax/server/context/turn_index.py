"""What the front remembers of turns: enough to find them by their messages and to write what follows.

Owns: the turns in memory, newest first, within a budget of bytes; asking the history for older ones, and the
translation from what its reader gives.
Does not know: requests, rendering, SQL, or whether a turn's state is on the device.

Turns that are in memory only last as long as the engine has their state: they go when its epoch changes, and
when it says that it does not know one of them.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pensieve_jax.history.reader import HistoryReader, TurnView
from pensieve_jax.server.context.hashes import canonical_text, chain_after
from pensieve_jax.text.messages import Message

_TURN_BYTES = 1000  # of a turn's objects, beside its messages, texts and ids
_MESSAGE_BYTES = 300  # of a message's objects, beside its text


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PastTurn:
    """A finished turn.

    Attributes:
      before: the chain of the messages up to and including its own; its reply's follows.
      num_tokens: of the whole path up to and including its reply.
      messages: its own, as they were rendered; None for a turn of text or ids.
      output_token_ids, output_text, finish_reason: of its reply. The ids are kept in four bytes each.
      durable: whether the history has it.
      chain: of everything up to and including its reply.
      num_bytes: about what it takes to remember it, counted once: a text may get larger when it is read.
    """

    turn_id: str
    parent_id: str | None
    owner: str
    before: bytes
    num_tokens: int
    messages: tuple[Message, ...] | None
    output_token_ids: Sequence[int]
    output_text: str | None
    finish_reason: str
    durable: bool
    chain: bytes = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Pack the ids, fold the reply into the chain, and count the bytes."""
        object.__setattr__(self, "output_token_ids", array("i", self.output_token_ids))
        object.__setattr__(self, "chain", chain_after(self.before, "assistant", self.output_text or ""))
        object.__setattr__(self, "num_bytes", self._count_bytes())

    def _count_bytes(self) -> int:
        messages = self.messages or ()
        texts = sum(sys.getsizeof(message["content"]) for message in messages)
        texts += sys.getsizeof(self.output_text) + 4 * len(self.output_token_ids)
        return _TURN_BYTES + _MESSAGE_BYTES * len(messages) + texts


class TurnSource(Protocol):
    """The durable turns. Called from any thread."""

    def find_chain(self, owner: str, before: bytes, reply: str) -> PastTurn | None:
        """The newest turn with this chain before its reply, and this reply (canonical); None without one."""
        ...

    def path(self, owner: str, turn_id: str) -> Sequence[PastTurn]:
        """The turns from the first of a tree to this one; raises UnknownTurnError."""
        ...


class TurnIndex:
    """Turns by id and by chain, of memory first and of the history behind it. Safe to share by threads."""

    def __init__(self, source: TurnSource, *, max_bytes: int = 256 << 20) -> None:
        """Remember about `max_bytes` of turns; `source` has the durable ones that are not remembered."""
        self._source = source
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._turns: OrderedDict[tuple[str, str], PastTurn] = OrderedDict()  # by owner and id, oldest first
        # By owner, chain and durability: the newest turn of several that say the same.
        self._by_chain: dict[tuple[str, bytes, bool], str] = {}
        self._num_bytes = 0
        self._epoch: int | None = None

    @property
    def num_bytes(self) -> int:
        """About what the remembered turns take."""
        return self._num_bytes

    def __len__(self) -> int:
        """How many turns are remembered."""
        return len(self._turns)

    def see_epoch(self, epoch: int) -> None:
        """The engine has started so many times: what was in an earlier one's memory only is gone."""
        with self._lock:
            if self._epoch not in (None, epoch):
                for key in [key for key, turn in self._turns.items() if not turn.durable]:
                    self._remove(key)
            self._epoch = epoch

    def add(self, turn: PastTurn, epoch: int | None = None) -> None:
        """Remember a turn; one in memory only must be of the engine that runs, by its `epoch`."""
        key = (turn.owner, turn.turn_id)
        with self._lock:
            if not turn.durable and epoch != self._epoch:
                return
            if key in self._turns:
                self._remove(key)
            self._turns[key] = turn
            self._by_chain[turn.owner, turn.chain, turn.durable] = turn.turn_id
            self._num_bytes += turn.num_bytes
            while self._num_bytes > self._max_bytes and len(self._turns) > 1:
                self._remove(next(iter(self._turns)))

    def forget(self, owner: str, turn_id: str) -> None:
        """The engine, or the history, does not have it any more."""
        with self._lock:
            if (owner, turn_id) in self._turns:
                self._remove((owner, turn_id))

    def remembers(self, owner: str, turn_id: str) -> bool:
        """Whether a turn is in this memory; the history is not asked."""
        with self._lock:
            return (owner, turn_id) in self._turns

    def num_tokens(self, owner: str, turn_id: str) -> int | None:
        """Of a turn's path, up to its end; None where this memory does not have the turn."""
        with self._lock:
            turn = self._turns.get((owner, turn_id))
            return None if turn is None else turn.num_tokens

    def find(
        self, owner: str, before: bytes, reply: str, *, durable: bool, asks_source: bool = True
    ) -> PastTurn | None:
        """The newest turn of these messages and this reply.

        Args:
          owner: whose turns.
          before: the chain of the messages before the reply.
          reply: its canonical text.
          durable: look among the turns of the history only.
          asks_source: whether the source is asked where this memory has no such turn.
        """
        chain = chain_after(before, "assistant", reply)
        with self._lock:
            turn_id = None if durable else self._by_chain.get((owner, chain, False))
            turn_id = turn_id or self._by_chain.get((owner, chain, True))
            if turn_id is not None:
                return self._touch((owner, turn_id))
        found = self._source.find_chain(owner, before, reply) if asks_source else None
        if found is not None:
            self.add(found)
        return found

    def turn(self, owner: str, turn_id: str) -> PastTurn:
        """Return a turn from memory or the history; raise UnknownTurnError if neither has it."""
        with self._lock:
            if (owner, turn_id) in self._turns:
                return self._touch((owner, turn_id))
        return self._read_path(owner, turn_id)[-1]

    def path(self, turn: PastTurn) -> list[PastTurn]:
        """The turns from the first of its tree to this one; raises UnknownTurnError where one is gone."""
        path = [turn]
        while (parent_id := path[-1].parent_id) is not None:
            with self._lock:
                known = (turn.owner, parent_id) in self._turns
                if known:
                    path.append(self._touch((turn.owner, parent_id)))
            if not known:
                return [*self._read_path(turn.owner, parent_id), *path[::-1]]
        return path[::-1]

    def _read_path(self, owner: str, turn_id: str) -> Sequence[PastTurn]:
        path = self._source.path(owner, turn_id)
        for turn in path:
            self.add(turn)
        return path

    def _touch(self, key: tuple[str, str]) -> PastTurn:
        self._turns.move_to_end(key)
        return self._turns[key]

    def _remove(self, key: tuple[str, str]) -> None:
        turn = self._turns.pop(key)
        self._num_bytes -= turn.num_bytes
        by_chain = (turn.owner, turn.chain, turn.durable)
        if self._by_chain.get(by_chain) == turn.turn_id:
            del self._by_chain[by_chain]


class HistoryTurns:
    """A `TurnSource` of the durable turns. Safe to share by threads, as the reader is."""

    def __init__(self, reader: HistoryReader) -> None:
        """Of an open history."""
        self._reader = reader

    def find_chain(self, owner: str, before: bytes, reply: str) -> PastTurn | None:
        """The newest turn with this chain before its reply and this reply, among the newest of the chain."""
        for view in self._reader.find_chain(owner, before):
            if canonical_text(view.output_text or "") == reply:
                return _past(owner, view)
        return None

    def path(self, owner: str, turn_id: str) -> Sequence[PastTurn]:
        """The turns from the first of a tree to this one; raises UnknownTurnError."""
        return [_past(owner, view) for view in self._reader.turn_path(owner, turn_id)]


def _past(owner: str, view: TurnView) -> PastTurn:
    return PastTurn(
        turn_id=view.turn_id,
        parent_id=view.parent_id,
        owner=owner,
        before=view.chain,
        num_tokens=view.num_tokens,
        messages=view.messages,
        output_token_ids=view.output_token_ids,
        output_text=view.output_text,
        finish_reason=view.finish_reason,
        durable=True,
    )
