"""How far one list of token ids spells the same text as the beginning of another list.

Owns: the comparison of ids that may be divided differently.
Does not know: templates, conversations, or which ids were sampled.

A model may sample ids that its tokenizer would not choose for the text: "th" and "e" in place of "the". Both
lists are walked together. Where they differ, the walk goes on behind the next place where the texts of both
meet at a boundary of ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from pensieve_jax.core.token_ids import num_equal

_MAX_IDS: Final = 64
"""Number of ids of one list within which both must meet again; real ones meet within a few."""
_INCOMPLETE: Final = "\ufffd"  # what decoders write for a character that lacks bytes


class SharedText(NamedTuple):
    """The numbers of leading ids of both lists that spell the same text."""

    num_known: int
    num_wanted: int


def shared_text(
    known: Sequence[int], wanted: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> SharedText:
    """Return how many leading ids of `known` and of `wanted` spell the same text.

    Args:
      known: any ids.
      wanted: the ids that a tokenizer chooses for a text.
      decode: returns the text of ids, with special ones written out.
    """
    known_ids, wanted_ids = np.asarray(known, np.int64), np.asarray(wanted, np.int64)
    i = k = 0
    while True:
        num_same = num_equal(known_ids[i:], wanted_ids[k:])
        i, k = i + num_same, k + num_same
        if i == len(known) or k == len(wanted):
            return SharedText(i, k)
        # An id before shows how the next one is spelled within a text; some decoders drop a first space.
        before = list(known[i - 1 : i])
        met = _meeting(before, known[i : i + _MAX_IDS], wanted[k : k + _MAX_IDS], decode)
        if met is None:
            return SharedText(i, k)
        i, k = i + met[0], k + met[1]


def _meeting(
    before: list[int], known: Sequence[int], wanted: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> tuple[int, int] | None:
    """Return the smallest numbers of ids after `before` that spell the same text, or None."""
    if before and decode([*before, known[0]]) == decode(before):
        return 1, 0  # an id without text, such as one beyond the tokenizer's vocabulary
    i = k = 1
    while i <= len(known) and k <= len(wanted):
        one, other = decode([*before, *known[:i]]), decode([*before, *wanted[:k]])
        if one == other and not one.endswith(_INCOMPLETE):
            return i, k
        one, other = one.rstrip(_INCOMPLETE), other.rstrip(_INCOMPLETE)
        if not one.startswith(other) and not other.startswith(one):
            return None
        if len(one) <= len(other):
            i += 1
        else:
            k += 1
    return None
