"""A suffix automaton of token ids that grows by one token at a time.

Owns: the longest suffix of the ids that occurs earlier among them, and where it occurs first.
Does not know: conversations, or what its caller does with the ids that followed there.

Appending takes amortized constant time. In CPython an id of text takes 2 to 3 us and about 100 bytes, and a
random id up to 170 bytes. An automaton of n ids has at most 2n states. Most states have one transition, so
these are packed in an array; only states with several have a dictionary.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

SEPARATORS: Final = 1 << 20
"""The first id that no vocabulary has. `separate` appends ids from here on, and none of them occurs twice."""
_NO_TRANSITION: Final = -1
_SEVERAL: Final = -2
_STATE_BITS: Final = 32
_STATE_MASK: Final = (1 << _STATE_BITS) - 1


class SuffixAutomaton:
    """All substrings of the ids so far.

    Attributes:
      token_ids: the ids, separators included.
      match_len: length of the longest suffix that occurs earlier; 0 without one.
    """

    def __init__(self) -> None:
        """Start with the empty string alone."""
        self.token_ids = array("i")
        self.match_len = 0
        # By state; 0 is the initial one. `_ends` has the index of the id at which its strings end first.
        self._links, self._lengths, self._ends = array("i", [-1]), array("i", [0]), array("i", [-1])
        self._sole = array("q", [_NO_TRANSITION])  # id << 32 | state, or one of the two constants
        self._several: dict[int, dict[int, int]] = {}
        self._last = self._state = self._num_separators = 0

    def append(self, token_id: int) -> None:
        """Add an id of at least 0."""
        self._follow(token_id)
        links, lengths, ends, sole = self._links, self._lengths, self._ends, self._sole
        state, new = self._last, len(lengths)
        links.append(0)
        lengths.append(lengths[state] + 1)
        ends.append(len(self.token_ids))
        sole.append(_NO_TRANSITION)
        self.token_ids.append(token_id)
        found = -1
        while state != -1:
            found = self._next(state, token_id)
            if found >= 0:
                break
            self._set(state, token_id, new)
            state = links[state]
        if found >= 0:
            links[new] = self._split(state, token_id, found)
        self._last = new
        # The state of the match may have been split: its strings are longer than those of its link.
        match = self._state
        while match and self.match_len <= lengths[links[match]]:
            match = links[match]
        self._state = match

    def separate(self) -> None:
        """Add an id of its own, so that no match contains ids of both sides."""
        self.append(SEPARATORS + self._num_separators)
        self._num_separators += 1

    def continuation(self, max_num: int) -> Sequence[int]:
        """Return the ids, at most `max_num`, that followed the first occurrence of the longest match.

        They end before a separator. Returns none without a match.
        """
        if not self.match_len:
            return ()
        begin = self._ends[self._state] + 1
        following = self.token_ids[begin : begin + max_num].tolist()
        for number, token_id in enumerate(following):
            if token_id >= SEPARATORS:
                return following[:number]
        return following

    def _follow(self, token_id: int) -> None:
        """Extend the match by an id that is not added yet, so that the match is an earlier occurrence."""
        links, state, length = self._links, self._state, self.match_len
        found = self._next(state, token_id)
        while found < 0 and state:
            state = links[state]
            length = self._lengths[state]
            found = self._next(state, token_id)
        self._state, self.match_len = (found, length + 1) if found >= 0 else (0, 0)

    def _next(self, state: int, token_id: int) -> int:
        """Return the state after `token_id`, or -1."""
        packed = self._sole[state]
        if packed == _SEVERAL:
            return self._several[state].get(token_id, -1)
        return packed & _STATE_MASK if packed >= 0 and packed >> _STATE_BITS == token_id else -1

    def _set(self, state: int, token_id: int, to: int) -> None:
        packed = self._sole[state]
        if packed == _SEVERAL:
            self._several[state][token_id] = to
        elif packed == _NO_TRANSITION or packed >> _STATE_BITS == token_id:
            self._sole[state] = token_id << _STATE_BITS | to
        else:
            self._several[state] = {packed >> _STATE_BITS: packed & _STATE_MASK, token_id: to}
            self._sole[state] = _SEVERAL

    def _split(self, state: int, token_id: int, found: int) -> int:
        """Return the state of the strings that reach `found` from `state`; it may be a new one."""
        links, lengths, sole = self._links, self._lengths, self._sole
        length = lengths[state] + 1
        if length == lengths[found]:
            return found
        clone = len(lengths)
        links.append(links[found])
        lengths.append(length)
        self._ends.append(self._ends[found])
        sole.append(sole[found])
        if sole[found] == _SEVERAL:
            self._several[clone] = dict(self._several[found])
        while state != -1 and self._next(state, token_id) == found:
            self._set(state, token_id, clone)
            state = links[state]
        links[found] = clone
        return clone
