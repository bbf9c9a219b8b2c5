"""Kinds of facts that share their sentences: names of others, times of day, and numbers.

Owns: the wordings of these families. The last two of every list are for the test: they share words with the
others, as people's own wordings would, but no sentence. The two after each list of statements are for the
test's second part, whose constructions do not occur in training.
Does not know: which members a family has, how sentences are varied, or values drawn.
Called by `kinds`.
"""

from __future__ import annotations

from pensieve_lab.chat_training.facts import FactKind
from pensieve_lab.chat_training.values import a_number, a_person, a_time

# {} stands for the name of a person, <who> for their relation to the user.
_RELATIVE_TELLS = (
    "My <who>~ is called {}.",
    "My <who>'s name~ is {}.",
    "The name of my <who>~ is {}.",
    "I have a <who> called {}.",
    "I have a <who> whose name is {}.",
    "We all call my <who> {}.",
    "I am here with my <who>, called {}.",
    "There is my <who>, whose name is {}.",
    "I have a <who> named {}.",
    "Meet my <who> {}.",
    "Meet {}, my <who>.",
    "Say hi to my <who> {}.",
    "Say good morning to {}, my <who>.",
    "Greet my <who>, {}, for me.",
    "Give my regards to my <who> {}.",
    "Call my <who> {}.",
    "Please call my <who> by the name of {}.",
    "Let me introduce my <who>, {}.",
    "Let me introduce {}, who is my <who>.",
    "Wish my <who> {} a good day.",
    "Think of {} as my <who>.",
    "Look, there is {}, my <who>.",
    "Imagine a <who> with the name {}: that one is mine.",
    "My <who>~ is named {}.",
    "My <who>~ goes by {}.",
    "My <who>~ goes by the name of {}.",
    "My <who> {} says hello.",
    "My <who>~ answers to {}.",
    "Everybody calls my <who> {}.",
    "I am here with {}, my <who>.",
    "{} is my <who>.",
    "{} is the name of my <who>.",
    "{} is what we call my <who>.",
    "You may meet my <who>, {}.",
    "I got a message from my <who> {}.",
    "My <who> is {}.",
    "A <who> of mine is called {}.",
    "That <who> of mine~ is {}.",
    "This <who> of mine~ goes by {}.",
    "There is {}, my <who>.",
    "There is a <who> in my life, and the name is {}.",
    "There is also my <who> {}.",
    "I also have a <who> whose name is {}.",
    "I have a <who>, too, called {}.",
    "{}, my <who>, is here as well.",
    "One name to remember is {}, my <who>.",
    "The <who> I have~ is called {}.",
    "My <who> bears the name {}.",
    "My <who> got the name {}.",
    "Your name may be nice, but my <who> is called {}.",
    "As for my <who>, the name is {}.",
    "For friends, my <who> is just {}.",
    "Today I am with my <who> {}.",
    "There is also a <who> of mine called {}.",
    "My <who>, by the way, has the name {}.",
)
_RELATIVE_NEW_TELLS = (
    "Say hello to my <who>, whom we named {}.",
    "Should you run into my <who>, the right thing to shout is {}.",
)
_RELATIVE_ASKS = (
    "What is my <who> called?",
    "What is my <who>'s name?",
    "What is the name of my <who>?",
    "How is my <who> called?",
    "Which name does my <who> have?",
    "I told you about my <who>. What was the name?",
    "Can you tell me the name of my <who>?",
    "What was my <who>'s name again?",
    "Do you remember what my <who> is called?",
    "What did I say my <who>'s name was?",
)


def _of_whom(sentences: tuple[str, ...], who: str) -> tuple[str, ...]:
    return tuple(sentence.replace("<who>", who) for sentence in sentences)


