"""The next token of a scripted reply, given the context so far and the ids that may follow.

Owns: the encoding of a script's text, and what is chosen where a mask forbids the text's own tokens.
Does not know: plans, pages or engines.

The choice depends on the context alone, as a model's does. So a reply is the same whatever was evicted, and
the same when it is suspended and resumed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from pensieve_jax.text import Tokenizer
from pensieve_lab.scripted.script import REASONING, Script, divide

_log = logging.getLogger(__name__)
_SPACE: Final = b" \n\t\r"
_ENDS: Final = (b'"', b"}", b"]", b"0", b"e", b"</", b">", b"{", b":", b",")
"""What a reply continues with where its script is not allowed; the first ones end a JSON value."""
_CONTINUATION: Final = " and one more word"
"""The text that continues a prompt without messages, again and again."""

type Allows = Callable[[int], bool]


class Writer:
    """Chooses tokens by a script; it stores nothing of a turn."""

    def __init__(self, script: Script, tokenizer: Tokenizer) -> None:
        """Prepare the spellings of all ids."""
        assert tokenizer.eos_id is not None
        self._script = script
        self._tokenizer = tokenizer
        self._end_id = tokenizer.eos_id
        self._spelling = {
            token_id: spelled
            for token_id in range(tokenizer.vocab_size)
            if (spelled := tokenizer.bytes_of(token_id))
        }
        self._id_of = {spelled: token_id for token_id, spelled in reversed(self._spelling.items())}
        self._longest = max(map(len, self._id_of))

    def next_id(self, context_ids: Sequence[int], allows: Allows) -> int:
        """Return the id that follows `context_ids`.

        Args:
          context_ids: all tokens of the conversation.
          allows: whether an id may be chosen.
        """
        text = self._tokenizer.decode_raw(context_ids)
        context, reply = divide(text)
        if context.role == "":
            cycle = self._tokenizer.encode(_CONTINUATION, add_bos=False)
            wanted = cycle[len(context_ids) % len(cycle)]
            return wanted if allows(wanted) else self._other("", allows, context.last)
        rests = [remaining(text, reply) for text in self._script.replies(context)]
        known = [rest for rest in rests if rest is not None]
        for rest in known:
            own = self._own_id(rest, allows)
            if own is not None:
                return own
        return self._other(known[-1] if known else "", allows, context.last)

    def _own_id(self, rest: str, allows: Allows) -> int | None:
        """Return an allowed id that the text begins with, the tokenizer's own choice first."""
        if not rest:
            return self._end_id if allows(self._end_id) else None
        first = self._tokenizer.encode(rest, add_bos=False)[0]
        if allows(first):
            return first
        if rest.startswith(REASONING):  # where its mark may not stand, no letters spell it
            return None
        spelled = rest.encode()
        for length in range(min(self._longest, len(spelled)), 0, -1):
            found = self._id_of.get(spelled[:length])
            if found is not None and allows(found):
                return found
        return None

    def _other(self, rest: str, allows: Allows, asked: str) -> int:
        """Return an allowed id where the script's text is not: white space, the end, or an end of JSON."""
        if allows(self._end_id):
            if rest:
                _log.warning("the script's text is not allowed; the reply ends before %.80r", rest)
            return self._end_id
        for spelled in (*(bytes([byte]) for byte in _SPACE if rest), *_ENDS):
            found = self._id_of.get(spelled)
            if found is not None and allows(found):
                _log.warning("the answer to %.80r goes on with %r, not with %.80r", asked, spelled, rest)
                return found
        return next(token_id for token_id in self._spelling if allows(token_id))


def remaining(text: str, reply: str) -> str | None:
    """Return what of `text` follows `reply`, which may differ in white space; None if it is another text.

    A grammar may demand white space that the script lacks, or forbid some that it has.
    """
    if text.startswith(reply):
        return text[len(reply) :]
    place = 0
    for character in reply:
        if character.isspace():
            continue
        while place < len(text) and text[place].isspace():
            place += 1
        if place == len(text) or text[place] != character:
            return None
        place += 1
    rest = text[place:]
    return rest.lstrip() if reply[-1:].isspace() else rest
