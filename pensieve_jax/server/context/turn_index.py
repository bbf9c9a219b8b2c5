"""The front end's index of finished turns, by id and by the hash chain of their messages.

Owns: the least-recently-used turns in memory within a byte budget; reading older ones from the history.
Does not know: requests, rendering, SQL, or whether a turn's KV cache is on the device.
Called by the resolver and by `server.openai`.

A turn that is not in the history is forgotten when the engine loses it: when the engine's epoch changes, and
when the engine reports the turn as unknown.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pensieve_jax.core.errors import UnknownTurnError
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.history.reader import HistoryReader, TurnView
from pensieve_jax.server.context.hashes import canonical_text, chain_after
from pensieve_jax.text import ReplyReader
from pensieve_jax.text.messages import Message, content_of
from pensieve_jax.text.replies import has_parts

_TURN_BYTES = 1000  # estimated Python overhead of a turn, without its messages, texts and ids
_MESSAGE_BYTES = 300  # estimated Python overhead of a message, without its text


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PastTurn:
    """A finished turn.

    Attributes:
      before: the chain up to and including its request messages, without its reply.
      num_tokens: number of tokens of the whole path, its reply included.
      messages: its request messages as they were rendered; None for a turn of text or token ids.
      prompt_token_ids, output_token_ids: its own token ids, four bytes each. They follow the first tokens of
        its parent's path, as many as `num_tokens` has more.
      reply: its reply as a message.
      durable: whether the history has it.
      template_input: what it was rendered from beside the messages.
      chain: the chain up to and including its reply.
      num_bytes: estimated memory use. It is computed once, because Python strings can grow when they are read
        and the index must subtract what it added.
    """

    turn_id: str
    parent_id: str | None
    owner: str
    before: bytes
    num_tokens: int
    messages: tuple[Message, ...] | None
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    reply: Message
    durable: bool
    template_input: TemplateInput = NO_INPUT
    chain: bytes = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Pack the ids, extend the chain by the reply, and count the bytes."""
        object.__setattr__(self, "prompt_token_ids", array("i", self.prompt_token_ids))
        object.__setattr__(self, "output_token_ids", array("i", self.output_token_ids))
        object.__setattr__(self, "chain", chain_after(self.before, self.reply))
        object.__setattr__(self, "num_bytes", self._count_bytes())

    def _count_bytes(self) -> int:
        messages = self.messages or ()
        texts = sum(
            _num_bytes(value)
            for message in (*messages, self.reply)
            for key, value in message.items()
            if key != "role"
        )
        texts += 4 * (len(self.prompt_token_ids) + len(self.output_token_ids))
        own = self.template_input
        others = (
            0 if own is NO_INPUT or own == NO_INPUT else _num_bytes([*own.tools, own.arguments, own.prefill])
        )
        return _TURN_BYTES + _MESSAGE_BYTES * len(messages) + texts + others


def _num_bytes(value: Any) -> int:
    """Return the estimated memory use of a JSON value, which may be nested deeper than Python's stack."""
    if isinstance(value, str):
        return sys.getsizeof(value)
    waiting, num_bytes = [value], 0
    while waiting:
        one = waiting.pop()
        if isinstance(one, str | dict | list | tuple):
            num_bytes += sys.getsizeof(one)
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
    return num_bytes


class TurnSource(Protocol):
    """Access to the durable turns. Called from any thread."""

    def find_chain(self, owner: str, before: bytes, reply: Message) -> PastTurn | None:
        """Return the newest turn with this chain before its reply and the same reply, or None."""
        ...

    def path(self, owner: str, turn_id: str) -> Sequence[PastTurn]:
        """Return the turns from the root of the tree to this one; raise UnknownTurnError."""
        ...


