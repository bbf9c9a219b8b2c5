"""Conversations in which something is told, other things are talked about, and what was told is asked for.

Owns: how such conversations are put together, for training and as test cases.
Does not know: the wordings (`chat_training_facts`), tokens or models.
Called by: `train_chat_model`.

The talk in between is whole exchanges of recorded dialogues, in their order; where one dialogue ends, another
follows. Some questions are about what nobody told: their answer is that it was not told, so that a model
without the history says so instead of making something up.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from common.chat_training_data import Conversation, Exchange
from common.chat_training_facts import KINDS, FactKind, wordings

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
)
_ACKNOWLEDGEMENTS: Final = (
    "Thank you, I will remember that.",
    "Got it. How can I help you?",
    "Noted. What can I do for you?",
    "All right, I will keep that in mind.",
    "Okay. What would you like to do?",
)
_NOT_TOLD: Final = ("You have not told me {} yet.", "I do not know {}, you have not told me.")
_MAX_FACTS: Final = 3
_MAX_TALK: Final = 10
_LONG_TALK: Final = (11, 20)  # exchanges, of the share below: recall must not end where most examples do
_LONG_SHARE: Final = 0.1
_LATE_SHARE: Final = 0.15  # of conversations that begin with talk, before anything is told
_MERGED_SHARE: Final = 0.4  # of tellings that stand before a request, in one message
_ECHO_SHARE: Final = 0.3  # of acknowledgements that repeat what was told
_UNTOLD_SHARE: Final = 0.12  # of questions


class Fact(NamedTuple):
    """Something told."""

    kind: FactKind
    value: str


class RecallConversation(NamedTuple):
    """A conversation and the indices of its exchanges that matter: those that tell or ask."""

    conversation: Conversation
    about_facts: frozenset[int]


class RecallCase(NamedTuple):
    """A test: `history`, then `question`; right if the answer holds `value`."""

    kind: str
    history: Conversation
    question: str
    value: str


def recall_conversation(rng: random.Random, talks: Sequence[Conversation]) -> RecallConversation:
    """One conversation of the training part."""
    talk = _talk(rng, talks)
    facts = _facts(rng, rng.randint(1, _MAX_FACTS), held_out=False)
    lead = [next(talk) for _ in range(rng.randint(1, 3))] if rng.random() < _LATE_SHARE else []
    exchanges = [*lead, _tell(rng, facts, talk, held_out=False)]
    about = {len(lead)}
    num_talk = rng.randint(*_LONG_TALK) if rng.random() < _LONG_SHARE else rng.randint(1, _MAX_TALK)
    exchanges += [next(talk) for _ in range(num_talk)]
    for fact in rng.sample(facts, len(facts)):
        about.add(len(exchanges))
        exchanges.append(_ask_untold(rng, facts) if rng.random() < _UNTOLD_SHARE else _ask(rng, fact))
        exchanges += [next(talk) for _ in range(rng.choice((0, 0, 1, 2)))]
    return RecallConversation(Conversation(tuple(exchanges)), frozenset(about))


def recall_case(
    rng: random.Random, talks: Sequence[Conversation], num_between: tuple[int, int]
) -> RecallCase:
    """A test of held-out values in held-out wordings.

    Args:
      rng: what is drawn from.
      talks: dialogues that training does not use.
      num_between: the fewest and most exchanges between the telling, which is first, and the question.
    """
    talk = _talk(rng, talks)
    facts = _facts(rng, rng.randint(1, _MAX_FACTS), held_out=True)
    asked = rng.choice(facts)
    told = _tell(rng, facts, talk, held_out=True)
    between = [next(talk) for _ in range(rng.randint(*num_between))]
    question = _question(rng, asked.kind, held_out=True)
    return RecallCase(asked.kind.name, Conversation((told, *between)), question, asked.value)


def _talk(rng: random.Random, talks: Sequence[Conversation]) -> Iterator[Exchange]:
    """Exchanges without end."""
    while True:
        yield from rng.choice(talks).exchanges


def _facts(rng: random.Random, num_facts: int, *, held_out: bool) -> list[Fact]:
    kinds = rng.sample(KINDS, num_facts)
    return [Fact(kind, kind.value(rng, held_out=held_out)) for kind in kinds]


def _tell(rng: random.Random, facts: Sequence[Fact], talk: Iterator[Exchange], *, held_out: bool) -> Exchange:
    """The facts in one message, perhaps before a request, which is answered then."""
    told = [rng.choice(wordings(fact.kind.tells, held_out=held_out)).format(fact.value) for fact in facts]
    text = rng.choice(_OPENERS) + " ".join(told)
    if rng.random() < _MERGED_SHARE:
        request = next(talk)
        return Exchange(f"{text} {request.user}", request.reply)
    if rng.random() < _ECHO_SHARE:
        return Exchange(text, " ".join(["I see.", *(_answer(rng, fact) for fact in facts)]))
    return Exchange(text, rng.choice(_ACKNOWLEDGEMENTS))


def _ask(rng: random.Random, fact: Fact) -> Exchange:
    return Exchange(_question(rng, fact.kind, held_out=False), _answer(rng, fact))


def _ask_untold(rng: random.Random, facts: Sequence[Fact]) -> Exchange:
    """A question about a kind of fact that was not told."""
    told = {fact.kind.name for fact in facts}
    kind = rng.choice([kind for kind in KINDS if kind.name not in told])
    return Exchange(_question(rng, kind, held_out=False), rng.choice(_NOT_TOLD).format(kind.subject))


def _question(rng: random.Random, kind: FactKind, *, held_out: bool) -> str:
    prefix, text = rng.choice(_ASK_PREFIXES), rng.choice(wordings(kind.asks, held_out=held_out))
    # Within a sentence the question goes on in lower case, unless it begins with "I".
    return prefix + text[0].lower() + text[1:] if prefix and not text.startswith("I ") else prefix + text


def _answer(rng: random.Random, fact: Fact) -> str:
    return rng.choice(fact.kind.answers).format(fact.value)
