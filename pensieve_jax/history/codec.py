"""The encoding of turns as rows: checks a turn's values, packs them for a table, and unpacks them.

Owns: the packing (little-endian int32 and float32 blobs, signed 64-bit seeds, JSON messages, a checksum) and
its limits.
Does not know: SQL, files or transactions.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pensieve_jax.core.errors import HistoryCorruptError, InvalidRequestError
from pensieve_jax.core.options import is_utf8
from pensieve_jax.core.outputs import TokenLogprob, Usage
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.core.turn_node import check_turn_id
from pensieve_jax.history.store import TurnRecord

TOKEN_BYTES: Final = 4
MAX_TOKEN_ID: Final = 2**31 - 1
_STORED_IDS: Final = np.dtype("<i4")
_STORED_COUNTS: Final = np.dtype("<u2")
_STORED_LOGPROBS: Final = np.dtype("<f4")


class TurnRow(NamedTuple):
    """One row of the table `turns`, with columns in order; `schema` explains them."""

    owner: str
    turn_id: str
    parent_id: str | None
    turn_index: int
    num_tokens: int
    prompt_ids: bytes
    output_ids: bytes
    seed: int
    finish_reason: str
    created_at_s: float
    messages: str | None
    output_text: str | None
    usage: str | None
    chain: bytes | None
    kept: int
    checksum: int


def num_own_tokens(row: TurnRow) -> int:
    """Return the number of tokens of the turn itself, without the path before it."""
    return (len(row.prompt_ids) + len(row.output_ids)) // TOKEN_BYTES


def pack_turn(turn: TurnRecord, field: str) -> TurnRow:
    """Return a row that counts only the turn's own tokens; raise InvalidRequestError naming `field`.

    The caller that knows the turn's place in a tree sets `num_tokens`, and the ids that a turn of a named
    conversation lacks.
    """
    check_text(turn.conversation_id, f"{field}.conversation_id")
    check_text(turn.owner, f"{field}.owner")
    if turn.turn_id:
        check_turn_id(f"{field}.turn_id", turn.turn_id)
    elif not turn.conversation_id:
        raise InvalidRequestError(f"{field}.conversation_id", "", "a non-empty string")
    check_text(turn.finish_reason, f"{field}.finish_reason")
    if turn.output_text is not None:
        check_text(turn.output_text, f"{field}.output_text")
    if not _is_int(turn.turn_index) or turn.turn_index < 0:
        raise InvalidRequestError(f"{field}.turn_index", turn.turn_index, "an int of at least 0")
    if not _is_int(turn.seed) or not 0 <= turn.seed < 2**64:
        raise InvalidRequestError(f"{field}.seed", turn.seed, "an int from 0 to 2**64 - 1")
    if not math.isfinite(turn.created_at_s):
        raise InvalidRequestError(f"{field}.created_at_s", turn.created_at_s, "a finite number of seconds")
    prompt = pack_token_ids(turn.prompt_token_ids, f"{field}.prompt_token_ids")
    output = pack_token_ids(turn.output_token_ids, f"{field}.output_token_ids")
    seed = turn.seed - 2**64 if turn.seed >= 2**63 else turn.seed  # the table's integers are signed
    messages = None if turn.messages is None else _pack_messages(turn, f"{field}.messages")
    if turn.keep is not None and (not _is_int(turn.keep) or turn.keep < 0):
        raise InvalidRequestError(f"{field}.keep", turn.keep, "None or an int of at least 0")
    return TurnRow(
        owner=turn.owner,
        turn_id=turn.turn_id,
        parent_id=turn.parent_id,
        turn_index=int(turn.turn_index),
        num_tokens=(len(prompt) + len(output)) // TOKEN_BYTES,
        prompt_ids=prompt,
        output_ids=output,
        seed=int(seed),
        finish_reason=turn.finish_reason,
        created_at_s=float(turn.created_at_s),
        messages=messages,
        output_text=turn.output_text,
        usage=None if turn.usage is None else _pack_usage(turn.usage),
        chain=turn.chain or None,
        kept=0,
        checksum=checksum(prompt, output, turn.keep),
    )


def unpack_turn(row: TurnRow, num_tokens_before: int, conversation_id: str = "") -> TurnRecord:
    """Return the turn of a row; raise HistoryCorruptError if its ids are not those that were written.

    `num_tokens_before` is the length of the path to its parent. A turn without all of these tokens has
    replaced some: `keep` is what remains of the length of its path without its own tokens.
    """
    keep = kept_before(row, num_tokens_before)
    check_undamaged(row, keep, conversation_id)
    messages, template_input = unpack_messages(row.messages)
    return TurnRecord(
        conversation_id=conversation_id,
        turn_index=row.turn_index,
        prompt_token_ids=tuple(unpack_token_ids(row.prompt_ids).tolist()),
        output_token_ids=tuple(unpack_token_ids(row.output_ids).tolist()),
        seed=row.seed % 2**64,
        finish_reason=row.finish_reason,
        created_at_s=row.created_at_s,
        messages=messages,
        output_text=row.output_text,
        turn_id=row.turn_id,
        parent_id=row.parent_id,
        owner=row.owner,
        chain=row.chain or b"",
        usage=unpack_usage(row.usage),
        keep=keep,
        template_input=template_input,
    )


def kept_before(row: TurnRow, num_tokens_before: int) -> int | None:
    """Return the number of earlier tokens that a turn keeps, or None if it keeps all `num_tokens_before`.

    It is more than all of them in a damaged path only, which its length then shows.
    """
    keep = row.num_tokens - num_own_tokens(row)
    return keep if keep < num_tokens_before else None


def check_undamaged(row: TurnRow, keep: int | None, conversation_id: str) -> None:
    """Raise HistoryCorruptError unless a turn's ids and `keep` are those that were written."""
    if checksum(row.prompt_ids, row.output_ids, keep) == row.checksum:
        return
    if not conversation_id:
        raise HistoryCorruptError(
            f"Turn {row.turn_id!r} is damaged: its token ids do not match their checksum. Delete the turns "
            "that continue it; all others are good."
        )
    raise HistoryCorruptError(
        f"Turn {row.turn_index} of conversation {conversation_id!r} is damaged: its token ids do not match "
        "their checksum. Truncate the conversation before that turn or end it; the other conversations are "
        "good."
    )