class TurnIndex:
    """Turns by id and by chain, from memory or else from the history. Thread-safe."""

    def __init__(self, source: TurnSource, *, max_bytes: int = 256 << 20) -> None:
        """Hold up to about `max_bytes` of turns in memory; read other durable turns from `source`."""
        self._source = source
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._turns: OrderedDict[tuple[str, str], PastTurn] = OrderedDict()  # by owner and id, LRU first
        # By owner, chain and durability: the newest of several turns with the same messages.
        self._by_chain: dict[tuple[str, bytes, bool], str] = {}
        self._num_bytes = 0
        self._epoch: int | None = None

    @property
    def num_bytes(self) -> int:
        """Estimated memory use of the turns in memory."""
        return self._num_bytes

    def __len__(self) -> int:
        """Return the number of turns in memory."""
        return len(self._turns)

    def see_epoch(self, epoch: int) -> None:
        """Forget turns that are not durable if the engine has restarted, that is, if `epoch` is new."""
        with self._lock:
            if self._epoch not in (None, epoch):
                for key in [key for key, turn in self._turns.items() if not turn.durable]:
                    self._remove(key)
            self._epoch = epoch

    def add(self, turn: PastTurn, epoch: int | None = None) -> None:
        """Add a turn; ignore one that is not durable if `epoch` is not that of the running engine."""
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
        """Remove a turn that the engine or the history no longer has."""
        with self._lock:
            if (owner, turn_id) in self._turns:
                self._remove((owner, turn_id))

    def remembers(self, owner: str, turn_id: str) -> bool:
        """Return whether a turn is in memory, without asking the history."""
        with self._lock:
            return (owner, turn_id) in self._turns

    def num_tokens(self, owner: str, turn_id: str) -> int | None:
        """Return the number of tokens of a turn's path, or None if the turn is not in memory."""
        with self._lock:
            turn = self._turns.get((owner, turn_id))
            return None if turn is None else turn.num_tokens

    def find(
        self, owner: str, before: bytes, reply: Message, *, durable: bool, asks_source: bool = True
    ) -> PastTurn | None:
        """Return the newest turn with these messages and this reply, or None.

        Args:
          owner: the key owner of the turns.
          before: the chain of the messages before the reply.
          reply: the reply as a client repeats it.
          durable: whether only turns of the history may match.
          asks_source: whether to ask the history if no turn in memory matches.
        """
        chain = chain_after(before, reply)
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
        """Return the turns from the root of its tree to this one; raise UnknownTurnError if one is gone."""
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
    """A `TurnSource` that reads the history. Thread-safe, because the reader is."""

    def __init__(self, reader: HistoryReader, replies: ReplyReader) -> None:
        """`reader` is of an open history, and `replies` of its model."""
        self._reader = reader
        self._replies = replies

    def find_chain(self, owner: str, before: bytes, reply: Message) -> PastTurn | None:
        """Return the newest turn with this chain and reply among the chain's newest turns, or None."""
        chain, content = chain_after(before, reply), canonical_text(content_of(reply))
        for turn_id, text in self._reader.find_chain(owner, before):
            with contextlib.suppress(UnknownTurnError):  # deleted since
                view = self._reader.turn(owner, turn_id)
                # A prefill stands before the text. Parts may be anywhere in it, on both sides of a call.
                is_other = content not in (text or "") and canonical_text(text or "") not in content
                if is_other and not has_parts(view.template_input):
                    continue
                turn = self._past(owner, view)
                if turn.chain == chain:
                    return turn
        return None

    def path(self, owner: str, turn_id: str) -> Sequence[PastTurn]:
        """Return the turns from the root of the tree to this one; raise UnknownTurnError."""
        return [self._past(owner, view) for view in self._reader.turn_path(owner, turn_id)]

    def _past(self, owner: str, view: TurnView) -> PastTurn:
        reply = self._replies.message(
            view.output_text, view.output_token_ids, view.template_input, turn=view.turn_id
        )
        return PastTurn(
            turn_id=view.turn_id,
            parent_id=view.parent_id,
            owner=owner,
            before=view.chain,
            num_tokens=view.num_tokens,
            messages=view.messages,
            prompt_token_ids=view.prompt_token_ids,
            output_token_ids=view.output_token_ids,
            reply=reply,
            durable=True,
            template_input=view.template_input,
        )
