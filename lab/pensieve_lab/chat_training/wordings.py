"""Which wordings training never sees, and how a sentence is changed without another meaning.

Owns: the three parts that wordings fall into, the rule by which a list falls into the first two, and case.
Does not know: any wording.
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
    """Whose sentences and values are drawn; values are held out with both test parts."""

    TRAINING = auto()
    NEW_SENTENCES = auto()  # the last of every list: other words, but constructions like those of training
    NEW_CONSTRUCTIONS = auto()  # sentences that are built as none of training is
    TEST_CONSTRUCTIONS = auto()  # other ones of that sort (`held_out`), which nothing was chosen by


def training_wordings(every: Sequence[str]) -> Sequence[str]:
    """Those that training uses."""
    return every[:-_NUM_HELD_OUT]


def held_out_wordings(every: Sequence[str]) -> Sequence[str]:
    """Those that it never sees."""
    return every[-_NUM_HELD_OUT:]


def expanded(rng: random.Random, pattern: str) -> str:
    """One of the sentences that a pattern like "(Could|Would) you (please |)help me?" stands for.

    Groups do not nest.
    """
    return _GROUP.sub(lambda match: rng.choice(match[1].split("|")), pattern)


def within_sentence(text: str) -> str:
    """A sentence as it goes on behind other words: in lower case, unless it begins with "I" or a value."""
    return text if text.startswith(("I ", "I'", "{")) else text[0].lower() + text[1:]


def capitalised(text: str) -> str:
    """The text as a sentence begins."""
    return text[0].upper() + text[1:]


def perhaps_casual(rng: random.Random, text: str, share: float) -> str:
    """That share of texts as people type in a hurry: in lower case, and half of it without the last mark."""
    if rng.random() >= share:
        return text
    return text.lower().rstrip(".?!") if rng.random() < _NO_MARK_SHARE else text.lower()
