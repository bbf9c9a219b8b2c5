"""Text of one turn as its tokens arrive, never half a character, ended by stop strings.

Owns: which text is final already, which is held back, and where a stop string completed.
Does not know: sampling, requests, or stop token ids.

The deltas of a turn joined are `tokenizer.decode(ids)`, cut before the stop string. A window of the last few
ids is decoded with and without the newest: what decoders do to the start of a text (dropping one space) then
happens to both and cancels out. Two things make the newest text revocable. A character may lack bytes, which
decodes to U+FFFD at the end; and tokenizers with byte fallback decode a run of byte tokens as a whole, where
one bad byte turns every character of the run into U+FFFD. So the former waits for the character's end and the
latter for the run's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.text.tokenizer import Tokenizer

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


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
        self._stop = tuple(_StopString(string) for string in stop)
        self._last_bytes = frozenset(string.encode(errors="replace")[-1] for string in stop)
        # `_window` is `_num_prefix` ids whose text `_prefix_text` is out already, then ids whose text is not.
        self._window: list[int] = []
        self._num_prefix = 0
        self._prefix_text = ""
        self._held = ""  # final text that may turn out to begin a stop string
        self._num_unending = 0  # characters of the text that is not out which no stop string may end with
        self._deltas: list[str] = []

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._deltas)

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Text that the newest token makes final, often "". After a stop string nothing comes any more.

        With `may_stop` False (a turn below its least length) a stop string that this token completes is text
        like any other, now and when that text is final; one that it only begins can still complete later.
        """
        if self.stop_string is not None or token_id in self._special_ids:
            return ""
        if self._tokenizer.token_text(token_id) is None:
            return ""  # beyond the vocabulary; in a window it would stand for text that is not there
        window = self._window
        window.append(token_id)
        byte = self._tokenizer.byte_of(token_id)
        if byte is not None and byte not in self._last_bytes and (may_stop or not self._stop):
            return ""  # a run may be as long as the reply: it is decoded when it ends, or a stop string may
        decoded = self._tokenizer.decode_window(window)
        fresh = decoded[len(self._prefix_text) :]
        # Not final yet, but final if the turn ended here, which is what a stop string completed in it does.
        if byte is not None or decoded.endswith(_REPLACEMENT):
            if self._stop:
                said = fresh.rstrip(_REPLACEMENT)
                if may_stop:
                    return self._end_at_stop(self._held + fresh, self._matches(said))
                self._num_unending = max(self._num_unending, len(said))
            return ""
        # The ids whose text this is become the next prefix, unless they leave nothing to tell a start from.
        newest = window[self._num_prefix :]
        newest_text = self._tokenizer.decode_window(newest)
        if newest_text:
            self._window, self._num_prefix, self._prefix_text = newest, len(newest), newest_text
        else:
            self._num_prefix, self._prefix_text = len(window), decoded
        return self._release(fresh, may_stop=may_stop)

    def flush(self, *, may_stop: bool = True) -> str:
        """The rest at the turn's end, incomplete characters as U+FFFD included; `may_stop` as last pushed."""
        if self.stop_string is not None:
            return ""
        fresh = self._tokenizer.decode_window(self._window)[len(self._prefix_text) :] if self._window else ""
        delta = self._release(fresh, may_stop=may_stop)
        if self.stop_string is None:
            self._deltas.append(self._held)
            delta += self._held
        self._window, self._prefix_text, self._held = [], "", ""
        return delta

    def _release(self, fresh: str, *, may_stop: bool) -> str:
        """Take in final text and give out what cannot be part of a stop string."""
        if not self._stop:
            if fresh:
                self._deltas.append(fresh)
            return fresh
        text = self._held + fresh
        matches = self._matches(fresh)
        self._num_unending = 0
        if may_stop:
            delta = self._end_at_stop(text, matches)
            if self.stop_string is not None:
                return delta
        for stop, match in zip(self._stop, matches, strict=True):
            stop.num_begun = match.num_begun
        num_held = max(match.num_begun for match in matches)
        delta, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        if delta:
            self._deltas.append(delta)
        return delta

    def _matches(self, fresh: str) -> list[_Match]:
        """Of every stop string, where the text that is not out goes on behind what is."""
        return [stop.after(fresh, self._num_unending) for stop in self._stop]

    def _end_at_stop(self, text: str, matches: Sequence[_Match]) -> str:
        """The part of `text`, which begins with what was held, before the stop string that completes first.

        "" if none does.
        """
        found = [
            (match.completed_at, len(stop.text), stop.text)
            for stop, match in zip(self._stop, matches, strict=True)
            if match.completed_at is not None
        ]
        if not found:
            return ""
        # The first that completed, and of those the longest.
        completed_at, size, self.stop_string = min(found, key=lambda one: (one[0], -one[1]))
        at = len(self._held) + completed_at - size
        self._deltas.append(text[:at])
        return text[:at]


class _Match(NamedTuple):
    """What a text that was gone on with means to a stop string.

    Attributes:
      num_begun: characters of the string, never all of them, that the text ends with.
      completed_at: after how many characters of what is new the string was there, and might end the text;
        None if it was not.
    """

    num_begun: int
    completed_at: int | None


class _StopString:
    """One stop string, and how much of it the text so far ends with.

    By Knuth, Morris and Pratt: each character of the text costs about one comparison, however long the string
    is, and the table grows only as far as the text has followed the string. Whatever a client sends is looked
    for between two steps of everybody's engine.
    """

    def __init__(self, text: str) -> None:
        """Of a string that is not empty."""
        self.text = text
        self.num_begun = 0
        self._shorter = [0, 0]  # for each number of characters: of how many the next shorter beginning is

    def after(self, new: str, num_unending: int) -> _Match:
        """The match where `new` stands behind the text so far; it is not taken for said yet.

        The string does not count where it was there after `num_unending` characters of `new` or fewer.
        """
        text, shorter = self.text, self._shorter
        num, completed_at = self.num_begun, None
        for at, character in enumerate(new, 1):
            while num and text[num] != character:
                num = shorter[num]
            if text[num] == character:
                num += 1
                if num == len(shorter):
                    self._extend()
            if num == len(text):
                if completed_at is None and at > num_unending:
                    completed_at = at
                num = shorter[num]  # below the least length of a reply the text may go on
        return _Match(num, completed_at)

    def _extend(self) -> None:
        text, shorter = self.text, self._shorter
        last, num = text[len(shorter) - 1], shorter[-1]
        while num and text[num] != last:
            num = shorter[num]
        shorter.append(num + 1 if text[num] == last else 0)
