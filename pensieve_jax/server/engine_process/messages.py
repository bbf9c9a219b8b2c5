"""What the two processes say to each other, errors included.

Owns: the messages; how a turn's specification crosses; which classes of errors cross, and what becomes of
values that cannot.
Does not know: frames, sockets, or what is done with a message.

Turns and calls are numbered by the front, which is the only one to begin something.

An error crosses as its class, its message and its attributes, and is made again without its constructor: so
the message is word for word the same, though a value of a foreign type arrives as the text that showed it.
"""

from __future__ import annotations

import importlib
import itertools
import reprlib
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from pensieve_jax.config import EngineConfig
from pensieve_jax.core.errors import InvalidRequestError, PensieveError
from pensieve_jax.core.outputs import Output, TokenLogprob
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.turn_node import TurnNode
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.conversations import check_conversation_id
from pensieve_jax.history.server_tables import changes
from pensieve_jax.history.server_tables.changes import HistoryChange, ResponseDraft
from pensieve_jax.server.async_engine import EngineInfo
from pensieve_jax.server.logs import LogFormat

_CHANGES: dict[str, type[Any]] = {kind.__name__: kind for kind in HistoryChange.__value__.__args__}
# Modules whose errors cross; a name from anywhere else must not make this process import something.
_MODULES: Final = frozenset(
    {
        "pensieve_jax.core.errors",
        "pensieve_jax.server.engine_process.wire",
        "model_defs.errors",
        "pallas_kernels.ragged_paged_attention.errors",
    }
)
_PLAIN: Final = (str, int, float, bool, type(None))


# Front to engine


class Start(msgspec.Struct, tag=True, array_like=True):
    """The first message: what to serve. Arguments are those of `LLM`.

    Attributes:
      log_format: of the lines that the engine's process logs; None leaves them to Python.
      may_make_history: whether a history that is missing is a new one, which it is in the first life alone.
    """

    model: str
    dtype: str
    history: str | None
    synchronous: Literal["normal", "full"]
    config: EngineConfig
    progress: bool
    log_format: LogFormat | None = None
    may_make_history: bool = True


class SentNode(msgspec.Struct, array_like=True):
    """A `TurnNode`; what it says is checked where it is made again."""

    turn_id: str
    parent_id: str | None
    owner: str
    durable: bool
    chain: bytes
    attachment: ResponseDraft | None


class SentPrefix(msgspec.Struct, array_like=True):
    """A `SharedPrefix`, which is known by its tokens."""

    token_ids: tuple[int, ...]
    messages: tuple[dict[str, Any], ...] | None
    released: bool


class SentTurn(msgspec.Struct, array_like=True):
    """A turn with its number.

    `prompt` is token ids, and of a turn that `is_encoded` nothing else, but None in a `Submit` where it is
    that of the turn before; otherwise a prompt as `LLM.generate` takes it.
    """

    number: int
    prompt: Any
    is_encoded: bool
    params: SamplingParams
    conversation_id: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    prefix: SentPrefix | None = None
    node: SentNode | None = None


class Submit(msgspec.Struct, tag=True, array_like=True):
    """Queue turns, all or none; see `submission`."""

    turns: list[SentTurn]


class Cancel(msgspec.Struct, tag=True, array_like=True):
    """End turns as if they had never been sent."""

    numbers: list[int]


class Call(msgspec.Struct, tag=True, array_like=True):
    """One of `calls.CALLS`, by name."""

    number: int
    name: str
    arguments: list[Any]


class Apply(msgspec.Struct, tag=True, array_like=True):
    """Change what the history keeps beside turns; `change` is of the kind's fields."""

    number: int
    kind: str
    change: msgspec.Raw


type FrontMessage = Start | Submit | Cancel | Call | Apply


class _TurnHead(msgspec.Struct, array_like=True):
    number: int


class _SubmitHead(msgspec.Struct, tag="Submit", array_like=True):
    turns: list[_TurnHead]


class _CallHead(msgspec.Struct, tag="Call", array_like=True):
    number: int


class _ApplyHead(msgspec.Struct, tag="Apply", array_like=True):
    number: int


# Engine to front


class Ready(msgspec.Struct, tag=True, array_like=True):
    """Everything is loaded and compiled."""

    info: EngineInfo


class Failed(msgspec.Struct, tag=True, array_like=True):
    """There will be no engine, and this is why."""

    error: SentError


class Ending(msgspec.Struct, array_like=True):
    """How a turn left: with an output, or an error, which before its acceptance is its refusal."""

    number: int
    output: Output | None = None
    error: SentError | None = None


class Answer(msgspec.Struct, array_like=True):
    """What a call returned or raised."""

    number: int
    value: Any = None
    error: SentError | None = None


class Report(msgspec.Struct, tag=True, array_like=True, omit_defaults=True):
    """All that a step gave, by columns: turn `numbers[i]` said `texts[i]` with `token_ids[i]`.

    Attributes:
      numbers, texts: of turns in progress that said something.
      token_ids: an id where there is one, as almost always, else a list of them.
      logprobs: by number, of turns that asked for them.
      accepted: numbers of turns that were queued.
      endings: turns that left; an output has what no delta had.
      answers: of calls.
      stats: the engine's counters, once a second.
    """

    numbers: list[int] = []
    texts: list[str] = []
    token_ids: list[int | list[int]] = []
    logprobs: dict[int, list[TokenLogprob]] = {}
    accepted: list[int] = []
    endings: list[Ending] = []
    answers: list[Answer] = []
    stats: dict[str, float] | None = None


type EngineMessage = Ready | Failed | Report


