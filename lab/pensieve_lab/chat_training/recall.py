"""Conversations that tell facts, perhaps correct them, turn to other talk, and then ask for the facts.

Owns: how such conversations are put together for training, and the parts that test cases share with them.
Does not know: the wordings (`kinds`, `corrections`, `questions`, `small_talk`), test cases, tokens or models.
Called by `corpus` and `recall_cases`.

The talk in between consists of whole exchanges of recorded dialogues, in their order; where one dialogue
ends, another follows. Some questions ask for untold facts. The answer says so, so that a model without the
history does not make something up. Greetings and other small talk stand first or in between, so that the
model does not answer with a fact when none was told.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from pensieve_lab.chat_training import corrections
from pensieve_lab.chat_training.data import Conversation, Exchange
from pensieve_lab.chat_training.facts import FactKind
from pensieve_lab.chat_training.grammar import Scraps
from pensieve_lab.chat_training.kinds import KINDS
from pensieve_lab.chat_training.questions import Fact, answer, question
from pensieve_lab.chat_training.small_talk import FILLERS, closing, opening, passing
from pensieve_lab.chat_training.wordings import Wordings, within_sentence

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
_ACKNOWLEDGEMENTS: Final = (
    "Thank you, I will remember that.",
    "Got it. How can I help you?",
    "Noted. What can I do for you?",
    "All right, I will keep that in mind.",
    "Okay. What would you like to do?",
)
_MAX_FACTS: Final = 5
_MAX_TALK: Final = 6  # exchanges between telling and asking
_NEAR_SHARE: Final = 0.5
_LONG_TALK: Final = (7, 18)  # range for `_LONG_SHARE`: recall must not end at the distance of most examples
_LONG_SHARE: Final = 0.1
_LATE_SHARE: Final = 0.2  # share of conversations that begin with talk, before anything is told
_TWICE_SHARE: Final = 0.4  # share of conversations in which more facts are told later
_MERGED_SHARE: Final = 0.35  # share of tellings that stand before a request, in one message
_FILLER_SHARE: Final = 0.2  # share of gaps between sentences
_JOINED_SHARE: Final = 0.35  # share of sentences that continue with the next one
_ECHO_SHARE: Final = 0.5  # share of acknowledgements that repeat what was told
_UNTOLD_SHARE: Final = 0.08  # share of questions
_JOINT_SHARE: Final = 0.3  # share of questions that are joined with a second one
_WITHIN_SHARE: Final = 0.03  # share of facts that are corrected in the sentence that tells them
_BARE_SHARE: Final = 0.3  # share of tellings that are corrected in the next message
_NAMED_SHARE: Final = 0.18  # share of facts that are corrected by name later
_ASKED_AGAIN_SHARE: Final = 0.15  # share of answers that are corrected and asked for again
_OPENED_SHARE: Final = 0.3  # share of conversations that begin with small talk
_EARLY_SHARE: Final = 0.06  # share of conversations with a question before anything is told
# share of places for small talk: after telling, before asking and after an answer
_PASSING_SHARE: Final = 0.1
_CLOSED_SHARE: Final = 0.12  # share of conversations that end with thanks or a goodbye
_TABLE_WORDS: Final = ("table", "people", "party")


class Role(Enum):
    """Purpose of an exchange in a conversation."""

    FACT = auto()  # something is told, corrected and acknowledged, or asked and answered
    REQUEST = auto()  # something is told before a request, and the request is answered
    TALK = auto()
    SMALL_TALK = auto()


class RecallConversation(NamedTuple):
    """A conversation, and the role of each of its exchanges."""

    conversation: Conversation
    roles: tuple[Role, ...]


def recall_conversation(
    rng: random.Random, talks: Sequence[Conversation], scraps: Scraps
) -> RecallConversation:
    """Return a training conversation: facts told in one or two parts, corrections, talk, and questions.

    Small talk may stand before and between.
    """
    made = _ConversationBuilder(rng, talks, scraps)
    made.begin()
    facts = list(made.facts.values())
    num_first = rng.randint(1, len(facts)) if rng.random() < _TWICE_SHARE else len(facts)
    for some in (facts[:num_first], facts[num_first:]):
        if some:
            made.tell(some)
            made.perhaps_add(_PASSING_SHARE, passing)
            made.talk_on(_num_between(rng))
            made.correct_by_name(some)
    made.perhaps_add(_PASSING_SHARE, passing)
    made.ask_all()
    made.perhaps_add(_CLOSED_SHARE, closing)
    exchanges, roles = zip(*made.done, strict=True)
    return RecallConversation(Conversation(exchanges), roles)


class _ConversationBuilder:
    """Builder of a conversation; `facts` are the current ones by the names of their kinds."""

    def __init__(self, rng: random.Random, talks: Sequence[Conversation], scraps: Scraps) -> None:
        self._rng, self._scraps = rng, scraps
        self._text = rng.choice(rng.choice(talks).exchanges).user
        drawn = draw_facts(rng, rng.randint(1, _MAX_FACTS), self._text, Wordings.TRAINING)
        self.facts = {fact.kind.name: fact for fact in drawn}
        self._talk = endless_talk(rng, talks, drawn)
        self.done: list[tuple[Exchange, Role]] = []

    def begin(self) -> None:
        """Add what may stand before anything is told."""
        self.perhaps_add(_OPENED_SHARE, opening)
        self.perhaps_add(_PASSING_SHARE if self.done else 0.0, passing)
        if self._rng.random() < _EARLY_SHARE:
            self._ask([self._untold_kind(())])
        self.talk_on(self._rng.randint(1, 3) if self._rng.random() < _LATE_SHARE else 0)

    def talk_on(self, num_exchanges: int) -> None:
        """Add exchanges of recorded dialogues."""
        self.done.extend((next(self._talk), Role.TALK) for _ in range(num_exchanges))

    def perhaps_add(self, share: float, exchange: Callable[[random.Random], Exchange]) -> None:
        """Add small talk with probability `share`."""
        if self._rng.random() < share:
            self.done.append((exchange(self._rng), Role.SMALL_TALK))

    def tell(self, facts: Sequence[Fact]) -> None:
        """Tell the facts in one message, and perhaps add a bare correction as the next."""
        told = [self._told(fact) for fact in facts]
        text = self._rng.choice(_OPENERS) + _joined(self._rng, told)
        alone = [one for one in facts if sum(one.kind.draw is other.kind.draw for other in facts) == 1]
        is_corrected = bool(alone) and self._rng.random() < _BARE_SHARE
        # After a request, a bare value would be taken for its subject.
        self.done.append(tell(self._rng, text, facts, None if is_corrected else self._talk))
        if is_corrected:
            self._correct(alone[-1].kind, is_bare=True)

    def _told(self, fact: Fact) -> str:
        """Return a sentence that tells the fact, perhaps corrected within the sentence."""
        template = fact.kind.telling_template(self._rng, Wordings.TRAINING, self._scraps)
        if self._rng.random() >= _WITHIN_SHARE:
            return template.format(fact.value)
        old = fact.kind.value(self._rng, self._text, Wordings.TRAINING)
        return template.format(corrections.within(self._rng, old, fact.value))

    def correct_by_name(self, facts: Sequence[Fact]) -> None:
        """Correct some of the facts by name, with talk after each."""
        for fact in facts:
            if self._rng.random() < _NAMED_SHARE:
                self._correct(fact.kind, is_bare=False)
                self.talk_on(self._rng.choice((0, 0, 1, 2, 4)))

    def _correct(self, kind: FactKind, *, is_bare: bool) -> None:
        rng, old = self._rng, self.facts[kind.name].value
        while (new := kind.value(rng, self._text, Wordings.TRAINING)) == old:
            pass
        if is_bare:
            text = corrections.bare(rng, kind, new, Wordings.TRAINING, self._scraps)
        else:
            text = corrections.named(rng, kind, old, new, Wordings.TRAINING, self._scraps)
        self.facts[kind.name] = fact = Fact(kind, new)
        reply = acknowledgement(rng, fact)
        self.done.append((Exchange(text, reply), Role.FACT))

    def ask_all(self) -> None:
        """Ask for every fact in random order, some of them two at once, and some of them again."""
        rng = self._rng
        kinds = [fact.kind for fact in self.facts.values()]
        rng.shuffle(kinds)
        if len(kinds) > 1 and rng.random() < _JOINT_SHARE:
            kinds.append(kinds[0])  # so that conversations of two facts have both sorts of questions
        while kinds:
            num_asked = 2 if len(kinds) > 1 and rng.random() < _JOINT_SHARE else 1
            asked, kinds = kinds[:num_asked], kinds[num_asked:]
            if asked[0] is asked[-1]:
                asked = asked[:1]
            if rng.random() < _UNTOLD_SHARE:
                asked[rng.randrange(len(asked))] = self._untold_kind(asked)
            self._ask(asked)
            if len(asked) == 1 and asked[0].name in self.facts and rng.random() < _ASKED_AGAIN_SHARE:
                self._correct(asked[0], is_bare=True)
                kinds.append(asked[0])
            self.perhaps_add(_PASSING_SHARE, passing)
            self.talk_on(rng.choice((0, 0, 0, 1, 2)))

    def _ask(self, kinds: Sequence[FactKind]) -> None:
        text = question(self._rng, kinds, Wordings.TRAINING, self._scraps)
        is_told = bool(self.done) and any(role in (Role.FACT, Role.REQUEST) for _, role in self.done)
        told = [self.facts.get(kind.name, kind) if is_told else kind for kind in kinds]
        self.done.append((Exchange(text, answer(self._rng, told)), Role.FACT))

    def _untold_kind(self, others: Sequence[FactKind]) -> FactKind:
        known = {kind.cores[0] for kind in (*others, *(fact.kind for fact in self.facts.values()))}
        return self._rng.choice([kind for kind in KINDS if kind.cores[0] not in known])


def _num_between(rng: random.Random) -> int:
    """Return the number of exchanges of talk; often none, since short distances are learned first."""
    draw = rng.random()
    if draw < _LONG_SHARE:
        return rng.randint(*_LONG_TALK)
    return rng.randint(0, 1) if draw < _LONG_SHARE + _NEAR_SHARE else rng.randint(1, _MAX_TALK)


def endless_talk(
    rng: random.Random, talks: Sequence[Conversation], facts: Sequence[Fact]
) -> Iterator[Exchange]:
    """Yield exchanges without end; if one of the facts is about a table, skip dialogues about tables."""
    is_about_table = any(fact.kind.name == "table" for fact in facts)
    while True:
        exchanges = rng.choice(talks).exchanges
        if not (is_about_table and _names_tables(exchanges)):
            yield from exchanges


def _names_tables(exchanges: Sequence[Exchange]) -> bool:
    return any(word in text for one in exchanges for text in one for word in _TABLE_WORDS)


def draw_facts(rng: random.Random, num_facts: int, text: str, wordings: Wordings) -> list[Fact]:
    """Return facts of `num_facts` kinds with distinct values and subjects; `text` may lend words to names."""
    kinds = rng.sample(KINDS, num_facts)
    while len({kind.cores[0] for kind in kinds}) < num_facts:
        kinds = rng.sample(KINDS, num_facts)
    facts: dict[str, Fact] = {}
    for kind in kinds:
        while (value := kind.value(rng, text, wordings)) in facts:
            pass
        facts[value] = Fact(kind, value)
    return list(facts.values())


def tell(
    rng: random.Random, text: str, facts: Sequence[Fact], talk: Iterator[Exchange] | None
) -> tuple[Exchange, Role]:
    """Return the message that tells the facts and its reply; a request of `talk` may follow in it."""
    if talk is not None and rng.random() < _MERGED_SHARE:
        request = next(talk)
        return Exchange(f"{text} {request.user}", request.reply), Role.REQUEST
    if rng.random() < _ECHO_SHARE:
        return Exchange(text, " ".join(["I see.", *(answer(rng, [fact]) for fact in facts)])), Role.FACT
    return Exchange(text, rng.choice(_ACKNOWLEDGEMENTS)), Role.FACT


def acknowledgement(rng: random.Random, fact: Fact) -> str:
    """Return the reply to a correction."""
    if rng.random() < _ECHO_SHARE:
        return corrections.acknowledged(rng, answer(rng, [fact]))
    return rng.choice(_ACKNOWLEDGEMENTS)


def opener(rng: random.Random) -> str:
    """Return what may stand before the first fact."""
    return rng.choice(_OPENERS)


def _joined(rng: random.Random, sentences: Sequence[str]) -> str:
    """Return the sentences as one text, some joined, and some separated by sentences that tell nothing.

    Without the latter, a model takes the first word of any unknown sentence for a name.
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
