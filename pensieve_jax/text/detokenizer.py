"""Text of one turn as its tokens arrive, never half a character, ended by stop strings.

Owns: which text is final already, which is held back, and where a stop string completed.
Does not know: sampling, requests, or stop token ids.
Called by: the engine loop, once per sampled token.

The deltas of a turn joined are `tokenizer.decode(ids)`, cut before the stop string. A window of the last few
ids is decoded with and without the newest: what decoders do to the start of a text (dropping one space) then
happens to both and cancels out. Two things make the newest text revocable. A character may lack bytes, which
decodes to U+FFFD at the end; and tokenizers with byte fallback decode a run of byte tokens as a whole, where
one bad byte turns every character of the run into U+FFFD. So the former waits for the character's end and the
latter for the run's end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.text.tokenizer import Tokenizer

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class IncrementalDetokenizer:
    """Turns the ids of one reply into text deltas. One object per turn; not for several threads.

    Attributes:
      stop_string: the stop string that completed, else None. If one text completes several, the one that
        completes first, and of those the longest: this does not depend on how the text falls into tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """Raises InvalidRequestError if `stop` is no sequence of non-empty strings."""
        if isinstance(stop, str):
            raise InvalidRequestError("stop", stop, "a list of strings", "put the string into a list")
        for index, string in enumerate(stop):
            if not isinstance(string, str) or not string:
                raise InvalidRequestError(f"stop[{index}]", string, "a non-empty string")
        self.stop_string: str | None = None
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids
        self._joins_byte_runs = tokenizer.joins_byte_runs
        self._stop = tuple(stop)
        # Every proper beginning of a stop string, longest first: text that ends with one is held back.
        self._stop_beginnings = tuple(
            sorted(
                {string[:size] for string in stop for size in range(1, len(string))}, key=len, reverse=True
            )
        )
        # `_window` is `_num_prefix` ids whose text `_prefix_text` is out already, then ids whose text is not.
        self._window: list[int] = []
        self._num_prefix = 0
        self._prefix_text = ""
        self._held = ""  # final text that may turn out to begin a stop string
        self._deltas: list[str] = []

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._deltas)

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Text that the newest token makes final, often "". After a stop string nothing comes any more.

        With `may_stop` False (a turn below its least length) a stop string that this token completes is text
        like any other; one that it only begins can still complete later.
        """
        if self.stop_string is not None or token_id in self._special_ids:
            return ""
        token_text = self._tokenizer.token_text(token_id)
        if token_text is None:
            return ""  # beyond the vocabulary; in a window it would stand for text that is not there
        window = self._window
        window.append(token_id)
        decoded = self._tokenizer.decode_window(window)
        fresh = decoded[len(self._prefix_text) :]
        # Not final yet, but final if the turn ended here, which is what a stop string completed in it does.
        if self._is_revocable(decoded, token_text):
            if self._stop and may_stop:
                return self._end_at_stop(self._held + fresh.rstrip(_REPLACEMENT))
            return ""
        # The ids whose text this is become the next prefix, unless they leave nothing to tell a start from.
        newest = window[self._num_prefix :]
        newest_text = self._tokenizer.decode_window(newest)
        if newest_text:
            self._window, self._num_prefix, self._prefix_text = newest, len(newest), newest_text
        else:
            self._num_prefix, self._prefix_text = len(window), decoded
        return self._release(fresh, may_stop=may_stop)

    def flush(self) -> str:
        """The rest at the turn's end, incomplete characters as U+FFFD included."""
        if self.stop_string is not None:
            return ""
        fresh = self._tokenizer.decode_window(self._window)[len(self._prefix_text) :] if self._window else ""
        delta = self._release(fresh, may_stop=True)
        if self.stop_string is None:
            self._deltas.append(self._held)
            delta += self._held
        self._window, self._prefix_text, self._held = [], "", ""
        return delta

    def _is_revocable(self, decoded: str, token_text: str) -> bool:
        if decoded.endswith(_REPLACEMENT):
            return True
        return self._joins_byte_runs and _BYTE_TOKEN.fullmatch(token_text) is not None

    def _release(self, fresh: str, *, may_stop: bool) -> str:
        """Take in final text and give out what cannot be part of a stop string."""
        if not self._stop:
            if fresh:
                self._deltas.append(fresh)
            return fresh
        text = self._held + fresh
        if may_stop:
            delta = self._end_at_stop(text)
            if self.stop_string is not None:
                return delta
        num_held = 0
        if text.endswith(self._stop_beginnings):
            num_held = next(len(start) for start in self._stop_beginnings if text.endswith(start))
        delta, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        if delta:
            self._deltas.append(delta)
        return delta

    def _end_at_stop(self, text: str) -> str:
        """The part of `text` before the stop string that completes first in it; "" if there is none."""
        found = [(at + len(string), at, string) for string in self._stop if (at := text.find(string)) >= 0]
        if not found:
            return ""
        _, at, self.stop_string = min(found)
        self._deltas.append(text[:at])
        return text[:at]
