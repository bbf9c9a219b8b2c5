"""Small talk: greetings, thanks, remarks, and questions about the model, which tell nothing and set no task.

Owns: their wordings and replies, which of them training never sees (the last two of every list, as with
facts), and how they are varied.
Does not know: facts, where in a conversation they stand, tokens or models.
Called by `recall`, `corpus` and `served_recall`.

A model that has seen greetings only before facts answers a bare "Hi" with a fact that was not told.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final, NamedTuple

from pensieve_lab.chat_training.data import Exchange
from pensieve_lab.chat_training.wordings import held_out_wordings, perhaps_casual, training_wordings

_PURPOSE: Final = "restaurants, music, flights, movies, hotels, buses and the weather"


class _Topic(NamedTuple):
    """Prompts, without an end mark unless they are questions, and replies to any of them."""

    prompts: tuple[str, ...]
    replies: tuple[str, ...]


def _prompts(text: str) -> tuple[str, ...]:
    """Split a text at bars and line ends into prompts."""
    return tuple(prompt.strip() for line in text.strip().splitlines() for prompt in line.split("|"))


def _day_part(part: str) -> _Topic:
    return _Topic(
        _prompts(
            f"""
        Good {part} | Good {part} | {part.capitalize()} | Good {part} to you | Good {part} to you all
        Good {part}, assistant | A very good {part} | Hello, good {part} | Hi, good {part}
        A good {part} to you | Good {part}, my friend | I wish you a good {part}
        """
        ),
        (f"Good {part}! How can I help you?", f"Good {part}. What can I do for you?"),
    )


_HELLO: Final = _Topic(
    _prompts(
        """
        Hi | Hello | Hey | Hi | Hello | Hey | Hi there | Hello there | Hey there | Hiya | Howdy | Greetings
        Good day | Hello again | Hi again | Hello, assistant | Hi, assistant | Hey, hi | Hi, hello
        Hello, hello | Hi, can you hear me? | Hello, are you there? | Anybody there? | Are you there?
        Can you hear me? | Hey you | Hi everybody | Hello my friend | Yo | Salutations
        Hello, is anybody in? | Heya
        """
    ),
    (
        "Hello! How can I help you?",
        "Hi! What can I do for you?",
        "Hello. What would you like to do?",
    ),
)
_HOW_ARE_YOU: Final = _Topic(
    _prompts(
        """
        How are you? | How are you doing? | How are you today? | How do you do? | How are things?
        How is it going? | How's it going? | How have you been? | Are you well? | You okay?
        Is everything all right? | How is your day? | Hi, how are you? | Hello, how are you?
        Hey, how are you doing? | Hello there, how are you today? | What's up? | Are you all right?
        And how are you? | How are you feeling? | How is life? | Hello, how do you feel today?
        """
    ),
    (
        "I am fine, thank you. What can I do for you?",
        "I am well, thank you. How can I help you?",
    ),
)
_NICE_TO_MEET: Final = _Topic(
    _prompts(
        """
        Nice to meet you | Pleased to meet you | Good to see you | It is nice to meet you | Glad to meet you
        Nice to talk to you | Good to meet you | A pleasure to meet you
        """
    ),
    ("Nice to meet you, too. How can I help you?", "It is nice to meet you, too. What can I do for you?"),
)
_ABILITIES: Final = _Topic(
    _prompts(
        """
        What can you do? | What can you do for me? | How can you help me? | What can you help me with?
        What do you do? | What are you for? | What are you good at? | Tell me what you can do.
        Show me what you can do. | What do you know? | What can I ask you? | Can you help me? | Help
        I need help | Please help me | What services do you offer? | Hi, what can you do?
        Hello, can you help me? | Explain what you can do. | List what you can do. | What are your skills?
        In which ways are you useful?
        """
    ),
    (
        f"I can help you with {_PURPOSE}. I also remember what you tell me.",
        f"I talk about {_PURPOSE}, and I remember what you tell me.",
    ),
)
_IDENTITY: Final = _Topic(
    _prompts(
        """
        Who are you? | What are you? | Who is this? | Who am I talking to? | Are you a robot?
        Are you human? | Are you a person? | What is your name? | What's your name? | Hi, who are you?
        Tell me about yourself. | Introduce yourself. | Tell me who you are. | Do you have a name?
        Hello, what is your name? | And who are you? | What should I call you? | Are you a machine?
        May I ask who you are? | With whom do I speak?
        """
    ),
    (
        f"I am a small assistant for {_PURPOSE}. I remember what you tell me.",
        f"I am an assistant without a name. I help with {_PURPOSE}, and remember what I am told.",
    ),
)
_THANKS: Final = _Topic(
    _prompts(
        """
        Thanks | Thank you | Thanks a lot | Many thanks | Thank you very much | Thank you so much
        Thanks for your help | Thank you for your time | I thank you | Thanks again | Okay, thanks
        Great, thanks | Thx | Perfect, thank you | Good, thank you | That is kind of you | You are very kind
        Much obliged
        """
    ),
    ("You are welcome.", "You are welcome. Is there anything else I can do for you?"),
)
_GOODBYE: Final = _Topic(
    _prompts(
        """
        Bye | Goodbye | Bye bye | See you | See you later | See you soon | Good night | Farewell
        Have a nice day | That is all, bye | Thanks, bye | Thank you, goodbye | I have to go
        Talk to you later | So long | Until next time
        """
    ),
    ("Goodbye! Have a nice day.", "Goodbye, and see you soon."),
)
_OKAY: Final = _Topic(
    _prompts(
        """
        Ok | Okay | Alright | All right | Fine | Good | Great | Cool | Nice | I see | Sure | Hmm | Well | So
        Right | Okay then | Very good | Understood | Wonderful | Ok, good | Super | Perfect | Amazing
        Awesome | Lovely | Brilliant | Fantastic | Terrific | Yes | No | Maybe | Yeah | Yep | Nope
        Sure thing | Indeed | Of course | Really? | Oh | Wow | Aha | Haha | Interesting | Funny | Correct
        Exactly | Got it | No problem | Sounds good | Whatever | Agreed | Absolutely | Hooray | Oh well
        Not bad | Good enough | Excellent | Splendid | Fair enough
        """
    ),
    ("All right. What can I do for you?", "Okay. How can I help you?"),
)
_REMARKS: Final = _Topic(
    _prompts(
        """
        It is a lovely day. | Today is a busy day. | For now that is all about me. | There is a lot to do.
        You seem to know a lot. | I am new here. | I have a question later. | That is important to me.
        Keep that in mind. | Sorry for the long story. | We have some time. | This is my first visit.
        To be honest, I am in a hurry. | On Monday I was at home. | In the morning I had some tea.
        What a day. | Let us begin. | Well, here we are. | My day was long. | Also, it is cold outside.
        Some things are easy to forget. | It is raining. | The sun is shining. | I like it here.
        Let us talk. | Tell me something. | Say something. | Wait a moment. | Give me a second.
        Let me think. | Just a minute. | This is a test. | Test | I have no idea. | My head hurts.
        I slept badly. | The day is young. | My feet are cold. | I had a long day. | I need a break.
        There is no rush. | My work is done. | I like you. | I love music. | My phone is slow.
        I read a lot. | Never mind. | Hold on, please.
        """
    ),
    ("I see. What can I do for you?", "I see. How can I help you?"),
)
_STATES: Final = _Topic(
    tuple(
        f"{start} {state}."
        for state in _prompts(
            """
            tired | bored | happy | here | back | ready | hungry | thirsty | late | sad | new here
            in a hurry | at home | at work | on my way | fine | well | sorry | excited | busy | lost
            confused | curious | cold | sick | better | awake | sleepy | lonely | done | finished | not sure
            only testing | waiting | listening | still here | just looking | worried | nervous | proud
            angry | glad | so tired | very busy | happy to be here | pleased to hear that | glad to be back
            not in a hurry | up early | afraid of nothing | looking forward to it | only human | all ears
            not from here | on holiday | delighted | glad to be here
            """
        )
        for start in ("I am", "I'm")
    ),
    _REMARKS.replies,
)
_MINE: Final = (
    *("dog", "cat", "sister", "brother", "best friend", "boss", "daughter", "son", "neighbour", "teacher"),
    *("mother", "father", "aunt", "uncle", "doctor", "colleague", "horse", "cousin", "flatmate"),
)
_OF_MINE: Final = _prompts(
    """
    is tired | is asleep | likes music | likes you | is on holiday | is late again | has a cold | is very kind
    is at home | is waiting outside | sends regards | wants to eat | needs a break | is hungry | is ill
    snores | told me about you | is with me | has a question | is not here | went out | works a lot | is funny
    has a birthday soon | has got a new bike | lives next door | sings well | is older than me | is young
    cannot swim | makes me laugh | is happy today
    """
)
_THINGS: Final = (
    *("train", "meeting", "flight", "concert", "dentist", "exam", "interview", "haircut", "wedding", "party"),
    *("team", "car", "room", "locker", "ticket", "seat", "home", "door", "group", "table", "street"),
)
_OF_THINGS: Final = _prompts(
    """
    was late again | was nice | was too long | is important | makes me nervous | was cancelled | is fun
    is new | was expensive | is boring | is old | is not far | is better than expected | costs too much
    was great | could be better | is what I think of | comes first | is over | went well
    """
)
_JOBS: Final = _prompts("teacher | nurse | student | driver | doctor | cook | baker")
_LIKED: Final = _prompts("tea | dogs | cats | trains | parties | numbers | names | cities")
_DONE: Final = _prompts("speak German | like music | sleep | dream | eat | have a dog")
_NEAR_FACTS: Final = _Topic(
    (
        *(f"My {who} {does}." for i, does in enumerate(_OF_MINE[:-1]) for who in _MINE[i % 2 :: 2]),
        *(f"The {what} {does}." for i, does in enumerate(_OF_THINGS[:-1]) for what in _THINGS[i % 2 :: 2]),
        *(f"Do you like my {who}?" for who in _MINE),
        *(f"Have you ever had a {who}?" for who in _MINE),
        *(
            f"I am a {what}."
            for what in _prompts("teacher | nurse | student | driver | doctor | cook | baker")
        ),
        *(
            f"I like {what}."
            for what in _prompts("tea | dogs | cats | trains | parties | numbers | names | cities")
        ),
        *(
            f"Do you {what}?"
            for what in _prompts("speak German | like music | sleep | dream | eat | have a dog")
        ),
        f"My {_MINE[0]} {_OF_MINE[-1]}.",
        f"The {_THINGS[0]} {_OF_THINGS[-1]}.",
    ),
    (
        "I see. What can I do for you?",
        "I see. How can I help you?",
        "That is good to know. What can I do for you?",
    ),
)
"""Sentences with the words of facts that tell nothing that is asked for."""
_GREETINGS: Final = (_HELLO, _HELLO, *map(_day_part, ("morning", "afternoon", "evening")), _HOW_ARE_YOU)
_PASSING: Final = (
    *(_HOW_ARE_YOU, _NICE_TO_MEET, _ABILITIES, _IDENTITY, _OKAY, _REMARKS, _STATES, _THANKS),
    *(_NEAR_FACTS, _NEAR_FACTS),
)
_ALL: Final = (*dict.fromkeys((*_GREETINGS, *_PASSING)), _GOODBYE)
_ADDRESSED: Final = (*_GREETINGS, _THANKS, _GOODBYE)
_ADDRESSES: Final = _prompts(
    """
    assistant | friend | dear | my dear | buddy | mate | computer | machine | you | everybody | everyone
    all | sir | madam | pal | stranger | old friend | robot | helper | dear assistant | dear friend
    you there | my friend | partner
    """
)
_ADDRESS_SHARE: Final = 0.15
_GREETING_SHARE: Final = 0.7  # share of first messages that are small talk
_CASUAL_SHARE: Final = 0.3
_END_MARKS: Final = ("", "", ".", ".", "!", "!", "!!")


def opening(rng: random.Random) -> Exchange:
    """Return a first exchange; usually a greeting."""
    return _exchange(rng, _GREETINGS if rng.random() < _GREETING_SHARE else _PASSING)


def passing(rng: random.Random) -> Exchange:
    """Return an exchange that may stand anywhere."""
    return _exchange(rng, _PASSING)


def closing(rng: random.Random) -> Exchange:
    """Return a last exchange: thanks or a goodbye."""
    return _exchange(rng, (_THANKS, _GOODBYE))


def held_out_prompts() -> list[str]:
    """Return the prompts that training never sees, with an end mark."""
    return [_marked(text, ".") for topic in _ALL for text in held_out_wordings(topic.prompts)]


def training_exchanges() -> Iterator[Exchange]:
    """Yield every training prompt with one of its replies."""
    for topic in _ALL:
        for index, text in enumerate(training_wordings(topic.prompts)):
            yield Exchange(_marked(text, "."), topic.replies[index % len(topic.replies)])


def _exchange(rng: random.Random, topics: tuple[_Topic, ...]) -> Exchange:
    topic = rng.choice(topics)
    text = rng.choice(training_wordings(topic.prompts))
    if topic in _ADDRESSED and not text.endswith((".", "?")) and rng.random() < _ADDRESS_SHARE:
        text = f"{text}, {rng.choice(training_wordings(_ADDRESSES))}"
    text = _marked(text, rng.choice(_END_MARKS))
    return Exchange(perhaps_casual(rng, text, _CASUAL_SHARE), rng.choice(topic.replies))


def _marked(text: str, mark: str) -> str:
    return text if text.endswith((".", "?")) else text + mark


FILLERS: Final = (
    *(_marked(text, ".") for topic in (_REMARKS, _NICE_TO_MEET) for text in training_wordings(topic.prompts)),
    *("How are you?", "Please help me.", "Can you hear me?", "Thanks for your time."),
)
"""Sentences that tell nothing, to stand between those that tell facts."""
