"""What somebody may tell a chat model about themselves, and the words for telling, asking and answering.

Owns: the kinds of facts, their wordings, and which of those training never sees: the last two of every list.
They share words with the others, as people's own wordings would, but no sentence.
Does not know: conversations, tokens or models; values are `chat_training_values`'.
Called by: `chat_training_recall`, which puts facts into conversations, and `chat_training_corpus`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from common.chat_training_values import a_number, a_person, a_place, a_street, a_time, is_held_out

NUM_HELD_OUT_WORDINGS: Final = 2


class FactKind(NamedTuple):
    """One thing that can be told. `{}` stands for the value; `subject` completes "You have not told me"."""

    name: str
    draw: Callable[[random.Random], str]
    subject: str
    tells: tuple[str, ...]
    asks: tuple[str, ...]
    answers: tuple[str, ...]

    def value(self, rng: random.Random, *, held_out: bool) -> str:
        """A value of the training part, or of the held-out one."""
        while is_held_out(value := self.draw(rng)) != held_out:
            pass
        return value


def wordings(every: Sequence[str], *, held_out: bool) -> Sequence[str]:
    """The wordings that training uses, or those that it never sees."""
    return every[-NUM_HELD_OUT_WORDINGS:] if held_out else every[:-NUM_HELD_OUT_WORDINGS]


def _relative(who: str) -> FactKind:
    """The name of somebody else: the same sentences for all of them."""
    return FactKind(
        who.replace(" ", "_"),
        a_person,
        f"the name of your {who}",
        (
            f"My {who} is called {{}}.",
            f"My {who}'s name is {{}}.",
            f"The name of my {who} is {{}}.",
            f"I have a {who} called {{}}.",
            f"I have a {who} whose name is {{}}.",
            f"We all call my {who} {{}}.",
            f"I am here with my {who}, called {{}}.",
            f"There is my {who}, whose name is {{}}.",
            f"There is also a {who} of mine called {{}}.",
            f"My {who}, by the way, has the name {{}}.",
        ),
        (
            f"What is my {who} called?",
            f"What is my {who}'s name?",
            f"What is the name of my {who}?",
            f"How is my {who} called?",
            f"Which name does my {who} have?",
            f"I told you about my {who}. What was the name?",
            f"Can you tell me the name of my {who}?",
            f"What was my {who}'s name again?",
            f"Do you remember what my {who} is called?",
            f"What did I say my {who}'s name was?",
        ),
        (f"Your {who} is called {{}}.", f"The name of your {who} is {{}}."),
    )


_OWN_NAME: Final = FactKind(
    "name",
    a_person,
    "your name",
    (
        "My name is {}.",
        "I am {}.",
        "I'm {}.",
        "This is {} speaking.",
        "You can call me {}.",
        "People call me {}.",
        "I am called {}.",
        "The name is {}.",
        "My first name is {}.",
        "Please call me {}.",
        "My friends call me {}.",
    ),
    (
        "What is my name?",
        "What's my name?",
        "Who am I?",
        "What am I called?",
        "How am I called?",
        "Which name did I give you?",
        "What name did I tell you?",
        "Can you tell me my name?",
        "Do you know who I am?",
        "Do you remember my name?",
        "What did I say my name was?",
    ),
    ("Your name is {}.", "You are {}."),
)

_HOME: Final = FactKind(
    "home",
    a_place,
    "where you live",
    (
        "I live in {}.",
        "My home is in {}.",
        "I am living in {}.",
        "I moved to {} and live there now.",
        "{} is where I live.",
        "I have been living in {} for years.",
        "My flat is in {}.",
        "I live in the city of {}.",
        "These days I live in {}.",
    ),
    (
        "Where do I live?",
        "Which city do I live in?",
        "In which city do I live?",
        "What city is my home in?",
        "Where is my home?",
        "Can you tell me where I live?",
        "Which place did I say I live in?",
        "What is the city I live in?",
        "Do you remember where I live?",
        "In what city is my home?",
    ),
    ("You live in {}.", "Your home is in {}."),
)

_CAR: Final = FactKind(
    "car",
    a_street,
    "where your car is parked",
    (
        "I parked my car on {}.",
        "My car is parked on {}.",
        "I left my car on {}.",
        "The car is on {}.",
        "My car stands on {}.",
        "I have parked on {}.",
        "We parked the car on {}.",
        "I left the car parked on {}.",
        "You will find my car on {}.",
    ),
    (
        "Where did I park?",
        "Where is my car?",
        "Where did I leave my car?",
        "On which street is my car?",
        "Which street did I park on?",
        "Can you tell me where my car is parked?",
        "Where did I say my car is?",
        "Do you remember where I parked?",
        "Where did I park my car?",
        "On what street did I leave the car?",
    ),
    ("Your car is parked on {}.", "You parked on {}."),
)


def _scheduled(name: str, what: str, starts: str) -> FactKind:
    """A time of day: `my {what} {starts} at ...`."""
    return FactKind(
        name,
        a_time,
        f"when your {what} {starts}",
        (
            f"My {what} {starts} at {{}}.",
            f"I have a {what} that {starts} at {{}}.",
            f"The {what} I have {starts} at {{}}.",
            f"There is a {what} for me at {{}}.",
            f"My {what} is at {{}}.",
            f"I must not miss my {what} at {{}}.",
            f"At {{}} I have a {what}.",
            f"Today my {what} {starts} at {{}}.",
            f"I need to be at my {what} at {{}}.",
        ),
        (
            f"When is my {what}?",
            f"At what time is my {what}?",
            f"What time does my {what} start?",
            f"When do I have my {what}?",
            f"Which time did I tell you for my {what}?",
            f"Can you tell me the time of my {what}?",
            f"When did I say my {what} {starts}?",
            f"Do you remember when my {what} {starts}?",
            f"When exactly is my {what}?",
            f"What was the time of my {what}?",
        ),
        (f"Your {what} {starts} at {{}}.", f"Your {what} is at {{}}."),
    )


def _numbered(name: str, what: str) -> FactKind:
    """A number: `my {what} is ...`."""
    return FactKind(
        name,
        a_number,
        f"your {what}",
        (
            f"My {what} is {{}}.",
            f"The {what} I have is {{}}.",
            f"I have the {what} {{}}.",
            f"They gave me the {what} {{}}.",
            f"{{}} is my {what}.",
            f"I got {what} {{}}.",
            f"Note that my {what} is {{}}.",
            f"I was given {what} {{}}.",
            f"For the record, my {what} is {{}}.",
        ),
        (
            f"What is my {what}?",
            f"What's my {what}?",
            f"Which {what} do I have?",
            f"What {what} did they give me?",
            f"Can you tell me my {what}?",
            f"Which {what} did I tell you?",
            f"What was my {what} again?",
            f"Do you know my {what}?",
            f"Do you remember my {what}?",
            f"What did I say my {what} was?",
        ),
        (f"Your {what} is {{}}.", f"You have the {what} {{}}."),
    )


KINDS: Final[tuple[FactKind, ...]] = (
    _OWN_NAME,
    _HOME,
    _CAR,
    *(_relative(who) for who in ("dog", "cat", "sister", "brother", "best friend", "boss")),
    _scheduled("train", "train", "leaves"),
    _scheduled("meeting", "meeting", "starts"),
    _scheduled("dentist", "dentist appointment", "begins"),
    *(_numbered(what.replace(" ", "_"), what) for what in ("room number", "locker number", "door code")),
    _numbered("lucky_number", "lucky number"),
)
"""Every kind of fact."""
