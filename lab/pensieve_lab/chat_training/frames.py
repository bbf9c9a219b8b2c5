"""Sentence frames that fit any kind of fact, so that constructions need no list for each kind.

Owns: what may stand before, after and within a sentence that tells something. Also owns the sentences that
tell or ask for a thing by its name ("my dog's name") or as a question ("what my dog is called"); two of these
are held out from training.
Does not know: kinds of facts, or how often a frame is drawn.
Called by `facts`.

Without a matching frame, a model takes a sentence for small talk, or its first word for a name. There are
many imperatives, since no other sentences are built like them.
"""

from __future__ import annotations

from typing import Final

ASIDE_MARK: Final = "~"
ASIDES: Final = (
    ", as it happens,",
    ", you see,",
    ", of course,",
    ", in fact,",
    ", if you care to know,",
    ", so to speak,",
    ", as you may know,",
    ", I should add,",
    ", I think,",
    ", by the way,",
    ", for your information,",
    " actually",
    " now",
)
LEADS: Final = (
    "By the way, ",
    "Just so you know, ",
    "Oh, and ",
    "Also, ",
    "Actually, ",
    "Before I forget, ",
    "And ",
    "Well, ",
    "Please remember: ",
    "As you may know, ",
    "For your information, ",
    "For your notes, ",
    "There is something to note: ",
    "To begin with, ",
    "Another thing: ",
    "You see, ",
)
TAILS: Final = (
    ", by the way.",
    ", just so you know.",
    ", if you need it.",
    ", in case I ask.",
    ". Please remember that.",
    ", you know.",
    "!",
)
CLAUSE_FRAMES: Final = (
    "Remember that {clause}.",
    "Please remember that {clause}.",
    "Note that {clause}.",
    "Do not forget that {clause}.",
    "Don't forget that {clause}.",
    "Keep in mind that {clause}.",
    "Bear in mind that {clause}.",
    "Make a note that {clause}.",
    "Write down that {clause}.",
    "Take note: {clause}.",
    "Listen: {clause}.",
    "Look, {clause}.",
    "Imagine, {clause}.",
    "Guess what, {clause}.",
    "Let me tell you that {clause}.",
    "Let me add that {clause}.",
    "Do me a favour and remember that {clause}.",
    "Be so kind as to note that {clause}.",
    "You should know that {clause}.",
    "I should mention that {clause}.",
    "Today I can tell you that {clause}.",
    "It may help that {clause}.",
    "I want you to remember that {clause}.",
    "I forgot to say that {clause}.",
    "What matters is that {clause}.",
    "The thing is that {clause}.",
    "If anybody asks, {clause}.",
    "Did you know that {clause}?",
    "Did I mention that {clause}?",
    "Have I told you that {clause}?",
    "Could you remember that {clause}?",
    "Will you please note that {clause}?",
)
"""Frames around a statement."""
CLAUSE_STARTS: Final = ("My ", "The ", "I ", "I'm ", "We ", "They ", "There ", "{}")
"""Beginnings of wordings that are statements."""
TOPIC_TELLS: Final = (
    "Remember {topic}: {{}}.",
    "Write down {topic}: {{}}.",
    "Note {topic}: {{}}.",
    "Save {topic}, it is {{}}.",
    "Store {{}} as {topic}.",
    "Learn {topic} by heart: {{}}.",
    "Never forget {topic}: {{}}.",
    "Take down {topic}, {{}}.",
    "Guess {topic}: it is {{}}.",
    "Let me give you {topic}: {{}}.",
    "Here is {topic}: {{}}.",
    "When I ask for {topic}, say {{}}.",
    "If I ask you for {topic}, answer {{}}.",
    "About {topic}: it is {{}}.",
    "As to {topic}, it is {{}}.",
    "{{}}: that is {topic}.",
    "{topic}? It is {{}}.",
    "{topic}: {{}}.",
    "I want you to know {topic}: {{}}.",
    "Could you remember {topic} for me? It is {{}}.",
    "Would you note {topic}, please? {{}}.",
)
"""Frames around what is told, by its name."""
QUESTION_ASKS: Final = (
    "Remind me {question}.",
    "Please remind me {question}.",
    "Tell me {question}.",
    "Tell me again {question}.",
    "Please say {question}.",
    "Let me know {question}.",
    "Show me that you know {question}.",
    "Try to remember {question}.",
    "Think back and tell me {question}.",
    "Check your notes and say {question}.",
    "I forgot {question}.",
    "I have forgotten {question}.",
    "I would like to know {question}.",
    "I wonder {question}.",
    "I cannot remember {question}.",
    "I am not sure {question}.",
    "Could you remind me {question}?",
    "Would you tell me {question}?",
    "Will you tell me {question}, please?",
    "Any idea {question}?",
    "You know {question}, right?",
    "You surely know {question}.",
    "Let us see whether you know {question}.",
    "Have I told you {question}?",
    "Do you still know {question}?",
)
TOPIC_ASKS: Final = (
    "Remind me of {topic}.",
    "Tell me {topic}.",
    "Tell me {topic} again, please.",
    "Give me {topic}.",
    "Repeat {topic}.",
    "Repeat {topic} for me, please.",
    "Say {topic} again.",
    "Recall {topic}.",
    "State {topic}.",
    "Look up {topic}.",
    "Write {topic} here.",
    "Read {topic} to me.",
    "Let me hear {topic}.",
    "Find {topic} in what I said.",
    "{topic}, please.",
    "{topic}?",
    "And {topic}?",
    "What about {topic}?",
    "I need {topic}.",
    "I need {topic} again.",
    "I forgot {topic}.",
    "Now back to {topic}.",
    "Could I have {topic}, please?",
    "May I hear {topic} again?",
    "Do you still have {topic}?",
    "Have you got {topic}?",
)
HELD_OUT_QUESTION_ASK: Final = "Suppose somebody wants to know {question}. What do you answer?"
HELD_OUT_TOPIC_ASK: Final = "{topic} has escaped me, so please help me out."
