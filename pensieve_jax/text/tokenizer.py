"""A tokenizer as the engine uses it: encoding and decoding of whole texts, special tokens, a fingerprint.

Owns: when a beginning-of-sequence token is added, which ids are not text, and what identifies a vocabulary.
Does not know: files (`loading`), streaming (`detokenizer`), templates (`chat`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Protocol

import tokenizers
from tokenizers import AddedToken

from pensieve_jax.core.errors import ContextLengthError, InvalidRequestError
from pensieve_jax.text.listed_tokens import mark_special

BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""The spelling of a byte's token in tokenizers with byte fallback."""
_MAX_IDS_OF_MARK: Final = 32
"""Number of ids that a mark at the end of a text may have, with white space behind it."""
_LONG = 2048
"""Sequences of more ids than this are decoded as a batch of one. The library holds the interpreter's lock
while it decodes a single text and releases it during a batch. For the few ids of a stream, releasing the lock
costs more than it gains."""

_FEW_TOKENS: Final = 1000
_CHARACTERS: Final = 8
"""Upper bound of characters per token in nearly all texts. Where it fails, more of the text is examined."""


def byte_characters() -> list[str]:
    """Return each byte's printable stand-in in byte-level vocabularies: itself, or one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


_BYTES_BY_CHARACTER: Final = {character: byte for byte, character in enumerate(byte_characters())}


class LongTexts(Protocol):
    """Encodes long texts elsewhere, since they may take much memory and time.

    Attributes:
      min_characters: a text of at least this length is long.
    """

    min_characters: int

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text as the backend does; raise what it raises."""
        ...

    def offsets(self, text: str) -> list[int]:
        """Return where the tokens of a text begin, in characters; raise what the backend raises."""
        ...