def relative(who: str) -> FactKind:
    """Return the kind for the name of a person; all relations share the same sentences."""
    return FactKind(
        who.replace(" ", "_"),
        "somebody's name",
        a_person,
        ("{}", "{}"),
        (f"my {who}", f"my {who}", f"the {who} I have", f"a {who} of mine"),
        f"the name of your {who}",
        (f"my {who}'s name", f"the name of my {who}"),
        (f"what my {who} is called", f"what my {who}'s name is"),
        _of_whom(_RELATIVE_TELLS, who),
        _of_whom(_RELATIVE_NEW_TELLS, who),
        _of_whom(_RELATIVE_ASKS, who),
        (f"Your {who} is called {{}}.", f"The name of your {who} is {{}}."),
    )


def scheduled(name: str, what: str, starts: str) -> FactKind:
    """Return the kind for a time of day: `my {what} {starts} at ...`."""
    return FactKind(
        name,
        "a time",
        a_time,
        ("{}", "at {}"),
        (f"my {what}", f"my {what}", f"the {what} I have"),
        f"when your {what} {starts}",
        (f"the time of my {what}", f"the time when my {what} {starts}"),
        (f"when my {what} {starts}", f"when my {what} is", f"at what time my {what} {starts}"),
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
            f"Do not let me miss my {what} at {{}}.",
            f"Remind me of my {what} at {{}}.",
            f"Put my {what} down for {{}}.",
            f"Make sure that I am at my {what} by {{}}.",
            f"Get me to my {what} by {{}}.",
            f"Set an alarm for my {what} at {{}}.",
            f"Take me to my {what}, which {starts} at {{}}.",
            f"Plan for my {what} at {{}}.",
            f"Let us not forget my {what} at {{}}.",
            f"Keep {{}} free for my {what}.",
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
            f"Wake me well before {{}}, when my {what} {starts}.",
            f"Were I to come later than {{}}, I would miss my {what}.",
        ),
        (
            *(f"When is my {what}?", f"At what time is my {what}?"),
            *(f"What time does my {what} start?", f"When do I have my {what}?"),
            f"Which time did I tell you for my {what}?",
            f"Can you tell me the time of my {what}?",
            *(f"When did I say my {what} {starts}?", f"Do you remember when my {what} {starts}?"),
            f"When exactly is my {what}?",
            f"What was the time of my {what}?",
        ),
        (f"Your {what} {starts} at {{}}.", f"Your {what} is at {{}}."),
    )


def numbered(name: str, what: str) -> FactKind:
    """Return the kind for a number: `my {what} is ...`."""
    return FactKind(
        name,
        "a number",
        a_number,
        ("{}",),
        (f"my {what}", f"my {what}", f"the {what} I have"),
        f"your {what}",
        (f"my {what}", f"the {what} that I have"),
        (f"what my {what} is", f"which {what} I have"),
        (
            f"My {what}~ is {{}}.",
            f"The {what} I have~ is {{}}.",
            f"I have the {what} {{}}.",
            f"They gave me the {what} {{}}.",
            f"{{}} is my {what}.",
            f"Take down my {what}: {{}}.",
            f"Save {{}} as my {what}.",
            f"Use {{}} as my {what}.",
            f"Enter {{}} for my {what}.",
            f"Read this as my {what}: {{}}.",
            f"Let {{}} be my {what}.",
            f"Keep {{}}, that is my {what}.",
            f"Give them {{}} as my {what}.",
            f"Please accept {{}} as my {what}.",
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
            f"Put {{}} wherever a form wants my {what}.",
            f"Anyone who needs my {what} should be told {{}}.",
        ),
        (
            *(f"What is my {what}?", f"What's my {what}?"),
            *(f"Which {what} do I have?", f"What {what} did they give me?"),
            *(f"Can you tell me my {what}?", f"Which {what} did I tell you?"),
            f"What was my {what} again?",
            f"Do you know my {what}?",
            f"Do you remember my {what}?",
            f"What did I say my {what} was?",
        ),
        (f"Your {what} is {{}}.", f"You have the {what} {{}}."),
    )
