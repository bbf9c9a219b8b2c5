"""The messages between the front end and the engine's process, including errors.

Owns: the messages; the serialization of turn specifications; the error classes that can be sent, and the
replacement of values that cannot.
Does not know: frames, sockets, or how a message is handled.

The front end numbers turns and calls, because only the front end starts them.

An error is sent as its class, its message and its attributes. The receiver creates it without its
constructor, so the message is identical. Only plain values are sent as such; others become a short `repr`.
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
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.core.turn_node import TurnNode
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.conversations import check_conversation_id
from pensieve_jax.history.server_tables import changes
from pensieve_jax.history.server_tables.changes import HistoryChange, ResponseDraft
from pensieve_jax.server.async_engine import EngineInfo
from pensieve_jax.server.logs import LogFormat

_CHANGES: dict[str, type[Any]] = {kind.__name__: kind for kind in HistoryChange.__value__.__args__}
# Modules whose errors can be sent. A name from another module must not make this process import it.
_MODULES: Final = frozenset(
    {
        "pensieve_jax.core.errors",
        "pensieve_jax.server.engine_process.wire",
        "model_defs.errors",
        "pallas_kernels.ragged_paged_attention.errors",
    }
)
_PLAIN: Final = (str, int, float, bool, type(None))


# From the front end to the engine


class Start(msgspec.Struct, tag=True, array_like=True):
    """First message, with the arguments of `LLM`.

    Attributes:
      log_format: the log format of the engine's process; None keeps Python's default.
      may_make_history: whether to create a missing history. Only the first start may; after a restart, a
        missing history is an error.
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
    """Serialized `TurnNode`; its values are checked when the node is created again."""

    turn_id: str
    parent_id: str | None
    owner: str
    durable: bool
    chain: bytes
    attachment: ResponseDraft | None


class SentPrefix(msgspec.Struct, array_like=True):
    """Serialized `SharedPrefix`, which its tokens identify."""

    token_ids: tuple[int, ...]
    messages: tuple[dict[str, Any], ...] | None
    released: bool
    template_input: TemplateInput = NO_INPUT


class SentTurn(msgspec.Struct, array_like=True):
    """Turn with its number.

    If `is_encoded`, `prompt` is token ids, or None in a `Submit` if it is the same as the previous turn's.
    Otherwise `prompt` is any prompt that `LLM.generate` accepts.
    """

    number: int
    prompt: Any
    is_encoded: bool
    params: SamplingParams
    conversation_id: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    prefix: SentPrefix | None = None
    node: SentNode | None = None
    keep: int | None = None
    template_input: TemplateInput | None = None


class Submit(msgspec.Struct, tag=True, array_like=True):
    """Request to queue all turns or none; see `submission`."""

    turns: list[SentTurn]


class Cancel(msgspec.Struct, tag=True, array_like=True):
    """Request to end turns as if they had never been submitted."""

    numbers: list[int]


class Call(msgspec.Struct, tag=True, array_like=True):
    """Call of one of `calls.CALLS` by name."""

    number: int
    name: str
    arguments: list[Any]


class Apply(msgspec.Struct, tag=True, array_like=True):
    """Change of the history's tables other than turns; `change` has the fields of class `kind`."""

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


# From the engine to the front end


class Ready(msgspec.Struct, tag=True, array_like=True):
    """Message that the model is loaded and its steps are compiled."""

    info: EngineInfo


class Failed(msgspec.Struct, tag=True, array_like=True):
    """Error of an engine that cannot start."""

    error: SentError


class Ending(msgspec.Struct, array_like=True):
    """End of a turn, with an output or an error. An error before the turn is accepted is a refusal."""

    number: int
    output: Output | None = None
    error: SentError | None = None


class Answer(msgspec.Struct, array_like=True):
    """Result or error of a call."""

    number: int
    value: Any = None
    error: SentError | None = None


class Report(msgspec.Struct, tag=True, array_like=True, omit_defaults=True):
    """Results of a step in columns: turn `numbers[i]` has the delta `texts[i]` with `token_ids[i]`.

    Attributes:
      numbers, texts: numbers and new texts of running turns with a delta.
      token_ids: per turn a single id, which is the usual case, or a list of ids.
      logprobs: logprobs by turn number, for turns that requested them.
      accepted: numbers of turns that were queued.
      endings: turns that ended. The output includes tokens that no delta had.
      answers: the answers to calls.
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
    """Serialize a turn specification.

    Raises InvalidRequestError for an id, parameters or an attachment of a type that cannot be sent.
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
        spec.keep,
        None if spec.template_input is NO_INPUT or spec.template_input == NO_INPUT else spec.template_input,
    )