class Tokenizer:
    """A `tokenizers.Tokenizer` with the conventions of one model. Immutable; threads may share it.

    Attributes:
      bos_token, eos_token: their text, or None.
      bos_id, eos_id: their ids, or None.
      first_id: id that the model expects before a conversation, or None. It is `bos_id`, unless the
        post-processor puts another id first.
      wants_bos: whether there is a `first_id`.
      special_ids: ids that decode to no text (control tokens, bos and eos).
      special_tokens: texts of the named special tokens (bos_token, pad_token, ...) by name.
      chat_template: Jinja source, or None.
      long_texts: encodes long texts; None encodes them here. It may be set before threads share it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        wants_bos: bool | None = None,
        chat_template: str | None = None,
        other_tokens: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Take over `backend` (its truncation and padding are switched off).

        `wants_bos` None does as the backend's own post-processor. A `bos_token` or `eos_token` that the
        vocabulary lacks counts as None. `other_tokens` are further named special tokens, such as
        "pad_token"; only chat templates read them.
        """
        # Truncation or padding would silently change a prompt.
        backend.no_truncation()
        backend.no_padding()
        ends = [token for token in (bos_token, eos_token) if token is not None]
        mark_special(
            backend,
            [AddedToken(token, special=True) for token in ends if backend.token_to_id(token) is not None],
        )
        self._backend = backend
        # Of ids that were asked for, by id; no more than the vocabulary has. A step asks for every new token.
        self._spellings: dict[int, str] = {}
        self._texts_alone: dict[int, str] = {}
        self.long_texts: LongTexts | None = None
        self.bos_id: int | None = None if bos_token is None else backend.token_to_id(bos_token)
        self.eos_id: int | None = None if eos_token is None else backend.token_to_id(eos_token)
        self.bos_token = None if self.bos_id is None else bos_token
        self.eos_token = None if self.eos_id is None else eos_token
        own_tokens = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        named = {**other_tokens, **own_tokens}
        self.special_tokens = {name: token for name, token in named.items() if token is not None}
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # Special tokens that swallow adjacent white space cannot anchor an encoding.
        self._anchor_ids = frozenset(i for i in self.special_ids if not (added[i].rstrip or added[i].lstrip))
        self._default_anchor_id = min(self._anchor_ids, default=-1)
        if wants_bos is None:
            self.first_id = _first_id(backend, self.bos_id)
        else:
            self.first_id = self.bos_id if wants_bos else None
        self.wants_bos = self.first_id is not None

    def as_json(self) -> str:
        """Return the tokenizer as the text of a tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    def id_of(self, token: str) -> int | None:
        """Return the id that the vocabulary spells so, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def mark_id(self, mark: str) -> int | None:
        """Return the id of a mark that is one token and no text, or None.

        It is a control token, or an added token in angle brackets, such as <tool_call> in the tokenizers of
        the Qwen families. This is the grammar library's rule, so text that a grammar allows has no marks.
        """
        token_id = self.id_of(mark)
        return token_id if token_id in self.mark_ids else None

    @cached_property
    def mark_ids(self) -> frozenset[int]:
        """The ids of all marks; see `mark_id`."""
        added = self._backend.get_added_tokens_decoder().items()
        in_brackets = (
            token_id for token_id, token in added if token.content[:1] == "<" and token.content[-1:] == ">"
        )
        return self.special_ids.union(in_brackets)

    @cached_property
    def vocab_size(self) -> int:
        """The highest id plus one. A model may have more rows than that, or lack those of added tokens."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def base_vocab_size(self) -> int:
        """The highest id of a token that was not added to the vocabulary, plus one."""
        added = self._backend.get_added_tokens_decoder().keys()
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        return max((token_id for token_id in ids if token_id not in added), default=-1) + 1

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change when an id changes its meaning; templates do not count."""
        # Not of the serialized tokenizer, whose form changes with the library's version at equal meaning.
        vocabulary = sorted(self._backend.get_vocab(with_added_tokens=True).items())
        described = json.dumps([vocabulary, self.bos_id, self.eos_id, self.wants_bos])
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def encode(self, text: str, *, add_bos: bool, token_limit: int | None = None) -> list[int]:
        """Return the ids of `text`; special tokens written out in it become their ids.

        Args:
          text: any text; "" has no ids but the one below.
          add_bos: only True at a conversation's start: put `first_id` first, if there is one and the text
            does not begin with it already.
          token_limit: maximum number of useful tokens; a text far longer than that is not read to its end.

        Raises InvalidRequestError for a value that is not text, and ContextLengthError for far more than
        `token_limit` tokens.
        """
        token_ids = self._encode(text, token_limit)
        if add_bos and self.first_id is not None and token_ids[:1] != [self.first_id]:
            token_ids.insert(0, self.first_id)
        return token_ids

    def offsets(self, text: str) -> list[int]:
        """Return where the tokens of `encode(text, add_bos=False)` begin in the text, in characters."""
        if self.long_texts is not None and len(text) >= self.long_texts.min_characters:
            return self.long_texts.offsets(text)
        # As a batch, which releases the interpreter's lock; see `_LONG`.
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
        return [start for start, _ in encoding.offsets]

    def encode_after(
        self, previous_id: int | None, text: str, *, token_limit: int | None = None
    ) -> list[int]:
        """Return the ids of `text` after other text, without the space that some tokenizers prepend.

        Args:
          previous_id: the id before the text; text after a special token may be encoded differently.
          text: the text.
          token_limit: as in `encode`.
        """
        if self._anchor_ids and text:
            anchor_id = previous_id if previous_id in self._anchor_ids else self._default_anchor_id
            token_ids = self._encode(f"{self.token_text(anchor_id)}{text}", token_limit)
            if token_ids[:1] == [anchor_id]:
                return token_ids[1:]
        return self._encode(text, token_limit)

    def end_of_last_anchor(self, token_ids: Sequence[int], end: int) -> int:
        """Return the number of ids up to the last control token before `end`; 0 without one.

        A text behind it is encoded alone as it is behind all of them.
        """
        while end and token_ids[end - 1] not in self._anchor_ids:
            end -= 1
        return end

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`; special ids and ids outside the vocabulary have none."""
        visible = [token_id for token_id in token_ids if token_id not in self.special_ids]
        return self.decode_window(visible)

    def decode_raw(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, with special ones written out."""
        return self.decode_window(list(token_ids))

    def ends_with(self, token_ids: Sequence[int], mark: str) -> bool:
        """Return whether the text of `token_ids` ends with `mark`, or with white space behind it."""
        return self.decode_raw(token_ids[-_MAX_IDS_OF_MARK:]).rstrip().endswith(mark)

    def decode_window(self, token_ids: list[int]) -> str:
        """Return the text of ids that are not special (not checked). Streaming calls this for every token."""
        text: str
        if len(token_ids) > _LONG:
            (text,) = self._backend.decode_batch([token_ids], skip_special_tokens=False)
        else:
            text = self._backend.decode(token_ids, skip_special_tokens=False)
        return text

    def text_alone(self, token_id: int) -> str:
        """Return `decode_window([token_id])` for an id of the vocabulary."""
        text = self._texts_alone.get(token_id)
        if text is None:
            text = self._texts_alone[token_id] = self.decode_window([token_id])
        return text

    def text_after(self, token_id: int) -> str:
        """Return the text of one id after other text; a special one is written out.

        Decoded alone, an id may lack its leading space: some decoders drop that of a text's first token.
        """
        alone = self.decode_window([token_id])
        anchor_letter_id = self._anchor_letter_id
        if anchor_letter_id is None or token_id in self.special_ids:
            return alone
        ground = self.decode_window([anchor_letter_id])
        both = self.decode_window([anchor_letter_id, token_id])
        return both[len(ground) :] if both.startswith(ground) else alone

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes that one id adds to a text; None if those of part of a character are unknown.

        Special ids and ids outside the vocabulary add none.
        """
        if token_id in self.special_ids:
            return b""
        byte = self.byte_of(token_id)
        if byte is not None:
            return bytes([byte])
        text = self.text_after(token_id)
        if "\ufffd" not in text:
            return text.encode()
        spelling = self.token_text(token_id) or ""
        if self._spells_bytes:
            # The library's own rule: a spelling with any other character stands for itself.
            found = [_BYTES_BY_CHARACTER.get(character) for character in spelling]
            return spelling.encode() if None in found else bytes(one for one in found if one is not None)
        return text.encode() if "\ufffd" in spelling else None

    def byte_of(self, token_id: int) -> int | None:
        """Return the byte of a `<0x..>` token; None for any other token."""
        token = self.token_text(token_id) if self.joins_byte_runs else None
        return None if token is None or BYTE_TOKEN.fullmatch(token) is None else int(token[3:5], 16)

    @cached_property
    def _anchor_letter_id(self) -> int | None:
        """An id of plain letters, used as the text before another id; None if the vocabulary has none.

        Byte tokens do not qualify, since a run of them is decoded as a whole.
        """
        for token_id in range(self.vocab_size):
            if token_id not in self.special_ids and self.byte_of(token_id) is None:
                text = self.decode_window([token_id])
                if text.isascii() and text.isalpha():
                    return token_id
        return None

    def has_control_token(self, text: str) -> bool:
        """Return whether a text has the spelling of a special token in it."""
        return any(spelling in text for spelling in self._control_spellings)

    def control_ids(self, spellings: Iterable[str]) -> frozenset[int]:
        """Return the ids of those spellings that are special tokens."""
        found = (self._backend.token_to_id(spelling) for spelling in spellings)
        return self.special_ids.intersection(token_id for token_id in found if token_id is not None)

    @cached_property
    def _control_spellings(self) -> tuple[str, ...]:
        return tuple(filter(None, map(self.token_text, self.special_ids)))

    def token_text(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of an id, or None outside it."""
        token = self._spellings.get(token_id)
        if token is None:
            token = self._backend.id_to_token(token_id)
            if token is not None:
                self._spellings[token_id] = token
        return token

    @cached_property
    def joins_byte_runs(self) -> bool:
        """Whether a run of `<0x..>` tokens is decoded as a whole, so that its next byte can change it all."""
        return "ByteFallback" in self._decoder_types

    @cached_property
    def _spells_bytes(self) -> bool:
        """Whether each character of a token's spelling stands for a byte, as in byte-level vocabularies."""
        return "ByteLevel" in self._decoder_types

    @cached_property
    def _decoder_types(self) -> frozenset[str]:
        """Types of the decoder's parts, as tokenizer.json names them."""
        if self._backend.decoder is None:
            return frozenset()
        decoder: dict[str, Any] = json.loads(self._backend.decoder.__getstate__())
        return frozenset(part.get("type", "") for part in decoder.get("decoders", [decoder]))

    def _check_length(self, text: str, token_limit: int) -> None:
        """Raise ContextLengthError if the beginning of a long text alone has far too many tokens.

        The threshold is over twice the maximum: the text after the beginning changes the ids at its end, but
        not all of them.
        """
        far = 2 * token_limit + _FEW_TOKENS
        num_characters = _CHARACTERS * far
        while num_characters < len(text):
            if len(self._encode(text[:num_characters])) > far:
                raise ContextLengthError(
                    "prompt",
                    f"{len(text)} characters",
                    f"at most {token_limit} tokens",
                    token_limit=token_limit,
                )
            num_characters *= 2

    def _encode(self, text: str, token_limit: int | None = None) -> list[int]:
        if not isinstance(text, str):
            raise InvalidRequestError("prompt", text, "a string")
        if token_limit is not None:
            self._check_length(text, token_limit)
        try:
            if self.long_texts is not None and len(text) >= self.long_texts.min_characters:
                return self.long_texts.encode(text)
            # A batch releases the lock (see `_LONG`). The fast variant omits the position of each token.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
            token_ids: list[int] = encoding.ids
        except (UnicodeEncodeError, TypeError) as error:  # which one depends on the library's version
            raise InvalidRequestError(
                "prompt", text, "text that UTF-8 can hold, without lone surrogates"
            ) from error
        return token_ids


def _first_id(backend: tokenizers.Tokenizer, bos_id: int | None) -> int | None:
    """Return the id that the post-processor puts before every text, or None."""
    first, letter = backend.encode("").ids[:1], backend.encode("a").ids
    # A vocabulary without the letter does not show whether the id comes first or last.
    is_first = letter[:1] == first and (len(letter) > 1 or first == [bos_id])
    return first[0] if first and is_first else None
