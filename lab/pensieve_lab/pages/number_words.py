"""Numbers that a page writes as words: shares, multiples and large counts.

Owns: which words are such numbers, their values, and the tolerance. Small counts (one to nine, but for `two
and a half`), ordinals, vague plurals (`dozens`, `halves`) and words beside a hyphen (`half-done`) do not
count as numbers here.
Does not know: pages or documents.
Called by `pages.page` and `pages.sources`.
"""

from __future__ import annotations

import re

TOLERANCE = 0.1
"""Relative tolerance around a word's value: 0.63 is about "two thirds", 0.55 is not."""

_ONES = dict(
    zip(["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], range(1, 10), strict=True),
    a=1,
    an=1,
)
_TEENS = dict(
    zip(
        [
            "ten",
            "eleven",
            "twelve",
            "thirteen",
            "fourteen",
            "fifteen",
            "sixteen",
            "seventeen",
            "eighteen",
            "nineteen",
        ],
        range(10, 20),
        strict=True,
    )
)
_TENS = dict(
    zip(
        ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"],
        range(20, 100, 10),
        strict=True,
    )
)
_LARGE = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6}
_PARTS = {
    **{"half": 2, "third": 3, "quarter": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9},
    **{"tenth": 10, "twelfth": 12, "sixteenth": 16, "twentieth": 20, "hundredth": 100, "thousandth": 1000},
}
_MULTIPLES = {
    **{"twice": 2, "thrice": 3, "halve": 0.5, "halved": 0.5, "halving": 0.5},
    **{"double": 2, "doubles": 2, "doubled": 2, "doubling": 2},
    **{"triple": 3, "triples": 3, "tripled": 3, "tripling": 3},
    **{"quadruple": 4, "quadruples": 4, "quadrupled": 4, "quadrupling": 4},
    **{"quintuple": 5, "quintuples": 5, "quintupled": 5, "quintupling": 5},
}


def _any(words: dict[str, float] | dict[str, int]) -> str:
    return "|".join(sorted(words, key=len, reverse=True))


_COUNT = rf"(?:{_any({**_ONES, **_TEENS, **_TENS})}|hundred)"
_MORE = rf"[ -]and[ -]an?[ -](?:half|quarter|(?:{_any(_PARTS)})(?=[ -]times))"  # of "two and a half"
_ALTERNATIVES = (
    rf"{_COUNT}{_MORE}(?:[ -]times|[ -]?fold)?",
    rf"{_COUNT}[ -](?:{_any(_PARTS)})s?",
    "half",
    _any(_MULTIPLES),
    rf"{_COUNT}(?: times|fold|-fold| percent| per cent)",
    rf"(?:{_any(_TENS)})-(?:{_any(_ONES)})",
    rf"(?:{_COUNT}[ -])?(?:{_any(_LARGE)})",
    _any({**_TEENS, **_TENS}),
)
PATTERN = rf"(?<![\w-])(?<!\d )(?i:{'|'.join(_ALTERNATIVES)})(?![\w-])"
"""Regular expression without capturing groups."""
_NUMBER_WORDS = re.compile(PATTERN)


def find(text: str) -> list[tuple[str, int, int]]:
    """Return each number in words as (words joined by hyphens, start, end)."""
    return [(found[0].lower().replace(" ", "-"), *found.span()) for found in _NUMBER_WORDS.finditer(text)]


def worth(shown: str) -> float | None:
    """Return the value of words as `find` gives them, or None if they are digits."""
    if not shown[:1].isalpha():
        return None
    if shown in _MULTIPLES:
        return _MULTIPLES[shown]
    if shown == "half":
        return 0.5
    whole, _, part = shown.partition("-and-")
    if part:
        return (worth(whole) or 0) + (worth(part) or 0)
    count, value = 0.0, 1.0
    for word in re.split(r"-|(?=fold$)", shown):
        singular = word if word in _LARGE or word in _PARTS else word.removesuffix("s")
        if singular in _PARTS:
            value /= _PARTS[singular]
        elif singular in _LARGE:
            value *= _LARGE[singular]
        else:
            count += {**_ONES, **_TEENS, **_TENS}.get(word, 0)
    return (count or 1) * value


def is_about(value: float, shown: str) -> bool:
    """Return whether a value may be called by these words."""
    named = worth(shown)
    return named is not None and abs(value - named) <= TOLERANCE * named