def sent_spec(number: int, spec: TurnSpec) -> SentTurn:
    """A specification, to be sent.

    Raises InvalidRequestError for an id, parameters or an attachment of another type than can cross.
    """
    check_conversation_id(spec.conversation_id)
    check_sampling_params(spec.params)
    node, prefix = spec.node, spec.prefix
    return SentTurn(
        number,
        plain_ids(spec.prompt_token_ids),
        True,
        spec.params,
        spec.conversation_id,
        None if spec.messages is None else tuple(map(dict, spec.messages)),
        None if prefix is None else _sent_prefix(prefix),
        None if node is None else _sent_node(node),
    )


def sent_prompt(number: int, prompt: Any, params: SamplingParams, conversation_id: str | None) -> SentTurn:
    """A prompt that the engine's process is to encode, to be sent; raises InvalidRequestError."""
    check_conversation_id(conversation_id)
    check_sampling_params(params)
    return SentTurn(number, plain_ids(prompt), False, params, conversation_id)


def submission(turns: Sequence[SentTurn]) -> Submit:
    """Turns, to be sent; what several in a row share, as replies to one long prompt do, crosses once."""
    sent = list(turns[:1])
    for before, turn in itertools.pairwise(turns):
        is_shared = turn.is_encoded and before.is_encoded and turn.prompt is before.prompt
        sent.append(msgspec.structs.replace(turn, prompt=None) if is_shared else turn)
    return Submit(sent)


def submitted(message: Submit) -> list[SentTurn]:
    """Its turns, each with its prompt, one list for all that share it."""
    for before, turn in itertools.pairwise(message.turns):
        if turn.is_encoded and turn.prompt is None:
            turn.prompt = before.prompt
    return message.turns


def received_spec(sent: SentTurn) -> TurnSpec:
    """The specification of a turn that is encoded already; raises InvalidRequestError for a bad node."""
    node, prefix = sent.node, sent.prefix
    return TurnSpec(
        sent.prompt,
        sent.params,
        sent.conversation_id,
        sent.messages,
        None if prefix is None else SharedPrefix(prefix.token_ids, prefix.messages, prefix.released),
        None
        if node is None
        else TurnNode(
            turn_id=node.turn_id,
            parent_id=node.parent_id,
            owner=node.owner,
            durable=node.durable,
            chain=node.chain,
            attachment=node.attachment,
        ),
    )


def sent_change(number: int, change: HistoryChange) -> Apply:
    """A change, to be sent; raises InvalidRequestError for what is none."""
    kind = type(change).__name__
    if _CHANGES.get(kind) is not type(change):
        raise InvalidRequestError("change", change, f"one of {', '.join(_CHANGES)}")
    return Apply(number, kind, msgspec.Raw(msgspec.msgpack.encode(change)))


def received_change(sent: Apply) -> HistoryChange:
    """The change again; raises InvalidRequestError for what is none."""
    kind = _CHANGES.get(sent.kind)
    if kind is None:
        raise InvalidRequestError("change", sent.kind, f"one of {', '.join(_CHANGES)}")
    try:
        found: HistoryChange = msgspec.msgpack.decode(sent.change, type=kind)
    except msgspec.DecodeError as error:
        raise InvalidRequestError("change", sent.kind, "complete", str(error)) from error
    return found


def senders(payload: bytes) -> tuple[list[int], list[int]]:
    """The numbers of turns and of calls in a message that cannot be read, if those can."""
    try:
        head = msgspec.msgpack.decode(payload, type=_SubmitHead | _CallHead | _ApplyHead)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [], []
    return (
        ([turn.number for turn in head.turns], []) if isinstance(head, _SubmitHead) else ([], [head.number])
    )


def plain_ids(prompt: Any) -> Any:
    """Arrays as lists; anything else as it is."""
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt


def check_sampling_params(params: object) -> None:
    """Raise InvalidRequestError unless they are some; what they say is checked already."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError("sampling_params", params, "SamplingParams")


def _sent_prefix(prefix: SharedPrefix) -> SentPrefix:
    messages: Sequence[Any] | None = prefix.messages
    return SentPrefix(
        prefix.token_ids, None if messages is None else tuple(map(dict, messages)), prefix.released
    )


def _sent_node(node: TurnNode) -> SentNode:
    attachment = node.attachment
    if attachment is not None and not isinstance(attachment, changes.ResponseDraft):
        raise InvalidRequestError("node.attachment", attachment, "a ResponseDraft or None")
    return SentNode(node.turn_id, node.parent_id, node.owner, node.durable, node.chain, attachment)


class SentError(msgspec.Struct, frozen=True, array_like=True):
    """An error as it crosses."""

    module: str
    name: str
    message: tuple[Any, ...]
    attributes: dict[str, Any]


def sent_error(error: Exception) -> SentError:
    """To be sent; attributes are those that the error's own class sets."""
    kind = type(error)
    attributes = {name: _plain(value) for name, value in vars(error).items() if not name.startswith("_")}
    return SentError(kind.__module__, kind.__name__, tuple(map(_plain, error.args)), attributes)


def received_error(sent: SentError) -> Exception:
    """The error again; a PensieveError of the same words where its class is not one of this project's."""
    kind: Any = None
    if sent.module in _MODULES:
        kind = getattr(importlib.import_module(sent.module), sent.name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return PensieveError(*sent.message)
    error: Exception = kind.__new__(kind)
    error.args = sent.message
    for name, value in sent.attributes.items():
        setattr(error, name, value)
    return error


def _plain(value: object) -> object:
    if type(value) is int and not -(2**63) <= value < 2**64:
        return str(value)
    return value if type(value) in _PLAIN else reprlib.repr(value)
