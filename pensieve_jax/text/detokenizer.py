"""Text of one turn as its tokens arrive: whole characters only, ended by stop strings.

Owns: which text is final, which is held back, and where a stop string was completed.
Does not know: sampling, requests, or stop token ids.

The joined deltas of a turn are `tokenizer.decode(ids)`, cut before the stop string. A window of the last few
ids is decoded with and without the newest ids. Changes that decoders make at the start of a text (dropping
one space) then affect both and cancel out. The newest text may still change for two reasons. A character may
lack bytes; then the text ends with U+FFFD, and it waits for the character's end. And tokenizers with byte
fallback decode a run of byte tokens as a whole, where one bad byte turns every character of the run into
U+FFFD; then the text waits for the run's end.

Control tokens are not text, except those that the caller wants shown, such as the marks of tool calls. A stop
string may contain the spelling of any. Such a string is also searched in the text with control tokens written
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.text.tokenizer import Tokenizer

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """The ids of one reply converted to text deltas. One object per turn; not thread-safe.

    Attributes:
      stop_string: the stop string that was completed, else None. If a text completes several, it is the one
        completed first, and the longest of those. This does not depend on how the text is split into tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        shown: Sequence[str] = (),
        *,
        includes_stop: bool = False,
    ) -> None:
        """Start without text; the control tokens in `shown` are written out.

        With `includes_stop`, the text ends behind the stop string instead of before it.

        Raises InvalidRequestError unless `stop` is a list of non-empty strings.
        """
        if isinstance(stop, str):
            raise InvalidRequestError("stop", stop, "a list of strings", "put the string into a list")
        for index, string in enumerate(stop):
            if not isinstance(string, str) or not string:
                raise InvalidRequestError(f"stop[{index}]", string, "a non-empty string")
        self.stop_string: str | None = None
        self._includes_stop = includes_stop
        self._tokenizer = tokenizer
        self._joins_byte_runs = tokenizer.joins_byte_runs
        self._hidden_ids = tokenizer.special_ids
        if shown:
            self._hidden_ids -= tokenizer.control_ids(shown)
        self._stop = tuple(_StopString(string) for string in stop)
        self._written_stop = tuple(
            _WrittenStop(string) for string in stop if tokenizer.has_control_token(string)
        )
        self._last_bytes = frozenset(string.encode(errors="replace")[-1] for string in stop)
        # `_window`: `_num_prefix` ids whose text `_prefix_text` was returned, then ids whose text was not.
        self._window: list[int] = []
        self._num_prefix = 0
        self._prefix_text = ""
        self._held = ""  # final text that may be the beginning of a stop string
        self._num_no_stop_chars = 0  # a stop string that ends within this many new characters does not count
        self._num_written = 0  # new characters that stand before a control token that was seen already

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Return the text that the newest token makes final, often "". After a stop string it is always "".

        If `may_stop` is False (the turn is below its minimum length), a stop string that this token completes
        is ordinary text, now and when that text becomes final. One that it only begins can still complete
        later.
        """
        if self.stop_string is not None:
            return ""
        if token_id in self._hidden_ids:
            return self._push_control(token_id, may_stop=may_stop) if self._written_stop else ""
        tokenizer, window = self._tokenizer, self._window
        if tokenizer.token_text(token_id) is None:
            return ""  # outside the vocabulary; in a window it would stand for text that does not exist
        window.append(token_id)
        byte = tokenizer.byte_of(token_id) if self._joins_byte_runs else None
        if byte is not None and byte not in self._last_bytes and (may_stop or not self._stop):
            return ""  # a run may be as long as the reply: decode it when it or a stop string may end
        decoded = tokenizer.decode_window(window)
        fresh = decoded[len(self._prefix_text) :]
        # Not final yet, but it becomes final if the turn ends here, as it does if it completes a stop string.
        if byte is not None or decoded.endswith(_REPLACEMENT):
            if self._stop:
                said = fresh.rstrip(_REPLACEMENT)
                if may_stop:
                    return self._end_at_stop(self._held + fresh, self._matches(said))
                self._num_no_stop_chars = max(self._num_no_stop_chars, len(said))
            return ""
        # The ids of this text become the next prefix, unless their text is empty and so cannot be a prefix.
        newest = window[self._num_prefix :]
        newest_text = tokenizer.text_alone(token_id) if len(newest) == 1 else tokenizer.decode_window(newest)
        if newest_text:
            self._window, self._num_prefix, self._prefix_text = newest, len(newest), newest_text
        else:
            self._num_prefix, self._prefix_text = len(window), decoded
        return self._release(fresh, may_stop=may_stop) if self._stop else fresh

    def flush(self, *, may_stop: bool = True) -> str:
        """Return the rest at the turn's end, incomplete characters as U+FFFD; `may_stop` as last pushed."""
        if self.stop_string is not None:
            return ""
        fresh = self._tokenizer.decode_window(self._window)[len(self._prefix_text) :] if self._window else ""
        delta = self._release(fresh, may_stop=may_stop)
        if self.stop_string is None:
            delta += self._held
        self._window, self._prefix_text, self._held = [], "", ""
        return delta

    def _push_control(self, token_id: int, *, may_stop: bool) -> str:
        """Return the text that ends at a stop string that a control token completes, else ""."""
        fresh = self._tokenizer.decode_window(self._window)[len(self._prefix_text) :] if self._window else ""
        spelling = self._tokenizer.token_text(token_id) or ""
        found: list[tuple[str, int]] = []
        for stop in self._written_stop:
            stop.advance(fresh[self._num_written :])
            size = stop.advance(spelling, is_shown=False)
            if size is not None:
                found.append((stop.text, size))
        whole = fresh.rstrip(_REPLACEMENT)
        self._num_written = len(whole) + (whole != fresh)  # bytes at the end become one character, or U+FFFD
        if not (found and may_stop):
            return ""
        self.stop_string, size = max(found, key=lambda one: len(one[0]))
        text = self._held + fresh
        return self._ended(text[: len(text) - size])

    def _release(self, fresh: str, *, may_stop: bool) -> str:
        """Add final text and return what cannot be part of a stop string."""
        if not self._stop:
            return fresh
        text = self._held + fresh
        matches = self._matches(fresh)
        if may_stop:
            delta = self._end_at_stop(text, matches)
            if self.stop_string is not None:
                return delta
        for stop, match in zip(self._stop, matches, strict=False):
            stop.num_begun = match.num_begun
        for written in self._written_stop:
            written.advance(fresh[self._num_written :])
        self._num_no_stop_chars = self._num_written = 0
        num_held = max(match.num_begun for match in matches)
        delta, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        return delta

    def _matches(self, fresh: str) -> list[_Match]:
        """Match the stop strings against the unreturned text, which continues the returned text.

        Those with control tokens come last, once more, with control tokens written out.
        """
        limit, start = self._num_no_stop_chars, self._num_written
        matches = [stop.after(fresh, limit) for stop in self._stop]
        for written in self._written_stop:
            match = written.after(fresh[start:], limit - start)
            at = match.completed_at
            matches.append(match if at is None else match._replace(completed_at=at + start))
        return matches

    def _end_at_stop(self, text: str, matches: Sequence[_Match]) -> str:
        """Return `text` ended at the stop string that completes first; "" if none does.

        `text` begins with the held text.
        """
        stops: tuple[_StopString | _WrittenStop, ...] = (*self._stop, *self._written_stop)
        found = [
            (match.completed_at, stop.text, match.num_completed)
            for stop, match in zip(stops, matches, strict=True)
            if match.completed_at is not None
        ]
        if not found:
            return ""
        # Take the first that completed, and the longest of those.
        completed_at, self.stop_string, size = min(found, key=lambda one: (one[0], -len(one[1])))
        at = len(self._held) + completed_at - size
        return self._ended(text[:at])

    def _ended(self, before: str) -> str:
        """Return the end of the text, where `before` is the text before the stop string."""
        return before + (self.stop_string or "") if self._includes_stop else before


