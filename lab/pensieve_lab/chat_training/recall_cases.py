"""Test cases of recall: a user tells the model facts, and asks for them some exchanges later.

Owns: the kinds of questions, how a case is put together, and when an answer is right.
Does not know: the wordings, tokens or models.
Called by `evaluation`, `served_recall` and the programs of recall.

The first message of a case tells one to three facts. In some cases the next message, or the one after it,
corrects a fact. Then exchanges about other things follow, and the last message asks. Values and wordings are
held out from training.
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
_NO_SCRAPS: Final = Scraps(())  # test messages hold no words besides the wordings


class QuestionKind(Enum):
    """What the last message of a case asks for."""

    ONE = "one fact"
    TWO = "two at once"
    CORRECTED_AT_ONCE = "corrected at once"
    CORRECTED_LATER = "corrected later"


class RecallCase(NamedTuple):
    """A test case: the answer to `question` after `history` must hold all `values` and no `outdated` one."""

    kind: str  # key of the results: for one fact, the fact's family; else the question's kind
    history: Conversation
    question: str
    values: tuple[str, ...]
    outdated: tuple[str, ...]

    def is_right(self, answer: str) -> bool:
        """Return whether the answer holds the latest values and no outdated one."""
        is_complete = all(holds(answer, value) for value in self.values)
        return is_complete and not any(holds(answer, value) for value in self.outdated)


def recall_case(
    rng: random.Random,
    talks: Sequence[Conversation],
    num_between: tuple[int, int],
    wordings: Wordings,
    question_kind: QuestionKind = QuestionKind.ONE,
) -> RecallCase:
    """Return a test case with values that training does not use.

    Args:
      rng: source of all draws.
      talks: dialogues that training does not use.
      num_between: smallest and largest number of exchanges before the question, after the last fact or
        correction.
      wordings: part of the wordings from which the messages are drawn.
      question_kind: what the last message asks for.
    """
    fewest = 2 if question_kind is QuestionKind.TWO else 1
    facts = draw_facts(rng, rng.randint(fewest, _MAX_FACTS), "", wordings)
    is_corrected_at_once = question_kind is QuestionKind.CORRECTED_AT_ONCE
    if is_corrected_at_once:
        facts = facts[:1]  # "No, Thursday." would be ambiguous after several facts
    talk = endless_talk(rng, talks, facts)
    asked = rng.sample(facts, 2 if question_kind is QuestionKind.TWO else 1)
    told = [fact.kind.telling(rng, fact.value, wordings, _NO_SCRAPS) for fact in facts]
    request = None if is_corrected_at_once else talk
    exchanges = [tell(rng, opener(rng) + " ".join(told), facts, request)[0]]
    outdated: tuple[str, ...] = ()
    if is_corrected_at_once or question_kind is QuestionKind.CORRECTED_LATER:
        if question_kind is QuestionKind.CORRECTED_LATER:
            exchanges.append(next(talk))
        outdated = (asked[0].value,)
        exchange, asked[0] = _correct(rng, asked[0], wordings, is_bare=is_corrected_at_once)
        exchanges.append(exchange)
    exchanges += [next(talk) for _ in range(rng.randint(*num_between))]
    text = question(rng, [fact.kind for fact in asked], wordings, _NO_SCRAPS)
    kind = asked[0].kind.family if question_kind is QuestionKind.ONE else question_kind.value
    values = tuple(fact.value for fact in asked)
    return RecallCase(kind, Conversation(tuple(exchanges)), text, values, outdated)


def _correct(rng: random.Random, fact: Fact, wordings: Wordings, *, is_bare: bool) -> tuple[Exchange, Fact]:
    """Return the exchange that corrects a fact, and the corrected fact; a bare one gives only the value."""
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
    """Return the test cases of the reported results, which depend only on the arguments.

    Every second case asks for one fact; the others take turns among the other kinds of questions.
    """
    rng = random.Random(seed)
    others = [kind for kind in QuestionKind if kind is not QuestionKind.ONE]
    kinds = [QuestionKind.ONE if i % 2 == 0 else others[i // 2 % len(others)] for i in range(num_cases)]
    return [recall_case(rng, talks, BETWEEN, wordings, kind) for kind in kinds]


def holds(answer: str, value: str) -> bool:
    """Return whether the answer contains `value` as whole words."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", answer) is not None


def percent_by_kind(cases: Sequence[RecallCase], answers: Sequence[str]) -> dict[str, tuple[float, int]]:
    """Return the percentage of right answers and the number of cases, by the cases' kind in sorted order."""
    found: dict[str, list[bool]] = {}
    for case, answer in zip(cases, answers, strict=True):
        found.setdefault(case.kind, []).append(case.is_right(answer))
    return {kind: (100 * sum(found[kind]) / len(found[kind]), len(found[kind])) for kind in sorted(found)}
