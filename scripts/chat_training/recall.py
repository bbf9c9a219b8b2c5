"""Conversations in which something is told, other things are talked about, and what was told is asked for.

Owns: how such conversations are put together, for training and as test cases; what a right answer is, and
what an answer is that gives a fact.
Does not know: the wordings (`kinds`, `small_talk`), tokens or models.
Called by: `corpus` for training, `train_chat_model` and `check_recall` for tests.

The talk in between is whole exchanges of recorded dialogues, in their order; where one dialogue ends, another
follows. Some questions are about what nobody told: their answer is that it was not told, so that a model
without the history says so instead of making something up. Greetings and the like stand first or between,
so that nobody is answered with a fact who told none.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from chat_training.data import Conversation, Exchange
from chat_training.facts import CASUAL_SHARE, FactKind
from chat_training.kinds import KINDS
from chat_training.small_talk import FILLERS, closing, opening, passing
from chat_training.wordings import Wordings, perhaps_casual, within_sentence

BETWEEN: Final = (3, 6)
"""The fewest and most exchanges between telling and asking, in the tests that figures are of."""
_OPENERS: Final = (
    "",
    "",
    "",
    "Hi! ",
    "Hello. ",
    "Hi there. ",
    "Good morning. ",
    "Good evening! ",
    "Hey, hi. ",
)
_ASK_PREFIXES: Final = (
    "",
    "",
    "",
    "By the way, ",
    "Quick question: ",
    "One more thing: ",
    "Tell me, ",
    "Sorry, ",
    "Okay, ",
    "Thanks! ",
    "Now something else: ",
    "Before we go on, ",
)
_ACKNOWLEDGEMENTS: Final = (
    "Thank you, I will remember that.",
    "Got it. How can I help you?",
    "Noted. What can I do for you?",
    "All right, I will keep that in mind.",
    "Okay. What would you like to do?",
)
_NOT_TOLD: Final = ("You have not told me {} yet.", "I do not know {}, you have not told me.")
_YOU_ARE: Final = "You are "
_MAX_FACTS: Final = 4  # in training
_MAX_FACTS_TESTED: Final = 3
_MAX_TALK: Final = 8  # exchanges between telling and asking
_NEAR_SHARE: Final = 0.2
_LONG_TALK: Final = (9, 20)  # of the share below: recall must not end where most examples do
_LONG_SHARE: Final = 0.1
_LATE_SHARE: Final = 0.2  # of conversations that begin with talk, before anything is told
_TWICE_SHARE: Final = 0.35  # of conversations in which something more is told later
_MERGED_SHARE: Final = 0.4  # of tellings that stand before a request, in one message
_FILLER_SHARE: Final = 0.25  # of gaps between sentences
_JOINED_SHARE: Final = 0.25  # of sentences that go on with the next one
_ECHO_SHARE: Final = 0.4  # of acknowledgements that repeat what was told
_UNTOLD_SHARE: Final = 0.1  # of questions
_OPENED_SHARE: Final = 0.3  # of conversations that begin with small talk
_EARLY_SHARE: Final = 0.06  # of conversations with a question before anything is told
_PASSING_SHARE: Final = 0.1  # of places for small talk: after telling, before asking and after an answer
_CLOSED_SHARE: Final = 0.12  # of conversations that end with thanks or a goodbye


class Fact(NamedTuple):
    """Something told."""

    kind: FactKind
    value: str


class Role(Enum):
    """What an exchange is for."""

    FACT = auto()  # something is told and acknowledged, or asked and answered
    REQUEST = auto()  # something is told before a request, and the request is answered
    TALK = auto()
    SMALL_TALK = auto()


class RecallConversation(NamedTuple):
    """A conversation, and what each of its exchanges is for."""

    conversation: Conversation
    roles: tuple[Role, ...]


class RecallCase(NamedTuple):
    """A test: `history`, then `question`; right if the answer holds `value`."""

    kind: str
    history: Conversation
    question: str
    value: str


def recall_conversation(rng: random.Random, talks: Sequence[Conversation]) -> RecallConversation:
    """One conversation of the training part: facts told once or twice, talk, and a question for each.

    Small talk may stand before and between.
    """
    talk = _talk(rng, talks)
    text = rng.choice(rng.choice(talks).exchanges).user
    facts = _facts(rng, rng.randint(1, _MAX_FACTS), text, Wordings.TRAINING)
    num_first = rng.randint(1, len(facts)) if rng.random() < _TWICE_SHARE else len(facts)
    done: list[tuple[Exchange, Role]] = []

    def add_talk(num_exchanges: int) -> None:
        done.extend((next(talk), Role.TALK) for _ in range(num_exchanges))

    def perhaps_add(share: float, exchange: Callable[[random.Random], Exchange], role: Role) -> None:
        if rng.random() < share:
            done.append((exchange(rng), role))

    perhaps_add(_OPENED_SHARE, opening, Role.SMALL_TALK)
    perhaps_add(_PASSING_SHARE if done else 0.0, passing, Role.SMALL_TALK)
    perhaps_add(_EARLY_SHARE, functools.partial(_ask_untold, told=()), Role.FACT)
    add_talk(rng.randint(1, 3) if rng.random() < _LATE_SHARE else 0)
    for some in (facts[:num_first], facts[num_first:]):
        if some:
            done.append(_tell(rng, some, talk, Wordings.TRAINING))
            perhaps_add(_PASSING_SHARE, passing, Role.SMALL_TALK)
            add_talk(_num_between(rng))
    perhaps_add(_PASSING_SHARE, passing, Role.SMALL_TALK)
    for fact in rng.sample(facts, len(facts)):
        exchange = _ask_untold(rng, facts) if rng.random() < _UNTOLD_SHARE else _ask(rng, fact)
        done.append((exchange, Role.FACT))
        perhaps_add(_PASSING_SHARE, passing, Role.SMALL_TALK)
        add_talk(rng.choice((0, 0, 1, 2)))
    perhaps_add(_CLOSED_SHARE, closing, Role.SMALL_TALK)
    exchanges, roles = zip(*done, strict=True)
    return RecallConversation(Conversation(exchanges), roles)


def _num_between(rng: random.Random) -> int:
    """Exchanges of talk; none, often, since what is near is learned first."""
    draw = rng.random()
    if draw < _LONG_SHARE:
        return rng.randint(*_LONG_TALK)
    return 0 if draw < _LONG_SHARE + _NEAR_SHARE else rng.randint(1, _MAX_TALK)


def recall_case(
    rng: random.Random, talks: Sequence[Conversation], num_between: tuple[int, int], wordings: Wordings
) -> RecallCase:
    """A test of held-out values.

    Args:
      rng: what is drawn from.
      talks: dialogues that training does not use.
      num_between: the fewest and most exchanges between the telling, which is first, and the question.
      wordings: in which part of those that training never sees it is told and asked.
    """
    talk = _talk(rng, talks)
    facts = _facts(rng, rng.randint(1, _MAX_FACTS_TESTED), "", wordings)
    asked = rng.choice(facts)
    told, _ = _tell(rng, facts, talk, wordings)
    between = [next(talk) for _ in range(rng.randint(*num_between))]
    question = _question(rng, asked.kind, wordings)
    return RecallCase(asked.kind.name, Conversation((told, *between)), question, asked.value)


def recall_cases(
    num_cases: int,
    talks: Sequence[Conversation],
    seed: int,
    wordings: Wordings = Wordings.NEW_SENTENCES,
) -> list[RecallCase]:
    """The tests that figures are of; the same for the same arguments."""
    rng = random.Random(seed)
    return [recall_case(rng, talks, BETWEEN, wordings) for _ in range(num_cases)]


def holds(answer: str, value: str) -> bool:
    """Whether `value` stands in the answer, as words of its own."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", answer) is not None


