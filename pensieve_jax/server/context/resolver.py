"""Which turn a context goes on from, and what its new turn is made of.

Owns: cutting a context at its replies, the longest match, and the prompt of what follows.
Does not know: HTTP, schemas, sampling, or whether a turn's state is still on the device.

A context is a list of messages under an owner. It is cut at its replies; the longest beginning that a
finished turn ends with is that turn's path, and what follows is the new turn. So a client that sends
everything again goes on from its state with the ids as they were sampled, and an edited reply or a second
reply to the same message is another branch of the tree. A reply that a stop string ended is no such end,
since its ids say what its client was not told: it is part of the new turn. Without a match the whole context
is the first turn of a new tree; the engine may still find its first chunks in other sequences of the owner.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from pensieve_jax.core.errors import ChatTemplateError, UnknownTurnError
from pensieve_jax.core.outputs import Output
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.turn_node import (
    RootFor,
    TurnNode,
    new_root,
    new_turn_id,
    root_of_digest,
    turn_id_under,
)
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.server.context.hashes import canonical_text, chains_of, root_chain
from pensieve_jax.server.context.turn_index import PastTurn, TurnIndex
from pensieve_jax.text import Tokenizer
from pensieve_jax.text.chat import ChatFormat, EarlierTurn
from pensieve_jax.text.messages import Message, check_messages

MatchKind = Literal["id", "message", "chunk", "none"]

_MAX_LOOK_UPS: Final = 64
"""Of a context's last replies in the history; those before are looked for in the index's memory only."""
_MAX_TRIES: Final = 8
"""Turns that one context is tried behind: each is a rendering of all, which the template may refuse."""
_MAX_REFUSED: Final = 2**16
"""Turns of which it is remembered that nothing may follow them: to see it, their ids are decoded."""


class Memory(enum.Enum):
    """Which turns a context may go on from; each is a fallback of the one before."""

    ALL = "all"
    DURABLE = "durable"  # those of the history: what is in memory only may be gone
    NONE = "none"  # begin a new tree


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedContext:
    """A new turn, ready to be sent.

    Attributes:
      messages: the turn's own.
      prompt_token_ids: to be appended to the path of `parent`.
      parent: the turn that it goes on from; None begins a new tree.
      by_id: whether the parent was named, and not found by its messages.
      missed_tokens: of the prompt, about how many are replies and what stood before them, which a longer
        match would have found: by their share of the prompt's characters.
      epoch: of the engine that it was resolved for.
    """

    node: TurnNode
    messages: tuple[Message, ...]
    prompt_token_ids: list[int]
    parent: PastTurn | None
    by_id: bool
    missed_tokens: int
    epoch: int
    index: TurnIndex

    @property
    def found_tokens(self) -> int:
        """Tokens of the context that stand in the parent's path."""
        return 0 if self.parent is None else self.parent.num_tokens

    @property
    def num_context_tokens(self) -> int:
        """Tokens of the whole context: of the parent's path and of the prompt."""
        return self.found_tokens + len(self.prompt_token_ids)

    def spec(self, params: SamplingParams, attachment: object = None) -> TurnSpec:
        """The turn as the engine takes it; `attachment` is committed with it."""
        node = self.node if attachment is None else replace(self.node, attachment=attachment)
        return TurnSpec(self.prompt_token_ids, params, messages=self.messages, node=node)

    def again(self, turn_id: str | None = None) -> ResolvedContext:
        """The same turn under another id: for several replies to one context, and for a turn run anew.

        Under the same root even where that begins a tree: what has one root runs on one engine.
        """
        return replace(self, node=replace(self.node, turn_id=turn_id or new_turn_id(self.node.turn_id)))

    def match_kind(self, output: Output) -> MatchKind:
        """How the context was found in the end: for a new tree the engine knows whether chunks were."""
        if self.parent is not None:
            return "id" if self.by_id else "message"
        usage = output.usage
        return "chunk" if usage.reused_gpu_tokens + usage.swapped_in_tokens else "none"

    def commit(self, output: Output) -> PastTurn:
        """The turn has ended well: from now on contexts go on from it."""
        turn = PastTurn(
            turn_id=self.node.turn_id,
            parent_id=self.node.parent_id,
            owner=self.node.owner,
            before=self.node.chain,
            num_tokens=self.num_context_tokens + len(output.token_ids),
            messages=self.messages,
            output_token_ids=output.token_ids,
            output_text=output.text,
            finish_reason=output.finish_reason,
            durable=self.node.durable,
        )
        self.index.add(turn, self.epoch)
        return turn


