"""Resolution of a context: its parent turn, and the prompt of its new turn.

Owns: cutting a context at its replies, the longest match, and the prompt of the messages after it.
Does not know: HTTP, schemas, sampling, or whether a turn's KV cache is still on the device.
Called by the handlers of `server.openai`, through `server.turns.run`.

A context is a list of messages under an owner. The resolver cuts it at its replies. The longest prefix that
ends with the reply of a finished turn is that turn's path, and the messages after it are the new turn. So a
client that resends everything continues from its KV cache, with the token ids as they were sampled. An edited
reply, or a second reply to the same message, becomes another branch of the tree.

The new turn keeps the tokens of its path as far as the chat template still writes them (`ChatFormat`). A stop
string at the end of a reply, which the client never received, is not among them. A turn of text, such as a
completion, has no messages, so all its tokens stay. Without a match the whole context is the first turn of a
new tree; the engine may still find its first chunks in other sequences of the owner.

A prefill is the beginning of a reply, not a message: the reply of its turn is the prefill and the text.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from pensieve_jax.core.errors import UnknownTurnError
from pensieve_jax.core.outputs import Output
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.core.turn_node import (
    RootFor,
    TurnNode,
    new_root,
    new_turn_id,
    root_of_digest,
    turn_id_under,
)
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.history.reader import TurnView
from pensieve_jax.server.context.hashes import chains_of, root_chain
from pensieve_jax.server.context.turn_index import PastTurn, TurnIndex
from pensieve_jax.text import ReplyReader, Tokenizer
from pensieve_jax.text.chat import ChatFormat, EarlierTurn
from pensieve_jax.text.messages import (
    Message,
    call_ids,
    check_messages,
    check_results,
    num_characters,
)
from pensieve_jax.text.tool_formats import AUTOMATIC, Parsers

MatchKind = Literal["id", "message", "chunk", "none"]

_MAX_LOOK_UPS: Final = 64
"""Number of last replies of a context that are looked up in the history; earlier ones only in memory."""
_MAX_TRIES: Final = 8
"""Number of parents tried for one context, if the history no longer has their paths."""


class Memory(enum.Enum):
    """The turns that may be the parent of a context; each member is the fallback of the one before."""

    ALL = "all"
    DURABLE = "durable"  # only turns in the history: turns in memory may be gone
    NONE = "none"  # always begin a new tree


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedContext:
    """A new turn, ready to be submitted.

    Attributes:
      messages: the new messages of this turn.
      prompt_token_ids: ids after the first `keep` tokens of the path to `parent`.
      template_input: what the prompt was rendered from beside the messages.
      keep: number of tokens of that path that stay in the context; 0 without a parent.
      parent: the turn that it continues from; None begins a new tree.
      by_id: whether the client named the parent, instead of the resolver finding it by messages.
      missed_tokens: estimated number of prompt tokens up to the last reply, which a longer match would have
        found. The estimate is their share of the prompt's characters.
      epoch: `EngineService.epoch` when it was resolved.
    """

    node: TurnNode
    messages: tuple[Message, ...]
    prompt_token_ids: list[int]
    keep: int
    parent: PastTurn | None
    by_id: bool
    missed_tokens: int
    epoch: int
    index: TurnIndex
    replies: ReplyReader
    template_input: TemplateInput = NO_INPUT

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens that stay of the parent's path, and of the prompt."""
        return self.keep + len(self.prompt_token_ids)

    def spec(self, params: SamplingParams, attachment: object = None) -> TurnSpec:
        """Return the turn to submit to the engine, which commits `attachment` with it."""
        node = self.node if attachment is None else replace(self.node, attachment=attachment)
        return TurnSpec(
            self.prompt_token_ids,
            params,
            messages=self.messages,
            node=node,
            keep=self.keep,
            template_input=self.template_input,
        )

    def again(self, turn_id: str | None = None) -> ResolvedContext:
        """Return the same turn under another id, for several replies to one context or for a second run.

        It keeps the root even if it begins a tree, because all turns of one root run on one engine.
        """
        return replace(self, node=replace(self.node, turn_id=turn_id or new_turn_id(self.node.turn_id)))

    def match_kind(self, output: Output) -> MatchKind:
        """Return how the context was found; for a new tree, the usage tells whether chunks were reused."""
        if self.parent is not None:
            return "id" if self.by_id else "message"
        usage = output.usage
        return "chunk" if usage.reused_gpu_tokens + usage.swapped_in_tokens else "none"

    def commit(self, output: Output) -> PastTurn:
        """Add the finished turn to the index, so that later contexts continue from it."""
        turn = PastTurn(
            turn_id=self.node.turn_id,
            parent_id=self.node.parent_id,
            owner=self.node.owner,
            before=self.node.chain,
            num_tokens=self.num_context_tokens + len(output.token_ids),
            messages=self.messages,
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=output.token_ids,
            reply=self.reply(output),
            durable=self.node.durable,
            template_input=self.template_input,
        )
        self.index.add(turn, self.epoch)
        return turn

    def reply(self, output: Output) -> Message:
        """Return the reply of the finished turn as a message."""
        return self.replies.message(
            output.text, output.token_ids, self.template_input, turn=self.node.turn_id
        )


