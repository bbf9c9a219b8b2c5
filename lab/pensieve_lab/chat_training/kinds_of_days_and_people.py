"""Kinds of facts about days and numbers of people.

Owns: their wordings, in the parts that `kind_families` describes: the last two of every list, and the two
after each list of statements, are for the tests.
Does not know: which events have days, how sentences are varied, or values drawn.
Called by `kinds`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pensieve_lab.chat_training.facts import FactKind
from pensieve_lab.chat_training.values import a_count, a_day

_PEOPLE: Final = "a number of people"
_SHORT_COUNTS: Final = ("for {}", "{}", "{} people", "for {} people")

TABLE: Final = FactKind(
    "table",
    _PEOPLE,
    a_count,
    _SHORT_COUNTS,
    ("a table", "the table", "our table"),
    "for how many people the table is",
    ("the number of people at the table", "the size of our table"),
    ("for how many people the table is", "how many people the table is for", "how many of us want to eat"),
    (
        "The table~ is for {}.",
        "The table~ is for {} people.",
        "I need a table for {}.",
        "I need a table for {} people.",
        "I want a table for {}.",
        "We want a table for {} people.",
        "A table for {}, please.",
        "A table for {} people.",
        "Book a table for {}.",
        "Please book a table for {} people.",
        "Find me a table for {}.",
        "Get us a table for {}.",
        "We need a table for {} tonight.",
        "We are {} people and need a table.",
        "There are {} of us who want a table.",
        "We will be {} at the table.",
        "Our table~ is for {}.",
        "{} people will sit at the table.",
        "Can I have a table for {}?",
        "Could you get a table for {} people?",
        "I am looking for a table for {}.",
        "Lay the table for {}.",
        "The table should have room for {}.",
        "The table~ has to be for {} people.",
        "My table~ must seat {}.",
        "Make it a table for {} people, please.",
        "I would like to have a table for {}.",
    ),
    ("Wherever we eat, {} chairs must stand at the table.", "Dinner will see {} of us at one table."),
    (
        "For how many people is the table?",
        "How many people is the table for?",
        "For how many is the table?",
        "How many seats does the table need?",
        "What table size did I ask for?",
        "How many of us want to eat?",
        "How many people will sit at the table?",
        "For how many did I want the table?",
        "Do you remember for how many people the table is?",
        "How large should the table be?",
        "How big a table do we need?",
        "How many people did I want the table for?",
        "How many are we at the table?",
    ),
    ("The table is for {} people.", "You need a table for {} people."),
)


class _Sentences(NamedTuple):
    """The wordings of a kind, by the names that `FactKind` gives them."""

    topics: tuple[str, ...]
    tells: tuple[str, ...]
    new_tells: tuple[str, ...]
    asks: tuple[str, ...]
    answers: tuple[str, ...]


def _counted(core: str, mine: str, yours: str, sentences: _Sentences) -> FactKind:
    """Return the kind for a number of people; `mine` and `yours` complete "how many people ..."."""
    return FactKind(
        name=core.split()[-1],
        family=_PEOPLE,
        draw=a_count,
        short=_SHORT_COUNTS,
        cores=(core,),
        subject=f"how many people {yours}",
        questions=(f"how many people {mine}", f"how many {mine}"),
        **sentences._asdict(),
    )


GUESTS: Final = _counted(
    "my party",
    "come to my party",
    "come to your party",
    _Sentences(
        ("the number of guests at my party", "how large my party is"),
        (
            "I have invited {} people to my party.",
            "{} people come to my party.",
            "{} guests come to my party.",
            "My party~ has {} guests.",
            "I expect {} guests at my party.",
            "There will be {} people at my party.",
            "My party~ is for {} people.",
            "I am giving a party for {}.",
            "I give a party for {} people.",
            "At my party there are {} of us.",
            "Plan my party for {}.",
            "Prepare my party for {} guests.",
            "Think of {} people for my party.",
            "We are {} at my party.",
            "For my party I have {} guests.",
            "My party will see {} people.",
        ),
        ("My party needs cake enough for {}.", "As many as {} have promised to dance at my party."),
        (
            "How many people come to my party?",
            "How many guests do I have at my party?",
            "For how many people is my party?",
            "How many did I invite to my party?",
            "How large is my party?",
            "How many guests does my party have?",
            "How many will be at my party?",
            "How many people did I say come to my party?",
            "How many guests will my party have?",
            "How many people are coming to my party?",
        ),
        ("{} people come to your party.", "Your party is for {} people."),
    ),
)
GROUP: Final = _counted(
    "our group",
    "are in our group",
    "are in your group",
    _Sentences(
        ("the size of our group", "the number of people in our group"),
        (
            "We are {} people in our group.",
            "Our group~ has {} people.",
            "Our group~ is {} people.",
            "We travel as a group of {}.",
            "I travel in a group of {}.",
            "We are a group of {}.",
            "{} people are in our group.",
            "There are {} of us in our group.",
            "Our group~ counts {} heads.",
            "I am with a group of {} people.",
            "Our group~ consists of {} people.",
            "Plan for a group of {}.",
            "Think of us as a group of {}.",
            "Today we are a group of {} people.",
            "The group~ is {} strong.",
            "The group that I am in has {} people.",
        ),
        ("Count everybody in our group and you get {}.", "No bus with fewer seats than {} takes our group."),
        (
            "How many people are in our group?",
            "How large is our group?",
            "How many of us travel?",
            "What is the size of our group?",
            "How many are we in our group?",
            "How big is the group?",
            "Of how many people is our group?",
            "How many people did I say travel with me?",
            "How many people does our group have?",
            "How big is our group?",
        ),
        ("Your group has {} people.", "You are a group of {} people."),
    ),
)
TEAM: Final = _counted(
    "my team",
    "work in my team",
    "work in your team",
    _Sentences(
        ("the size of my team", "the number of people in my team"),
        (
            "My team~ has {} people.",
            "I work in a team of {}.",
            "{} people work in my team.",
            "There are {} people in my team.",
            "My team~ is {} people.",
            "We are {} in my team.",
            "I have a team of {}.",
            "I lead a team of {} people.",
            "My team~ counts {} people.",
            "My team~ consists of {} people.",
            "The team I have~ is {} strong.",
            "The team~ of mine has {} members.",
            "My team~ has {} members.",
            "Note that we are {} in my team.",
            "In my team there are {} of us.",
            "A team of {} is what I have.",
        ),
        ("To feed my team I cook for {}.", "Everyone in my team together makes {}."),
        (
            "How many people are in my team?",
            "How large is my team?",
            "How many people work in my team?",
            "What is the size of my team?",
            "How many are we in my team?",
            "How big did I say my team is?",
            "How many colleagues did I say are in my team?",
            "Do you know how large my team is?",
            "How many members does my team have?",
            "How big is my team?",
        ),
        ("Your team has {} people.", "{} people work in your team."),
    ),
)


def on_a_day(name: str, what: str) -> FactKind:
    """Return the kind for a day: `my {what} is on ...`."""
    return FactKind(
        name,
        "a day",
        a_day,
        ("{}", "on {}"),
        (f"my {what}", f"my {what}", f"the {what} I have"),
        f"on which day your {what} is",
        (f"the day of my {what}", f"the date of my {what}"),
        (f"on which day my {what} is", f"what day my {what} is on", f"when my {what} is"),
        (
            f"My {what}~ is on {{}}.",
            f"I have my {what} on {{}}.",
            f"My {what}~ takes place on {{}}.",
            f"The day of my {what}~ is {{}}.",
            f"The date of my {what}~ is {{}}.",
            f"{{}} is the day of my {what}.",
            f"On {{}} I have my {what}.",
            f"On {{}} there is my {what}.",
            f"There is my {what} on {{}}.",
            f"I look forward to my {what} on {{}}.",
            f"They moved my {what} to {{}}.",
            f"We agreed on {{}} for my {what}.",
            f"Put my {what} down for {{}}.",
            f"Keep {{}} free for my {what}.",
            f"Remind me of my {what} on {{}}.",
            f"Plan for my {what} on {{}}.",
            f"Do not let me forget my {what} on {{}}.",
            f"I must not miss my {what} on {{}}.",
            f"My {what}~ is set for {{}}.",
            f"My {what}~ will be on {{}}.",
            f"The {what} I have~ is on {{}}.",
            f"For my {what} I chose {{}}.",
            f"{{}} is when I have my {what}.",
            f"I need to be at my {what} on {{}}.",
        ),
        (
            f"All week I will be nervous until {{}} and my {what} have come.",
            f"Cross out {{}} in the calendar, since my {what} takes the whole of it.",
        ),
        (
            f"On which day is my {what}?",
            f"What day is my {what}?",
            f"When is my {what}?",
            f"Which day did I tell you for my {what}?",
            f"On what day do I have my {what}?",
            f"Can you tell me the day of my {what}?",
            f"When did I say my {what} is?",
            f"What is the date of my {what}?",
            f"Do you remember when my {what} is?",
            f"When do I have my {what}?",
            f"Which day is my {what} on?",
            f"What was the day of my {what}?",
        ),
        (f"Your {what} is on {{}}.", f"You have your {what} on {{}}."),
    )