@dataclass(frozen=True, slots=True)
class _NewTurn:
    """What is known of a new turn before its place is.

    `beginning` is the chain up to the first message of a user, where roots are made of it; else b"". Of more
    than `most` tokens the context is of no use.
    """

    owner: str
    chain: bytes
    durable: bool
    epoch: int
    most: int | None
    beginning: bytes = b""


class Resolver:
    """The one resolver of a front. Safe to share by threads.

    Attributes:
      root_for: names the roots of turns that go on from none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        fingerprint: str,
        index: TurnIndex,
        *,
        is_routed: bool = False,
        root_for: RootFor = new_root,
    ) -> None:
        """For a model by its history's fingerprint; without a chat template every context is refused.

        `is_routed`: turns of one root run on one engine of several, so a context that is in memory only gets
        a root by its beginning: whoever does not know its turns any more still sends it where its state is.
        All others that begin get theirs of `root_for`.
        """
        self._is_routed = is_routed
        self.root_for = root_for
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._index = index
        self._template = None if tokenizer is None else tokenizer.chat_template
        self._format: ChatFormat | None = None
        self._refused: set[tuple[str, str]] = set()  # turns by owner and id, whose ids never change

    @property
    def index(self) -> TurnIndex:
        """What is remembered of turns."""
        return self._index

    def resolve(
        self,
        owner: str,
        messages: Sequence[Message],
        *,
        epoch: int,
        durable: bool,
        memory: Memory = Memory.ALL,
        most: int | None = None,
    ) -> ResolvedContext:
        """The turn behind the longest beginning of `messages` that is known.

        Args:
          owner: whose turns; no other's are looked at.
          messages: the whole context, of `role` and `content` only.
          epoch: of the engine, `AsyncEngine.epoch`.
          durable: whether the new turn is to be kept; it then goes on from turns of the history only.
          memory: which turns may be gone on from.
          most: tokens of a context that is of any use; see `Tokenizer.encode`.

        Raises InvalidRequestError for malformed messages, ChatTemplateError, ContextLengthError.
        """
        self._chat_format()  # refuses a model without one before anything else
        self._index.see_epoch(epoch)
        if not messages:
            check_messages(messages)
        messages = self.with_known_roles(messages)
        chains = chains_of(root_chain(owner, self._fingerprint, self._template), messages)
        beginning = b"" if durable or not self._is_routed else chains[_first_said(messages)]
        new = _NewTurn(owner, chains[-1], durable, epoch, most, beginning)
        if memory is not Memory.NONE:
            only_durable = durable or memory is Memory.DURABLE
            beginnings = self._known_beginnings(owner, messages, chains, only_durable)
            # Of a client that stops every reply all parents are refused, and hide those before them.
            known = ((cut, turn) for cut, turn in beginnings if self._may_follow(turn))
            for cut, parent in itertools.islice(known, _MAX_TRIES):
                found = self._known_behind(new, parent, messages[cut + 1 :])
                if found:
                    return found
        return self._new_tree(new, check_messages(messages))

    def resolve_after(
        self,
        owner: str,
        turn_id: str,
        messages: Sequence[Message],
        *,
        epoch: int,
        durable: bool,
        most: int | None = None,
    ) -> ResolvedContext:
        """The turn of `messages` behind a turn that is named.

        Where that cannot be gone on from, its whole path is written anew as a tree of its own: the template
        may write it otherwise, or a stop string, which no message has, may be the end of its ids.

        Raises UnknownTurnError, and what `resolve` raises.
        """
        self._chat_format()
        self._index.see_epoch(epoch)
        new_messages = self.with_known_roles(check_messages(messages))
        parent = self._index.turn(owner, turn_id)
        if durable and not parent.durable:
            raise UnknownTurnError(turn_id)
        new = _NewTurn(owner, chains_of(parent.chain, new_messages)[-1], durable, epoch, most)
        found = None
        if self._may_follow(parent):
            found = self._behind(new, parent, new_messages, by_id=True)
        return found or self._new_tree(new, (*self.path_messages(owner, turn_id), *new_messages))

    def path_messages(self, owner: str, turn_id: str) -> list[Message]:
        """All messages of a turn's path, replies included; raises UnknownTurnError."""
        messages: list[Message] = []
        for turn in self._index.path(self._index.turn(owner, turn_id)):
            messages += [*(turn.messages or ()), {"role": "assistant", "content": turn.output_text or ""}]
        return messages

    def with_known_roles(self, messages: Sequence[Message]) -> list[Message]:
        """What developers say is the system's message to a template that knows no developers."""
        if self._template is None or "developer" in self._template:
            return list(messages)
        return [
            {**message, "role": "system"} if message.get("role") == "developer" else message
            for message in messages
        ]

    # Inside

    def _known_beginnings(
        self, owner: str, messages: Sequence[Message], chains: Sequence[bytes], only_durable: bool
    ) -> Iterator[tuple[int, PastTurn]]:
        """Where a reply stands that a known turn ends with, and that turn; the longest beginning first."""
        num_replies = 0
        for cut in range(len(messages) - 2, 0, -1):
            if messages[cut]["role"] == "assistant":
                num_replies += 1
                parent = self._index.find(
                    owner,
                    chains[cut - 1],
                    canonical_text(messages[cut]["content"]),
                    durable=only_durable,
                    asks_source=num_replies <= _MAX_LOOK_UPS,
                )
                if parent is not None:
                    yield cut, parent

    def _may_follow(self, parent: PastTurn) -> bool:
        """Whether the ids of a turn's reply leave it open that its path is gone on from."""
        key = (parent.owner, parent.turn_id)
        if key in self._refused:
            return False
        may_follow = self._chat_format().may_follow(_earlier(parent))
        if not may_follow:
            if len(self._refused) >= _MAX_REFUSED:
                self._refused.clear()
            self._refused.add(key)
        return may_follow

    def _known_behind(
        self, new: _NewTurn, parent: PastTurn, messages: Sequence[Message]
    ) -> ResolvedContext | None:
        try:
            return self._behind(new, parent, messages, by_id=False)
        except UnknownTurnError:
            self._index.forget(parent.owner, parent.turn_id)
            return None

    def _behind(
        self, new: _NewTurn, parent: PastTurn, messages: Sequence[Message], *, by_id: bool
    ) -> ResolvedContext | None:
        """A turn that goes on from `parent`; None where the template cannot; raises UnknownTurnError."""
        earlier = [_earlier(turn) for turn in self._index.path(parent)]
        try:
            token_ids = self._chat_format().turn_token_ids(earlier, messages, as_told=True, most=new.most)
        except ChatTemplateError:
            # The reply's ids go on with a stop string, which no message has; or the template writes the past
            # otherwise once messages follow; or it refuses these messages: rendering more, which comes next,
            # tells.
            return None
        return self._resolved(new, parent, messages, token_ids, by_id=by_id)

    def _new_tree(self, new: _NewTurn, messages: Sequence[Message]) -> ResolvedContext:
        token_ids = self._chat_format().turn_token_ids([], messages, most=new.most)
        return self._resolved(new, None, messages, token_ids, by_id=False)

    def _resolved(
        self,
        new: _NewTurn,
        parent: PastTurn | None,
        messages: Sequence[Message],
        token_ids: list[int],
        *,
        by_id: bool,
    ) -> ResolvedContext:
        parent_id = None if parent is None else parent.turn_id
        if parent is not None:
            turn_id = new_turn_id(parent_id)
        elif new.beginning:
            turn_id = turn_id_under(root_of_digest(new.beginning))
        else:
            turn_id = turn_id_under(self.root_for(len(token_ids)))
        node = TurnNode(
            turn_id=turn_id,
            parent_id=parent_id,
            owner=new.owner,
            durable=new.durable,
            chain=new.chain,
        )
        return ResolvedContext(
            node=node,
            messages=tuple(messages),
            prompt_token_ids=token_ids,
            parent=parent,
            by_id=by_id,
            missed_tokens=_missed_tokens(messages, len(token_ids)),
            epoch=new.epoch,
            index=self._index,
        )

    def _chat_format(self) -> ChatFormat:
        if self._format is None:
            self._format = ChatFormat(self._tokenizer)
        return self._format


def has_reply(messages: Sequence[Message]) -> bool:
    """Whether there is anything that an earlier turn could have ended with."""
    return any(message["role"] == "assistant" for message in messages)


def _earlier(turn: PastTurn) -> EarlierTurn:
    return EarlierTurn(turn.messages, turn.output_text, turn.output_token_ids, turn.finish_reason)


def _first_said(messages: Sequence[Message]) -> int:
    """Where the first message of a user stands; the last one where there is none."""
    users = (index for index, message in enumerate(messages) if message["role"] == "user")
    return next(users, len(messages) - 1)


def _missed_tokens(messages: Sequence[Message], num_tokens: int) -> int:
    """About how many of a prompt's tokens are replies and what stands before them."""
    last_reply = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    if last_reply < 0:
        return 0
    sizes = [len(message["content"]) for message in messages]
    return num_tokens * sum(sizes[: last_reply + 1]) // max(1, sum(sizes))
