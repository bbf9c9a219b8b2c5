"""Something that can be told about oneself, and how a sentence that tells it is varied.

Owns: what a kind of fact is, which of its wordings training never sees (the last two of every list), and
what may stand around and within a wording.
Does not know: the wordings (`kinds`), conversations, tokens or models.
Called by: `kinds`, `recall` and `corpus`.

A model that has seen a few wordings takes any other for small talk, and says that it was told nothing. So
`~` marks where an aside may stand, and what goes before and behind a sentence is drawn, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from common.chat_training.values import is_held_out

_NUM_HELD_OUT: Final = 2
_ASIDE_MARK: Final = "~"
_ASIDES: Final = (
    ", as it happens,",
    ", you see,",
    ", of course,",
    ", in fact,",
    ", if you care to know,",
    ", so to speak,",
    ", as you may know,",
    ", I should add,",
    ", I think,",
    ", by the way,",
    ", for your information,",
    " actually",
    " now",
)
_LEADS: Final = (
    "By the way, ",
    "Just so you know, ",
    "Oh, and ",
    "Also, ",
    "Actually, ",
    "Before I forget, ",
    "And ",
    "Well, ",
    "Please remember: ",
    "You should know that ",
    "Let me tell you that ",
    "I should mention that ",
    "As you may know, ",
    "For your information, ",
    "For your notes, ",
    "Today I can tell you that ",
    "There is something to note: ",
    "Let me add that ",
    "To begin with, ",
    "Another thing: ",
    "It may help that ",
    "You see, ",
)
_TAILS: Final = (
    ", by the way.",
    ", just so you know.",
    ", if you need it.",
    ", in case I ask.",
    ". Please remember that.",
    ", you know.",
    "!",
)
_ASIDE_SHARE: Final = 0.3  # of sentences with a mark
_LEAD_SHARE: Final = 0.25
_TAIL_SHARE: Final = 0.15


class FactKind(NamedTuple):
    """One thing that can be told. `{}` stands for the value; `subject` completes "You have not told me".

    `draw(rng, text)` is a value, perhaps one made of `text`.
    """

    name: str
    draw: Callable[[random.Random, str], str]
    subject: str
    tells: tuple[str, ...]
    asks: tuple[str, ...]
    answers: tuple[str, ...]

    def value(self, rng: random.Random, text: str, *, held_out: bool) -> str:
        """A value of the training part, or of the held-out one."""
        while is_held_out(value := self.draw(rng, text)) != held_out:
            pass
        return value

    def telling(self, rng: random.Random, value: str, *, held_out: bool) -> str:
        """A sentence that tells the value, as training varies it or in the words that training never sees."""
        if held_out:
            return rng.choice(held_out_wordings(self.tells)).format(value)
        text = rng.choice(training_wordings(self.tells))
        text = text.replace(_ASIDE_MARK, rng.choice(_ASIDES) if rng.random() < _ASIDE_SHARE else "")
        if rng.random() < _LEAD_SHARE:
            text = rng.choice(_LEADS) + within_sentence(text)
        if rng.random() < _TAIL_SHARE:
            text = text.removesuffix(".") + rng.choice(_TAILS)
        return text.format(value)

    def training_texts(self) -> Iterator[str]:
        """Every sentence of the training part without its value."""
        for text in (*training_wordings(self.tells), *training_wordings(self.asks), *self.answers):
            yield text.replace(_ASIDE_MARK, "").replace("{}", "")


def training_wordings(every: Sequence[str]) -> Sequence[str]:
    """Those that training uses."""
    return every[:-_NUM_HELD_OUT]


def held_out_wordings(every: Sequence[str]) -> Sequence[str]:
    """Those that it never sees."""
    return every[-_NUM_HELD_OUT:]


def within_sentence(text: str) -> str:
    """A sentence as it goes on behind other words: in lower case, unless it begins with "I" or a value."""
    return text if text.startswith(("I ", "I'", "{")) else text[0].lower() + text[1:]
