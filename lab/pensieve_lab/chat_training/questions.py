"""Questions about one or two told facts, and their answers.

Owns: how questions are joined into one message and answers into one reply, the answer about untold facts, and
when an answer counts as giving a fact.
Does not know: how a single question is worded (`facts`), conversations or models.
Called by `recall`, `recall_cases` and `served_recall`.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from pensieve_lab.chat_training import held_out
from pensieve_lab.chat_training.facts import CASUAL_SHARE, FactKind
from pensieve_lab.chat_training.grammar import Scraps
from pensieve_lab.chat_training.kinds import KINDS
from pensieve_lab.chat_training.wordings import (
    Wordings,
    capitalised,
    expanded,
    held_out_wordings,
    perhaps_casual,
    training_wordings,
    within_sentence,
)

_PREFIXES: Final = (
    *("", "", "", "", "By the way, ", "Quick question: ", "One more thing: ", "Tell me, ", "Sorry, "),
    *("Okay, ", "Thanks! ", "Now something else: ", "Before we go on, "),
)
_NOT_TOLD: Final = ("You have not told me {} yet.", "I do not know {}, you have not told me.")
_YOU_ARE: Final = "You are "
_JOINTS: Final = (
    "{one}(, and|, and also| and|, also| And| Also,) {other}",
    "{One} (And|Also:|Besides,|Then,|Next,|Second,|In addition,|Oh, and|And also) {other}",
    "{One} {Other}",
    "{First} and {second}(?|, please.|.)",
    "{First}(, and| and also| plus|, also| as well as|,) {second}(?|.|, please.|, please?)",
    "(Tell me|Please tell me|Remind me|Say|Please say|Repeat|I forgot|I wonder|I need to know|Let me "
    "know) {first}"
    "(, and| and| and also|, and also) {second}.",
    "(Do you know|Do you recall|Can you tell me|Could you say|Can you repeat|May I hear) {first}(, "
    "and| and| and "
    "also| as well as) {second}?",
    "(I want|I need|I would like) to know two things: {first}(, and| and) {second}.",
    "(Two things|Two questions|I have two questions|Both, please): {first}(, and| and|; and|?) {second}(?|.)",
    "{One} (I also want to know|And tell me|Please also say|I forgot, too,|And I wonder) {second}.",
    "Could you repeat {first} and also {second}, please?",
    "{one} and one more question: {other}",
)
"""{one} and {other} are sentences that ask (within a sentence; {One}, {Other}: whole ones), {first} and
{second} questions within a sentence or names of things."""


class Fact(NamedTuple):
    """A told value of one kind."""

    kind: FactKind
    value: str


def question(rng: random.Random, kinds: Sequence[FactKind], wordings: Wordings, scraps: Scraps) -> str:
    """Return a message that asks for one kind of fact, or for two at once."""
    prefix = rng.choice(_PREFIXES)
    is_joint = len(kinds) > 1
    text = _joint(rng, kinds, wordings, scraps) if is_joint else kinds[0].asking(rng, wordings, scraps)
    text = prefix + within_sentence(text) if prefix.endswith((", ", ": ")) else prefix + text
    return perhaps_casual(rng, text, CASUAL_SHARE) if wordings is Wordings.TRAINING else text


def _joint(rng: random.Random, kinds: Sequence[FactKind], wordings: Wordings, scraps: Scraps) -> str:
    if wordings is Wordings.TRAINING:
        pattern = expanded(rng, rng.choice(training_wordings(_JOINTS)))
        cores = [rng.choice((*kind.topics, *kind.questions)) for kind in kinds]
    else:
        is_known = wordings is Wordings.NEW_SENTENCES
        pattern = rng.choice(held_out_wordings(_JOINTS) if is_known else held_out.JOINT_ASKS)
        cores = [rng.choice((kind.topics[0], kind.questions[0])) for kind in kinds]
    one, other = (kind.asking(rng, wordings, scraps) for kind in kinds)
    text = pattern.format(
        One=_ended(one),
        Other=capitalised(other),
        one=one.rstrip(".?!"),
        other=within_sentence(other),
        First=capitalised(cores[0]),
        first=cores[0],
        second=cores[1],
    )
    return capitalised(text)


def _ended(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}?"


def answer(rng: random.Random, facts: Sequence[Fact | FactKind]) -> str:
    """Return the reply to a question about `facts`, in their order; a kind without a value was not told."""
    sentences = [_sentence(rng, one) for one in facts]
    whole = sentences[0]
    for sentence in sentences[1:]:
        whole = f"{whole.removesuffix('.')}, and {_lowered(sentence)}"
    return whole


def _sentence(rng: random.Random, one: Fact | FactKind) -> str:
    if isinstance(one, Fact):
        return rng.choice(one.kind.answers).format(one.value)
    return rng.choice(_NOT_TOLD).format(one.subject)


def _lowered(sentence: str) -> str:
    """Return an answer as the second part of a sentence; numbers and "I" keep their case."""
    return sentence[0].lower() + sentence[1:] if sentence.startswith(("You", "The ")) else sentence


def gives_a_fact(text: str) -> bool:
    """Return whether an answer states a fact; as a reply to a greeting, that fact is invented."""
    return _answer_pattern().search(text) is not None


@functools.cache
def _answer_pattern() -> re.Pattern[str]:
    """Return a pattern for any answer about any kind, up to the first letter or digit of its value.

    The value may begin in lower case, because a model may take a word of the message for a name ("Your
    neighbour is called loud."), but "You are welcome." must not match.
    """
    beginnings = {template.partition("{}")[0] for kind in KINDS for template in kind.answers}
    endings = {template.partition("{}")[2].removesuffix(".") for kind in KINDS for template in kind.answers}
    before = "|".join(_in_either_case(text) for text in sorted(beginnings - {_YOU_ARE, ""}))
    after = "|".join(re.escape(text) for text in sorted(endings) if len(text) > len(" people"))
    return re.compile(rf"\b(?:(?:{before})\w|{_in_either_case(_YOU_ARE)}[A-Z0-9])|\w(?:{after})")


def _in_either_case(text: str) -> str:
    """Return a pattern for a text that may begin in lower case after another sentence."""
    return f"[{text[0]}{text[0].lower()}]{re.escape(text[1:])}"
