"""Test cases of recall: held-out values, told, perhaps corrected, and asked for in held-out wordings.

Owns: the sorts of cases, how a case is put together, and when an answer is right.
Does not know: the wordings, tokens or models.
Called by `evaluation`, `served_recall` and the programs of recall.

A case tells one to three facts in its first message. Corrections follow at once, or after an exchange. Then
other talk follows, and the last message asks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from pensieve_lab.chat_training import corrections
from pensieve_lab.chat_training.data import Conversation, Exchange
from pensieve_lab.chat_training.grammar import Scraps
from pensieve_lab.chat_training.questions import Fact, question
from pensieve_lab.chat_training.recall import acknowledgement, draw_facts, endless_talk, opener, tell
from pensieve_lab.chat_training.wordings import Wordings

BETWEEN: Final = (3, 6)
"""Smallest and largest number of exchanges between telling and asking, in the reported tests."""
_MAX_FACTS: Final = 3
_NO_SCRAPS: Final = Scraps(())  # tests have no scraps


class Sort(Enum):
    """What the last message of a case asks for."""

    ONE = "one fact"
    TWO = "two at once"
    CORRECTED_AT_ONCE = "corrected at once"
    CORRECTED_LATER = "corrected later"


class RecallCase(NamedTuple):
    """A test: `history`, then `question`; right if the answer holds all `values` and none of `outdated`."""

    kind: str  # label of figures: the family of the fact, or the sort of the case
    history: Conversation
    question: str
    values: tuple[str, ...]
    outdated: tuple[str, ...]

    def is_right(self, answer: str) -> bool:
        """Return whether the answer holds the latest values and no outdated one."""
        told = all(holds(answer, value) for value in self.values)
        return told and not any(holds(answer, value) for value in self.outdated)


def recall_case(
    rng: random.Random,
    talks: Sequence[Conversation],
    num_between: tuple[int, int],
    wordings: Wordings,
    sort: Sort = Sort.ONE,
) -> RecallCase:
    """Return a test of held-out values.

    Args:
      rng: source of all draws.
      talks: dialogues that training does not use.
      num_between: smallest and largest number of exchanges between telling or correcting and the question.
      wordings: the held-out part of the wordings that tell, correct and ask.
      sort: what is asked.
    """
    fewest = 2 if sort is Sort.TWO else 1
    facts = draw_facts(rng, rng.randint(fewest, _MAX_FACTS), "", wordings)
    is_corrected_at_once = sort is Sort.CORRECTED_AT_ONCE
    if is_corrected_at_once:
        facts = facts[:1]  # a bare value would be ambiguous among several facts
    talk = endless_talk(rng, talks, facts)
    asked = rng.sample(facts, 2 if sort is Sort.TWO else 1)
    told = [fact.kind.telling(rng, fact.value, wordings, _NO_SCRAPS) for fact in facts]
    request = None if is_corrected_at_once else talk
    exchanges = [tell(rng, opener(rng) + " ".join(told), facts, request)[0]]
    outdated: tuple[str, ...] = ()
    if is_corrected_at_once or sort is Sort.CORRECTED_LATER:
        if sort is Sort.CORRECTED_LATER:
            exchanges.append(next(talk))
        outdated = (asked[0].value,)
        exchange, asked[0] = _correct(rng, asked[0], wordings, is_bare=is_corrected_at_once)
        exchanges.append(exchange)
    exchanges += [next(talk) for _ in range(rng.randint(*num_between))]
    text = question(rng, [fact.kind for fact in asked], wordings, _NO_SCRAPS)
    kind = asked[0].kind.family if sort is Sort.ONE else sort.value
    values = tuple(fact.value for fact in asked)
    return RecallCase(kind, Conversation(tuple(exchanges)), text, values, outdated)


def _correct(rng: random.Random, fact: Fact, wordings: Wordings, *, is_bare: bool) -> tuple[Exchange, Fact]:
    """Return the correcting exchange, and the corrected fact."""
    old = fact.value
    while holds(new := fact.kind.value(rng, "", wordings), old) or holds(old, new):
        pass
    if is_bare:
        text = corrections.bare(rng, fact.kind, new, wordings, _NO_SCRAPS)
    else:
        text = corrections.named(rng, fact.kind, old, new, wordings, _NO_SCRAPS)
    corrected = Fact(fact.kind, new)
    return Exchange(text, acknowledgement(rng, corrected)), corrected


def recall_cases(
    num_cases: int,
    talks: Sequence[Conversation],
    seed: int,
    wordings: Wordings = Wordings.NEW_SENTENCES,
) -> list[RecallCase]:
    """Return the reported tests, the same for the same arguments; half of them ask for one fact."""
    rng = random.Random(seed)
    others = [sort for sort in Sort if sort is not Sort.ONE]
    sorts = [Sort.ONE if i % 2 == 0 else others[i // 2 % len(others)] for i in range(num_cases)]
    return [recall_case(rng, talks, BETWEEN, wordings, sort) for sort in sorts]


def holds(answer: str, value: str) -> bool:
    """Return whether `value` stands in the answer as separate words."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", answer) is not None


def percent_by_kind(cases: Sequence[RecallCase], answers: Sequence[str]) -> dict[str, tuple[float, int]]:
    """Return the percentage of right answers and the number of cases of each kind, sorted by name."""
    found: dict[str, list[bool]] = {}
    for case, answer in zip(cases, answers, strict=True):
        found.setdefault(case.kind, []).append(case.is_right(answer))
    return {kind: (100 * sum(found[kind]) / len(found[kind]), len(found[kind])) for kind in sorted(found)}
