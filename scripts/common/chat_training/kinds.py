"""What somebody may tell a chat model about themselves.

Owns: the list of kinds, and the wordings of those that stand alone. The last two of every list of wordings
are for the test: they share words with the others, as people's own wordings would, but no sentence.
Does not know: how sentences are varied or values drawn, or the wordings of whole families (`kind_families`).
Called by: `recall`, which puts facts into conversations, and `corpus`.
"""

from __future__ import annotations

from typing import Final

from common.chat_training.facts import FactKind
from common.chat_training.kind_families import numbered, relative, scheduled
from common.chat_training.values import a_person, a_place, a_street

_OWN_NAME: Final = FactKind(
    "name",
    a_person,
    "your name",
    (
        "My name~ is {}.",
        "I am {}.",
        "I'm {}.",
        "This is {} speaking.",
        "You can call me {}.",
        "People call me {}.",
        "I am called {}.",
        "The name is {}.",
        "My first name~ is {}.",
        "It is {} here.",
        "{} is my name.",
        "{} is what people call me.",
        "Everybody knows me as {}.",
        "I go by {}.",
        "I go by the name of {}.",
        "They named me {}.",
        "You are talking to {}.",
        "Friends know me as {}.",
        "Just call me {}.",
        "For you I am {}.",
        "For friends I am just {}.",
        "You may call me {}.",
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
        "My home~ is in {}.",
        "I am living in {}.",
        "I moved to {} and live there now.",
        "{} is where I live.",
        "I have been living in {} for years.",
        "My flat~ is in {}.",
        "My home town~ is {}.",
        "{} is my home.",
        "I am at home in {}.",
        "My family and I live in {}.",
        "I am from {}.",
        "I am a resident of {}.",
        "We have a house in {}.",
        "The city of {} is where I live.",
        "My home is the city of {}.",
        "I come from the city of {}.",
        "The town that I live in is {}.",
        "I settled in the town of {}.",
        "Nowadays my home is {}.",
        "Today my home is in {}.",
        "For some years I have lived in {}.",
        "You can visit me in {}.",
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
        "My car~ is parked on {}.",
        "I left my car on {}.",
        "The car~ is on {}.",
        "My car stands on {}.",
        "I have parked on {}.",
        "My parking spot~ is on {}.",
        "{} is where I parked.",
        "{} is where my car is.",
        "The car is waiting on {}.",
        "I found a place for my car on {}.",
        "I put my car on {}.",
        "My car can be found on {}.",
        "Look for my car on {}.",
        "You can see my car on {}.",
        "Today I parked on {}.",
        "There is my car, on {}.",
        "The car was left on {}.",
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

_RELATIVES: Final = (
    *("dog", "cat", "sister", "brother", "best friend", "boss"),
    *("daughter", "son", "neighbour", "teacher"),
)
_NUMBERS: Final = ("room number", "locker number", "door code", "ticket number", "seat number")

KINDS: Final[tuple[FactKind, ...]] = (
    _OWN_NAME,
    _HOME,
    _CAR,
    *(relative(who) for who in _RELATIVES),
    scheduled("train", "train", "leaves"),
    scheduled("meeting", "meeting", "starts"),
    scheduled("dentist", "dentist appointment", "begins"),
    scheduled("flight", "flight", "departs"),
    scheduled("concert", "concert", "begins"),
    *(numbered(what.replace(" ", "_"), what) for what in _NUMBERS),
    numbered("lucky_number", "lucky number"),
)
"""Every kind of fact."""