def gives_a_fact(answer: str) -> bool:
    """Whether an answer says of anything that can be told what it is: to a greeting, an invention."""
    return _answer_pattern().search(answer) is not None


@functools.cache
def _answer_pattern() -> re.Pattern[str]:
    """Any answer about any kind, up to the first letter or digit of its value.

    A name that the model made of a word of the message may be in lower case ("Your neighbour is called
    loud."), but "You are welcome." gives none.
    """
    before = {answer.partition("{}")[0] for kind in KINDS for answer in kind.answers} - {_YOU_ARE}
    return re.compile(rf"\b(?:(?:{'|'.join(map(re.escape, sorted(before)))})\w|{_YOU_ARE}[A-Z0-9])")


def _talk(rng: random.Random, talks: Sequence[Conversation]) -> Iterator[Exchange]:
    """Exchanges without end."""
    while True:
        yield from rng.choice(talks).exchanges


def _facts(rng: random.Random, num_facts: int, text: str, wordings: Wordings) -> list[Fact]:
    kinds = rng.sample(KINDS, num_facts)
    return [Fact(kind, kind.value(rng, text, wordings)) for kind in kinds]


def _tell(
    rng: random.Random, facts: Sequence[Fact], talk: Iterator[Exchange], wordings: Wordings
) -> tuple[Exchange, Role]:
    """The facts in one message, perhaps before a request, which is answered then."""
    told = [fact.kind.telling(rng, fact.value, wordings) for fact in facts]
    is_test = wordings is not Wordings.TRAINING
    text = rng.choice(_OPENERS) + (" ".join(told) if is_test else _joined(rng, told))
    if rng.random() < _MERGED_SHARE:
        request = next(talk)
        return Exchange(f"{text} {request.user}", request.reply), Role.REQUEST
    if rng.random() < _ECHO_SHARE:
        return Exchange(text, " ".join(["I see.", *(_answer(rng, fact) for fact in facts)])), Role.FACT
    return Exchange(text, rng.choice(_ACKNOWLEDGEMENTS)), Role.FACT


