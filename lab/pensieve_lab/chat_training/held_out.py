"""The test's own constructions: sentences that tell or ask in ways that do not occur in training.

Owns: their wordings, for every kind of fact, for two at once and for corrections.
Does not know: values, conversations or models.
Called by `facts`, `questions` and `corrections`.

Apart from the topic, no run of four words of these stands in a training wording (a test checks this). They
were written before any model saw its training sentences, and have not been changed since.
"""

from __future__ import annotations

from typing import Final

TELLS: Final = (
    "Every now and then I mix it up, yet {clause}.",
    "Promise never to lose sight of the fact that {clause}.",
    "No matter what others claim, {clause}.",
    "Chances are someone will want to hear it later: {clause}.",
)
"""Frames around a statement."""
QUESTION_ASKS: Final = (
    "Scroll up a little and you should find {question}; which was it?",
    "Were you paying attention when the subject was {question}?",
    "Pretend that this is a quiz, and the first riddle is {question}.",
    "Out of all that was said, one bit has gone missing: {question}.",
)
TOPIC_ASKS: Final = (
    "Somewhere above there must be {topic}, mustn't there?",
    "Fill in the blank: {topic} equals what?",
    "Rumour has it that {topic} is safe with you. Out with it!",
    "Without {topic} this errand comes to nothing.",
)
JOINT_ASKS: Final = (
    "First comes {first}, then comes {second}: fill in both.",
    "Both {first} as well as {second} seem to be lost on me.",
)
"""Frames around two questions ("what my dog is called") or two names of things ("my dog's name")."""
NAMED_CORRECTIONS: Final = (
    "Scratch what came before concerning {topic}; {{}} it shall be.",
    "Turns out {topic} got mixed up, the right one being {{}}.",
)
BARE_CORRECTIONS: Final = ("Hang on, that came out wrong: {short}.", "Oops, {short} is what belongs there.")
