"""Which wordings training never sees, and how a sentence is varied without changing its meaning.

Owns: the three parts that wordings fall into, the rule that splits a list into the first two, and letter
case.
Does not know: any wording.
Called by the other modules of wordings.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final

_NUM_HELD_OUT: Final = 2
_NO_MARK_SHARE: Final = 0.5
_GROUP: Final = re.compile(r"\(([^()]*)\)")


class Wordings(Enum):
    """Part from which sentences are drawn; all test parts use held-out values."""

    TRAINING = auto()
    NEW_SENTENCES = auto()  # the last of every list: other words, but constructions like those of training
    NEW_CONSTRUCTIONS = auto()  # sentences whose construction does not occur in training
    TEST_CONSTRUCTIONS = auto()  # further ones (`held_out`), used for no choice in development


def training_wordings(every: Sequence[str]) -> Sequence[str]:
    """Return the wordings that training uses."""
    return every[:-_NUM_HELD_OUT]


def held_out_wordings(every: Sequence[str]) -> Sequence[str]:
    """Return the wordings that training never sees."""
    return every[-_NUM_HELD_OUT:]


def expanded(rng: random.Random, pattern: str) -> str:
    """Return one of the sentences of a pattern like "(Could|Would) you (please |)help me?".

    Groups do not nest.
    """
    return _GROUP.sub(lambda match: rng.choice(match[1].split("|")), pattern)


def within_sentence(text: str) -> str:
    """Return a sentence as a continuation, in lower case unless it begins with "I" or a value."""
    return text if text.startswith(("I ", "I'", "{")) else text[0].lower() + text[1:]


def capitalised(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[0].upper() + text[1:]


def perhaps_casual(rng: random.Random, text: str, share: float) -> str:
    """Return that share of texts in casual spelling: in lower case, and half of them without the end mark."""
    if rng.random() >= share:
        return text
    return text.lower().rstrip(".?!") if rng.random() < _NO_MARK_SHARE else text.lower()