def sent_prompt(number: int, prompt: Any, params: SamplingParams, conversation_id: str | None) -> SentTurn:
    """Serialize a prompt that the engine's process will encode; raises InvalidRequestError."""
    check_conversation_id(conversation_id)
    check_sampling_params(params)
    return SentTurn(number, plain_ids(prompt), False, params, conversation_id)


def submission(turns: Sequence[SentTurn]) -> Submit:
    """Return the message that submits `turns`. A prompt that consecutive turns share is sent once."""
    sent = list(turns[:1])
    for before, turn in itertools.pairwise(turns):
        is_shared = turn.is_encoded and before.is_encoded and turn.prompt is before.prompt
        sent.append(msgspec.structs.replace(turn, prompt=None) if is_shared else turn)
    return Submit(sent)


def submitted(message: Submit) -> list[SentTurn]:
    """Return the turns of a message, each with its prompt; turns that share a prompt share one list."""
    for before, turn in itertools.pairwise(message.turns):
        if turn.is_encoded and turn.prompt is None:
            turn.prompt = before.prompt
    return message.turns


def received_spec(sent: SentTurn) -> TurnSpec:
    """Return the specification of an encoded turn; raises InvalidRequestError for an invalid node."""
    node, prefix = sent.node, sent.prefix
    return TurnSpec(
        sent.prompt,
        sent.params,
        sent.conversation_id,
        sent.messages,
        None
        if prefix is None
        else SharedPrefix(prefix.token_ids, prefix.messages, prefix.released, prefix.template_input),
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
        sent.keep,
        sent.template_input or NO_INPUT,
    )


def sent_change(number: int, change: HistoryChange) -> Apply:
    """Serialize a history change; raises InvalidRequestError for any other object."""
    kind = type(change).__name__
    if _CHANGES.get(kind) is not type(change):
        raise InvalidRequestError("change", change, f"one of {', '.join(_CHANGES)}")
    return Apply(number, kind, msgspec.Raw(msgspec.msgpack.encode(change)))


def received_change(sent: Apply) -> HistoryChange:
    """Deserialize a history change; raises InvalidRequestError for an unknown kind or invalid fields."""
    kind = _CHANGES.get(sent.kind)
    if kind is None:
        raise InvalidRequestError("change", sent.kind, f"one of {', '.join(_CHANGES)}")
    try:
        found: HistoryChange = msgspec.msgpack.decode(sent.change, type=kind)
    except msgspec.DecodeError as error:
        raise InvalidRequestError("change", sent.kind, "a complete change", str(error)) from error
    return found


def senders(payload: bytes) -> tuple[list[int], list[int]]:
    """Return the numbers of turns and of calls in an unreadable message, as far as they are readable."""
    try:
        head = msgspec.msgpack.decode(payload, type=_SubmitHead | _CallHead | _ApplyHead)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [], []
    return (
        ([turn.number for turn in head.turns], []) if isinstance(head, _SubmitHead) else ([], [head.number])
    )


def plain_ids(prompt: Any) -> Any:
    """Convert an array to a list; return any other value unchanged."""
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt


def check_sampling_params(params: object) -> None:
    """Raise InvalidRequestError unless `params` is a SamplingParams, which checks its own values."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError("sampling_params", params, "SamplingParams")


def _sent_prefix(prefix: SharedPrefix) -> SentPrefix:
    messages: Sequence[Any] | None = prefix.messages
    return SentPrefix(
        prefix.token_ids,
        None if messages is None else tuple(map(dict, messages)),
        prefix.released,
        prefix.template_input,
    )


def _sent_node(node: TurnNode) -> SentNode:
    attachment = node.attachment
    if attachment is not None and not isinstance(attachment, changes.ResponseDraft):
        raise InvalidRequestError("node.attachment", attachment, "a ResponseDraft or None")
    return SentNode(node.turn_id, node.parent_id, node.owner, node.durable, node.chain, attachment)


class SentError(msgspec.Struct, frozen=True, array_like=True):
    """Serialized error, with its class, message and attributes."""

    module: str
    name: str
    message: tuple[Any, ...]
    attributes: dict[str, Any]


def sent_error(error: Exception) -> SentError:
    """Serialize an error with the public attributes that its class sets."""
    kind = type(error)
    attributes = {name: _plain(value) for name, value in vars(error).items() if not name.startswith("_")}
    return SentError(kind.__module__, kind.__name__, tuple(map(_plain, error.args)), attributes)


def received_error(sent: SentError) -> Exception:
    """Deserialize an error. For a class outside this project, return a PensieveError with the message."""
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