class Past(NamedTuple):
    """What the path to a turn contains.

    Attributes:
      text_turn: the last turn that was sent as text or ids, such as a completion's; None without one. The
        path up to it has no messages and stays as it is.
      messages: the messages of the turns after it, replies included.
    """

    text_turn: PastTurn | None
    messages: list[Message]


@dataclass(frozen=True, slots=True)
class _NewTurn:
    """A new turn before its parent is known.

    Attributes:
      beginning: the chain up to the first user message if the root is derived from it; else b"".
      token_limit: maximum number of context tokens; a far longer text is rejected before it is tokenized.
    """

    owner: str
    chain: bytes
    durable: bool
    epoch: int
    token_limit: int | None
    template_input: TemplateInput
    beginning: bytes = b""


class Resolver:
    """The resolver of one front end. Thread-safe.

    Attributes:
      root_for: chooses the root of a turn without a parent.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        fingerprint: str,
        index: TurnIndex,
        *,
        parsers: Parsers = AUTOMATIC,
        is_routed: bool = False,
        root_for: RootFor = new_root,
    ) -> None:
        """Create the resolver; without a chat template it rejects every context.

        Args:
          tokenizer: the model's tokenizer.
          fingerprint: the fingerprint of the model's history.
          index: the turns that may be parents.
          parsers: how replies are read; see `ChatFormat`.
          is_routed: whether there are several engines, and all turns of one root run on one of them. The root
            of a new context that is not durable then follows from its first messages. A front end that has
            forgotten the context's turns therefore still sends it to the engine with its KV cache.
          root_for: chooses all other new roots.
        """
        self._is_routed = is_routed
        self._parsers = parsers
        self.root_for = root_for
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._index = index
        self._template = None if tokenizer is None else tokenizer.chat_template
        self._format: ChatFormat | None = None
        self._replies = ReplyReader(tokenizer)

    @property
    def index(self) -> TurnIndex:
        """The index of turns."""
        return self._index

    def stored(self, owner: str, turn: TurnView, *, epoch: int) -> ResolvedContext:
        """Return the context of a turn that is in the history already."""
        num_own = len(turn.prompt_token_ids) + len(turn.output_token_ids)
        return ResolvedContext(
            node=TurnNode(turn_id=turn.turn_id, parent_id=turn.parent_id, owner=owner, chain=turn.chain),
            messages=turn.messages or (),
            prompt_token_ids=list(turn.prompt_token_ids),
            keep=turn.num_tokens - num_own,
            parent=None,
            by_id=False,
            missed_tokens=0,
            epoch=epoch,
            index=self._index,
            replies=self._replies,
            template_input=turn.template_input,
        )

    def resolve(
        self,
        owner: str,
        messages: Sequence[Message],
        *,
        epoch: int,
        durable: bool,
        memory: Memory = Memory.ALL,
        token_limit: int | None = None,
        template_input: TemplateInput = NO_INPUT,
    ) -> ResolvedContext:
        """Return the new turn after the longest known prefix of `messages`.

        Args:
          owner: the key owner; only this owner's turns can match.
          messages: the whole context, of well-formed messages.
          epoch: the engine's `EngineService.epoch`.
          durable: whether to store the new turn; its parent must then be in the history.
          memory: the turns that may be the parent.
          token_limit: maximum number of context tokens; see `Tokenizer.encode`.
          template_input: what the template gets beside the messages.

        Raises InvalidRequestError for malformed messages and a tool message that answers no call,
        ChatTemplateError, ContextLengthError.
        """
        self._chat_format()  # rejects a model without a chat template before anything else
        self._index.see_epoch(epoch)
        if not messages:
            check_messages(messages)
        messages = self.with_known_roles(messages)
        check_results(messages)
        chains = chains_of(self._root(owner, template_input), messages)
        beginning = b"" if durable or not self._is_routed else chains[_first_user_position(messages)]
        new = _NewTurn(owner, chains[-1], durable, epoch, token_limit, template_input, beginning)
        if memory is not Memory.NONE:
            only_durable = durable or memory is Memory.DURABLE
            known = self._known_beginnings(owner, messages, chains, only_durable)
            for cut, parent in itertools.islice(known, _MAX_TRIES):
                with contextlib.suppress(UnknownTurnError):
                    path = self._index.path(parent)
                    rest = _with_ids_of(parent.reply, messages[cut], messages[cut + 1 :])
                    return self._behind(new, path, rest, by_id=False)
                self._index.forget(parent.owner, parent.turn_id)
        return self._new_tree(new, check_messages(messages))

    def resolve_after(
        self,
        owner: str,
        turn_id: str,
        messages: Sequence[Message],
        *,
        epoch: int,
        durable: bool,
        token_limit: int | None = None,
        template_input: TemplateInput = NO_INPUT,
    ) -> ResolvedContext:
        """Return the new turn of `messages` after the turn `turn_id`.

        Raises UnknownTurnError, and what `resolve` raises.
        """
        self._chat_format()
        self._index.see_epoch(epoch)
        new_messages = self.with_known_roles(check_messages(messages))
        parent = self._index.turn(owner, turn_id)
        if durable and not parent.durable:
            raise UnknownTurnError(turn_id)
        path = self._index.path(parent)
        past = _messages_of(path)
        check_results(new_messages, call_ids(past.messages))
        chain = parent.chain
        if past.text_turn is None and not _have_same_root(parent.template_input, template_input):
            chain = chains_of(self._root(owner, template_input), past.messages)[-1]
        chain = chains_of(chain, new_messages)[-1]
        new = _NewTurn(owner, chain, durable, epoch, token_limit, template_input)
        return self._behind(new, path, new_messages, by_id=True)

    def past(self, owner: str, turn_id: str) -> Past:
        """Return what the path to a turn contains; raise UnknownTurnError."""
        return _messages_of(self._index.path(self._index.turn(owner, turn_id)))

    def with_known_roles(self, messages: Sequence[Message]) -> list[Message]:
        """Replace the role `developer` by `system` if the template does not know developers."""
        if self._template is None or "developer" in self._template:
            return list(messages)
        return [
            {**message, "role": "system"} if message.get("role") == "developer" else message
            for message in messages
        ]

    # Private methods

    def _root(self, owner: str, template_input: TemplateInput) -> bytes:
        return root_chain(owner, self._fingerprint, self._template, template_input)

    def _known_beginnings(
        self, owner: str, messages: Sequence[Message], chains: Sequence[bytes], only_durable: bool
    ) -> Iterator[tuple[int, PastTurn]]:
        """Yield the position of each reply that ends a known turn, and that turn; longest prefix first."""
        num_replies = 0
        for cut in range(len(messages) - 2, 0, -1):
            if messages[cut]["role"] == "assistant":
                num_replies += 1
                parent = self._index.find(
                    owner,
                    chains[cut - 1],
                    messages[cut],
                    durable=only_durable,
                    asks_source=num_replies <= _MAX_LOOK_UPS,
                )
                if parent is not None:
                    yield cut, parent

    def _behind(
        self, new: _NewTurn, path: Sequence[PastTurn], messages: Sequence[Message], *, by_id: bool
    ) -> ResolvedContext:
        """Return a new turn after the last one of `path`."""
        earlier: list[EarlierTurn] = []
        token_ids: list[int] = []
        for turn in path:
            num_own = len(turn.prompt_token_ids) + len(turn.output_token_ids)
            del token_ids[turn.num_tokens - num_own :]
            token_ids += turn.prompt_token_ids
            token_ids += turn.output_token_ids
            earlier.append(
                EarlierTurn(turn.messages, None, turn.output_token_ids, turn.num_tokens, turn.reply)
            )
        keep, prompt = self._chat_format().turn_prompt(
            earlier,
            token_ids,
            messages,
            template_input=new.template_input,
            token_limit=new.token_limit,
        )
        return self._resolved(new, path[-1], messages, prompt, keep=keep, by_id=by_id)

    def _new_tree(self, new: _NewTurn, messages: Sequence[Message]) -> ResolvedContext:
        token_ids = self._chat_format().token_ids(
            messages, template_input=new.template_input, token_limit=new.token_limit
        )
        return self._resolved(new, None, messages, token_ids, keep=0, by_id=False)

    def _resolved(
        self,
        new: _NewTurn,
        parent: PastTurn | None,
        messages: Sequence[Message],
        token_ids: list[int],
        *,
        keep: int,
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
            keep=keep,
            parent=parent,
            by_id=by_id,
            missed_tokens=_missed_tokens(messages, len(token_ids)),
            epoch=new.epoch,
            index=self._index,
            replies=self._replies,
            template_input=self._chat_format().with_reasoning(new.template_input, token_ids),
        )

    def _chat_format(self) -> ChatFormat:
        if self._format is None:
            self._format = ChatFormat(self._tokenizer, parsers=self._parsers)
        return self._format


def _messages_of(path: Sequence[PastTurn]) -> Past:
    text_turn: PastTurn | None = None
    messages: list[Message] = []
    for turn in path:
        if turn.messages is None:
            text_turn, messages = turn, []
        else:
            messages += [*turn.messages, turn.reply]
    return Past(text_turn, messages)


def _have_same_root(one: TemplateInput, other: TemplateInput) -> bool:
    return one.tools == other.tools and one.arguments == other.arguments


def _with_ids_of(reply: Message, repeated: Message, messages: Sequence[Message]) -> list[Message]:
    """Return messages whose tool results name the calls of `reply` by the ids that it has.

    A client may have given the calls other ids when it `repeated` the reply.
    """
    ids = dict(zip(call_ids([repeated]), call_ids([reply]), strict=True))
    return [
        {**message, "tool_call_id": ids[message["tool_call_id"]]}
        if message.get("tool_call_id") in ids
        else message
        for message in messages
    ]


def has_reply(messages: Sequence[Message]) -> bool:
    """Return whether the messages contain a reply, so that an earlier turn can match."""
    return any(message["role"] == "assistant" for message in messages)


def _first_user_position(messages: Sequence[Message]) -> int:
    """Return the position of the first user message, or of the last message without one."""
    users = (index for index, message in enumerate(messages) if message["role"] == "user")
    return next(users, len(messages) - 1)


def _missed_tokens(messages: Sequence[Message], num_tokens: int) -> int:
    """Estimate how many prompt tokens belong to the last reply and the messages before it."""
    last_reply = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    if last_reply < 0:
        return 0
    sizes = [num_characters([message]) for message in messages]
    return num_tokens * sum(sizes[: last_reply + 1]) // max(1, sum(sizes))