def _joined(rng: random.Random, sentences: Sequence[str]) -> str:
    """The sentences, some of them as one, and some with others between that tell nothing.

    Without the latter a model takes the first word of any sentence that it does not know for a name.
    """
    text = ""
    for sentence in sentences:
        if rng.random() < _FILLER_SHARE:
            text = f"{text} {rng.choice(FILLERS)}"
        elif text.endswith(".") and rng.random() < _JOINED_SHARE:
            text = text[:-1] + rng.choice((", and", " and", ","))
            sentence = within_sentence(sentence) if sentence.startswith(("My ", "The ", "We ")) else sentence
        text = f"{text} {sentence}"
    return text.strip()


def _ask(rng: random.Random, fact: Fact) -> Exchange:
    return Exchange(_training_question(rng, fact.kind), _answer(rng, fact))


def _ask_untold(rng: random.Random, told: Sequence[Fact]) -> Exchange:
    """A question about a kind of fact that was not told."""
    names = {fact.kind.name for fact in told}
    kind = rng.choice([kind for kind in KINDS if kind.name not in names])
    return Exchange(_training_question(rng, kind), rng.choice(_NOT_TOLD).format(kind.subject))


def _training_question(rng: random.Random, kind: FactKind) -> str:
    return perhaps_casual(rng, _question(rng, kind, Wordings.TRAINING), CASUAL_SHARE)


def _question(rng: random.Random, kind: FactKind, wordings: Wordings) -> str:
    prefix, text = rng.choice(_ASK_PREFIXES), kind.asking(rng, wordings)
    return prefix + within_sentence(text) if prefix.endswith((", ", ": ")) else prefix + text


def _answer(rng: random.Random, fact: Fact) -> str:
    return rng.choice(fact.kind.answers).format(fact.value)
