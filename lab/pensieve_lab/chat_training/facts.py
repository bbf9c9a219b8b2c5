"""Kinds of facts that a user can tell, and the sentences that tell them or ask for them.

Owns: what a kind of fact is, and how its own wordings and the common frames are drawn and combined.
Does not know: the wordings (`kinds`), conversations, tokens or models.
Called by `kinds`, `questions` and `recall`.

`~` in a wording marks where an aside may stand.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from pensieve_lab.chat_training import held_out
from pensieve_lab.chat_training.frames import (
    ASIDE_MARK,
    ASIDES,
    CLAUSE_FRAMES,
    CLAUSE_STARTS,
    HELD_OUT_QUESTION_ASK,
    HELD_OUT_TOPIC_ASK,
    LEADS,
    QUESTION_ASKS,
    TAILS,
    TOPIC_ASKS,
    TOPIC_TELLS,
)
from pensieve_lab.chat_training.grammar import CLAUSE_PATTERNS, QUESTION_PATTERNS, TOPIC_PATTERNS, Scraps
from pensieve_lab.chat_training.values import is_closed, is_held_out
from pensieve_lab.chat_training.wordings import (
    Wordings,
    capitalised,
    expanded,
    held_out_wordings,
    perhaps_casual,
    training_wordings,
    within_sentence,
)

_ASIDE_SHARE: Final = 0.3  # share of sentences with a mark
_LEAD_SHARE: Final = 0.25
_TAIL_SHARE: Final = 0.15
_TOPIC_TELL_SHARE: Final = 0.15  # share of sentences that tell
_CLAUSE_SHARE: Final = 0.3  # share of the other ones that are statements
_PATTERN_SHARE: Final = 0.5  # share of sentences in frames
_SCRAPS_TELL_SHARE: Final = 0.12  # share of sentences that tell and follow no construction at all
_SCRAPS_ASK_SHARE: Final = 0.2  # share of framed sentences that ask
_SCRAPS_AROUND_SHARE: Final = 0.06  # share of the other sentences that ask
_FRAMED_ASK_SHARE: Final = 0.65
_TOPIC_ASK_SHARE: Final = 0.5  # share of framed sentences that ask
CASUAL_SHARE: Final = 0.12  # share of training sentences of either sort


class FactKind(NamedTuple):
    """One kind of fact. `{}` stands for the value.

    `draw(rng, text)` returns a value, which may use words of `text`. The last two of `tells` and of `asks`
    are the tests' new sentences; `new_tells` are their new constructions.
    """

    name: str
    family: str  # label in figures: "a day"
    draw: Callable[[random.Random, str], str]
    short: tuple[str, ...]  # a value alone, as a correction may give it: "at {}"
    cores: tuple[str, ...]  # words that every sentence about it contains: "my dog"
    subject: str  # completes "You have not told me"
    topics: tuple[str, ...]  # noun phrases for it: "my dog's name"
    questions: tuple[str, ...]  # indirect questions for it: "what my dog is called"
    tells: tuple[str, ...]
    new_tells: tuple[str, ...]
    asks: tuple[str, ...]
    answers: tuple[str, ...]

    def value(self, rng: random.Random, text: str, wordings: Wordings) -> str:
        """Return a training value or a held-out one; closed lists such as weekdays belong to both."""
        is_test = wordings is not Wordings.TRAINING
        while is_held_out(value := self.draw(rng, text)) != is_test and not is_closed(value):
            pass
        return value

    def telling(self, rng: random.Random, value: str, wordings: Wordings, scraps: Scraps) -> str:
        """Return a sentence that tells the value, in the given part's wordings."""
        return self.telling_template(rng, wordings, scraps).format(value)

    def telling_template(self, rng: random.Random, wordings: Wordings, scraps: Scraps) -> str:
        """Return such a sentence with {} for the value."""
        if wordings is Wordings.NEW_SENTENCES:
            return rng.choice(held_out_wordings(self.tells)).replace(ASIDE_MARK, "")
        if wordings is Wordings.NEW_CONSTRUCTIONS:
            return rng.choice(self.new_tells)
        if wordings is Wordings.TEST_CONSTRUCTIONS:
            statement = rng.choice(held_out_wordings(self.tells)).replace(ASIDE_MARK, "")
            clause = within_sentence(statement).rstrip(".")
            return capitalised(rng.choice(held_out.TELLS).format(clause=clause))
        if rng.random() < _SCRAPS_TELL_SHARE:
            return scraps.telling(rng, self.cores, rng.choice(self.short))
        if rng.random() < _TOPIC_TELL_SHARE:
            text = capitalised(rng.choice(TOPIC_TELLS).format(topic=rng.choice(self.topics)))
        else:
            text = _perhaps_framed(rng, rng.choice(training_wordings(self.tells)))
        if rng.random() < _LEAD_SHARE:
            text = rng.choice(LEADS) + within_sentence(text)
        if text.endswith(".") and rng.random() < _TAIL_SHARE:
            text = text.removesuffix(".") + rng.choice(TAILS)
        return perhaps_casual(rng, text, CASUAL_SHARE)

    def asking(self, rng: random.Random, wordings: Wordings, scraps: Scraps) -> str:
        """Return a sentence of the same part that asks for the value."""
        if wordings is Wordings.NEW_SENTENCES:
            return rng.choice(held_out_wordings(self.asks))
        if wordings is Wordings.NEW_CONSTRUCTIONS:
            return rng.choice(self.new_asks)
        if wordings is Wordings.TEST_CONSTRUCTIONS:
            return rng.choice(self.test_asks)
        if rng.random() >= _FRAMED_ASK_SHARE:
            text = rng.choice(training_wordings(self.asks))
            return scraps.around(rng, text) if rng.random() < _SCRAPS_AROUND_SHARE else text
        is_topic = rng.random() < _TOPIC_ASK_SHARE
        core = rng.choice(self.topics if is_topic else self.questions)
        if rng.random() < _SCRAPS_ASK_SHARE:
            return scraps.asking(rng, core)
        if rng.random() < _PATTERN_SHARE:
            pattern = expanded(rng, rng.choice(TOPIC_PATTERNS if is_topic else QUESTION_PATTERNS))
        else:
            pattern = rng.choice(TOPIC_ASKS if is_topic else QUESTION_ASKS)
        return capitalised(pattern.format(topic=core, question=core))

    @property
    def new_asks(self) -> tuple[str, ...]:
        """Questions of the new constructions."""
        topic = HELD_OUT_TOPIC_ASK.format(topic=self.topics[0])
        return HELD_OUT_QUESTION_ASK.format(question=self.questions[0]), capitalised(topic)

    @property
    def test_asks(self) -> tuple[str, ...]:
        """Questions of the test's own constructions."""
        questions = (text.format(question=self.questions[0]) for text in held_out.QUESTION_ASKS)
        topics = (text.format(topic=self.topics[0]) for text in held_out.TOPIC_ASKS)
        return tuple(map(capitalised, (*questions, *topics)))

    def training_texts(self) -> Iterator[str]:
        """Yield every training sentence without its value, and each frame once with one of its words."""
        for text in (*training_wordings(self.tells), *training_wordings(self.asks), *self.answers):
            yield text.replace(ASIDE_MARK, "").replace("{}", "")
        for frames, words in ((TOPIC_TELLS + TOPIC_ASKS, self.topics), (QUESTION_ASKS, self.questions)):
            for index, frame in enumerate(frames):
                word = words[index % len(words)]
                yield capitalised(frame.format(topic=word, question=word)).replace("{}", "")


def _perhaps_framed(rng: random.Random, text: str) -> str:
    """Return a sentence with an aside, inside another sentence, or unchanged."""
    text = text.replace(ASIDE_MARK, rng.choice(ASIDES) if rng.random() < _ASIDE_SHARE else "")
    if text.startswith(CLAUSE_STARTS) and rng.random() < _CLAUSE_SHARE:
        clause = within_sentence(text).removesuffix(".")
        if rng.random() < _PATTERN_SHARE:
            return capitalised(expanded(rng, rng.choice(CLAUSE_PATTERNS)).format(clause=clause))
        return rng.choice(CLAUSE_FRAMES).format(clause=clause)
    return text