class _Match(NamedTuple):
    """The match of a stop string after new text.

    Attributes:
      num_begun: number of the string's characters, fewer than all, that the text ends with.
      completed_at: number of new characters after which the string was complete and may end the text; None
        if it was not.
      num_completed: number of the completed string's characters in the text.
    """

    num_begun: int
    completed_at: int | None
    num_completed: int


class _StopString:
    """One stop string, and how much of it the text so far ends with.

    Uses the algorithm of Knuth, Morris and Pratt: each character of the text costs about one comparison,
    whatever the string's length, and the table grows only as far as the text has matched. That matters since
    clients choose the strings, and the search between two steps delays all turns of the engine.
    """

    def __init__(self, text: str) -> None:
        """Start at the beginning of `text`, which is not empty."""
        self.text = text
        self.num_begun = 0
        self._shorter = [0, 0]  # for each prefix length: length of the next shorter prefix that is its suffix

    def after(self, new: str, num_no_stop_chars: int) -> _Match:
        """Return the match if `new` follows the text so far, without advancing the state.

        The string does not count if it is complete after `num_no_stop_chars` characters of `new` or fewer.
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
                if completed_at is None and at > num_no_stop_chars:
                    completed_at = at
                num = shorter[num]  # below the minimum length of a reply, the text may continue
        return _Match(num, completed_at, len(text))

    def _extend(self) -> None:
        text, shorter = self.text, self._shorter
        last, num = text[len(shorter) - 1], shorter[-1]
        while num and text[num] != last:
            num = shorter[num]
        shorter.append(num + 1 if text[num] == last else 0)


class _WrittenStop:
    """A stop string with a control token's spelling, searched in the text with control tokens written out."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._stop = _StopString(text)
        self._is_shown: list[bool] = []  # of the characters that match so far: whether they are text

    def after(self, new: str, num_no_stop_chars: int) -> _Match:
        """Return the match as `_StopString.after` does, counting characters of the text only."""
        return self._after(new, num_no_stop_chars)[0]

    def advance(self, new: str, *, is_shown: bool = True) -> int | None:
        """Append characters; return how many characters of the text a string has that they complete."""
        match, self._is_shown = self._after(new, 0, is_shown=is_shown)
        self._stop.num_begun = len(self._is_shown)
        return None if match.completed_at is None else match.num_completed

    def _after(self, new: str, num_no_stop_chars: int, *, is_shown: bool = True) -> tuple[_Match, list[bool]]:
        match = self._stop.after(new, num_no_stop_chars)
        shown = self._is_shown + [is_shown] * len(new)
        begun = shown[len(shown) - match.num_begun :]
        num_completed = 0
        if match.completed_at is not None:
            end = len(self._is_shown) + match.completed_at
            num_completed = sum(shown[end - len(self.text) : end])
        return match._replace(num_begun=sum(begun), num_completed=num_completed), begun