def unpack_messages(packed: str | None) -> tuple[tuple[Any, ...] | None, TemplateInput]:
    """Return chat messages as they were given, and what the template got beside them."""
    if packed is None:
        return None, NO_INPUT
    value = json.loads(packed)
    if isinstance(value, list):
        return tuple(value), NO_INPUT
    return tuple(value["messages"]), TemplateInput.unpacked(value)


def _pack_usage(usage: Usage) -> str:
    return json.dumps({name: getattr(usage, name) for name in Usage.__slots__}, separators=(",", ":"))


def unpack_usage(packed: str | None) -> Usage | None:
    """Return where a turn's tokens came from, or None if that was not stored."""
    return None if packed is None else Usage(**json.loads(packed))


def pack_token_ids(token_ids: Sequence[int], field: str) -> bytes:
    """Return token ids as little-endian int32; raise InvalidRequestError naming the first invalid id."""
    if len(token_ids) == 0:
        return b""
    # For anything but ints that fit 64 bits, numpy returns an array of objects or floats.
    array = np.asarray(token_ids)
    if array.ndim == 1 and array.dtype.kind in "iu" and array.min() >= 0 and array.max() <= MAX_TOKEN_ID:
        return array.astype(_STORED_IDS).tobytes()
    for index, token_id in enumerate(token_ids):
        if not _is_int(token_id) or not 0 <= token_id <= MAX_TOKEN_ID:
            raise InvalidRequestError(f"{field}[{index}]", token_id, f"an int from 0 to {MAX_TOKEN_ID}")
    raise InvalidRequestError(field, token_ids, "a flat sequence of ints")


def unpack_token_ids(packed: bytes) -> NDArray[np.int32]:
    """Return the inverse of `pack_token_ids`: i32[len(packed) / 4], a copy in native byte order."""
    return np.frombuffer(packed, _STORED_IDS).astype(np.int32)


def checksum(prompt: bytes, output: bytes, keep: int | None = None) -> int:
    """Return the CRC-32 over both id lists, the position of the boundary between them, and `keep`."""
    whole = zlib.crc32(output, zlib.crc32(prompt, len(prompt)))
    return whole if keep is None else zlib.crc32(keep.to_bytes(8, "little", signed=True), whole)


def _pack_messages(turn: TurnRecord, field: str) -> str:
    """Return a list of messages, or an object of them and what the template got beside them."""
    template_input = turn.template_input.packed()
    try:
        messages = [dict(message) for message in turn.messages or ()]
        value = {"messages": messages, **template_input} if template_input else messages
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(field, turn.messages, f"a sequence of JSON objects ({error})") from error


def pack_logprobs(logprobs: Sequence[TokenLogprob]) -> bytes:
    """Return log-probabilities as bytes; they are rounded to float32, as devices compute them."""
    counts = np.array([len(one.top) for one in logprobs], _STORED_COUNTS)
    pairs = [pair for one in logprobs for pair in ((one.token_id, one.logprob), *one.top.items())]
    ids = np.array([token_id for token_id, _ in pairs], _STORED_IDS)
    values = np.array([value for _, value in pairs], _STORED_LOGPROBS)
    size = np.array([len(logprobs)], _STORED_IDS)
    return b"".join(array.tobytes() for array in (size, counts, ids, values))


def unpack_logprobs(packed: bytes) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities that were packed."""
    num_tokens = int(np.frombuffer(packed, _STORED_IDS, 1)[0])
    counts = np.frombuffer(packed, _STORED_COUNTS, num_tokens, TOKEN_BYTES).tolist()
    start, num_pairs = TOKEN_BYTES + num_tokens * _STORED_COUNTS.itemsize, num_tokens + sum(counts)
    ids = np.frombuffer(packed, _STORED_IDS, num_pairs, start).tolist()
    values = np.frombuffer(packed, _STORED_LOGPROBS, num_pairs, start + num_pairs * TOKEN_BYTES).tolist()
    found, at = [], 0
    for count in counts:
        end = at + 1 + count
        top = dict(zip(ids[at + 1 : end], values[at + 1 : end], strict=True))
        found.append(TokenLogprob(ids[at], values[at], top))
        at = end
    return tuple(found)


def check_text(text: object, field: str) -> None:
    """Raise InvalidRequestError, naming `field`, unless `text` is a string that UTF-8 can encode."""
    if not isinstance(text, str):
        raise InvalidRequestError(field, text, "a string")
    if not is_utf8(text):
        raise InvalidRequestError(field, text, "text that UTF-8 can hold, without lone surrogates")


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
