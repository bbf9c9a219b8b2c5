"""Kinds of facts that share their sentences: names of others, times of day, and numbers.

Owns: the wordings of these families. The last two of every list are for the test: they share words with the
others, as people's own wordings would, but no sentence.
Does not know: which members a family has, how sentences are varied, or values drawn.
Called by: `kinds`.
"""

from __future__ import annotations

from common.chat_training.facts import FactKind
from common.chat_training.values import a_number, a_person, a_time


def relative(who: str) -> FactKind:
    """The name of somebody else: the same sentences for all of them."""
    return FactKind(
        who.replace(" ", "_"),
        a_person,
        f"the name of your {who}",
        (
            f"My {who}~ is called {{}}.",
            f"My {who}'s name~ is {{}}.",
            f"The name of my {who}~ is {{}}.",
            f"I have a {who} called {{}}.",
            f"I have a {who} whose name is {{}}.",
            f"We all call my {who} {{}}.",
            f"I am here with my {who}, called {{}}.",
            f"There is my {who}, whose name is {{}}.",
            f"I have a {who} named {{}}.",
            f"My {who}~ is named {{}}.",
            f"My {who}~ goes by {{}}.",
            f"My {who}~ goes by the name of {{}}.",
            f"My {who} {{}} says hello.",
            f"My {who}~ answers to {{}}.",
            f"Everybody calls my {who} {{}}.",
            f"I am here with {{}}, my {who}.",
            f"{{}} is my {who}.",
            f"{{}} is the name of my {who}.",
            f"{{}} is what we call my {who}.",
            f"You may meet my {who}, {{}}.",
            f"I got a message from my {who} {{}}.",
            f"My {who} is {{}}.",
            f"A {who} of mine is called {{}}.",
            f"That {who} of mine~ is {{}}.",
            f"This {who} of mine~ goes by {{}}.",
            f"There is {{}}, my {who}.",
            f"There is a {who} in my life, and the name is {{}}.",
            f"There is also my {who} {{}}.",
            f"I also have a {who} whose name is {{}}.",
            f"I have a {who}, too, called {{}}.",
            f"{{}}, my {who}, is here as well.",
            f"One name to remember is {{}}, my {who}.",
            f"The {who} I have~ is called {{}}.",
            f"My {who} bears the name {{}}.",
            f"My {who} got the name {{}}.",
            f"Your name may be nice, but my {who} is called {{}}.",
            f"As for my {who}, the name is {{}}.",
            f"For friends, my {who} is just {{}}.",
            f"Today I am with my {who} {{}}.",
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


def scheduled(name: str, what: str, starts: str) -> FactKind:
    """A time of day: `my {what} {starts} at ...`."""
    return FactKind(
        name,
        a_time,
        f"when your {what} {starts}",
        (
            f"My {what}~ {starts} at {{}}.",
            f"I have a {what} that {starts} at {{}}.",
            f"The {what} I have~ {starts} at {{}}.",
            f"There is a {what} for me at {{}}.",
            f"My {what}~ is at {{}}.",
            f"I must not miss my {what} at {{}}.",
            f"At {{}} I have a {what}.",
            f"{{}} is the time of my {what}.",
            f"{{}} is when my {what} {starts}.",
            f"The time of my {what}~ is {{}}.",
            f"My {what}~ is set for {{}}.",
            f"Expect me at my {what} at {{}}.",
            f"I am waiting for my {what} at {{}}.",
            f"We agreed on {{}} for my {what}.",
            f"Today at {{}} I have my {what}.",
            f"Today there is my {what} at {{}}.",
            f"For today I have a {what} at {{}}.",
            f"I have to leave for my {what}; it {starts} at {{}}.",
            f"I have to make it to my {what} by {{}}.",
            f"You know, my {what} {starts} at {{}}.",
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


def numbered(name: str, what: str) -> FactKind:
    """A number: `my {what} is ...`."""
    return FactKind(
        name,
        a_number,
        f"your {what}",
        (
            f"My {what}~ is {{}}.",
            f"The {what} I have~ is {{}}.",
            f"I have the {what} {{}}.",
            f"They gave me the {what} {{}}.",
            f"{{}} is my {what}.",
            f"I got {what} {{}}.",
            f"Note that my {what} is {{}}.",
            f"My {what}~ happens to be {{}}.",
            f"My {what}~ will be {{}}.",
            f"My {what}: {{}}.",
            f"I use {{}} as my {what}.",
            f"The {what} they gave me~ is {{}}.",
            f"{{}} is the {what} I have.",
            f"Write down {{}}, it is my {what}.",
            f"I have {what} {{}}.",
            f"For your notes: my {what} is {{}}.",
            f"They assigned me {what} {{}}.",
            f"The clerk gave me {what} {{}}.",
            f"I was told that my {what} is {{}}.",
            f"There is my {what}, {{}}.",
            f"You can note {what} {{}} for me.",
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
