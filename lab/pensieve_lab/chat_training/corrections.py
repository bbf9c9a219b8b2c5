"""Corrections of a told value: "No, Thursday.", "My dog's name is Rex now, not Miro."

Owns: the wordings, which of them training never sees, and the answers to corrections.
Does not know: where in a conversation a correction stands, tokens or models.
Called by `chat_training.recall` and `recall_cases`.

A bare correction gives only the value, and refers to what was told or answered just before. A named one says
what it is about, and may come at any time. The last two of either list are for the tests; the constructions
of `held_out` are for the tests' last part.
"""

from __future__ import annotations

import random
from typing import Final

from pensieve_lab.chat_training import held_out
from pensieve_lab.chat_training.facts import CASUAL_SHARE, FactKind
from pensieve_lab.chat_training.grammar import Scraps
from pensieve_lab.chat_training.wordings import (
    Wordings,
    capitalised,
    expanded,
    held_out_wordings,
    perhaps_casual,
    training_wordings,
    within_sentence,
)

_BARE: Final = (
    "No, {short}.",
    "No, sorry, {short}.",
    "(Sorry|Pardon|Excuse me|Oh|Ah|Hmm|Oh no|Whoops|Argh), (I mean|I meant|make that|rather|it is|it "
    "should be|"
    "that should be|correctly|better) {short}.",
    "(Actually|Well|Wait|Stop|No no|Not quite|Wrong|Hm|Or|Er), {short}(.|, please.|, I think.|!)",
    "(I meant|I mean|Make that|Make it|Change that to|Change it to|Let us say|I should have said) {short}.",
    "(Correction|Update|My mistake|My error|I was wrong|I misspoke|Not so)(:|,|.) {short}.",
    "(That is|That's|This is) (wrong|not right|a mistake|not correct|false|old)(:|,|. It is|, it is) "
    "{short}.",
    "(Actually|In fact|In truth|Really), (make that|make it|it is|change it to|take) {short}.",
    "{short}(, not what I said.|, I meant.|, sorry.|, actually.|, to be correct.|, that is.)",
    "(Please|Can you|Could you) (change|correct|update|set) (it|that) to {short}(.|, please.)",
    "No, it is {short}.",
    "No, make it {short}.",
    "I meant to say {short}.",
)
_NAMED: Final = (
    "(Correction|Update|News|Sorry|Oh|Wait|My mistake)(:|,) {topic} is {{}}(.| now.|, not {{old}}.)",
    "(Actually|In fact|Well|As of now|By now|From now on), {topic} is {{}}(.| now.|, not {{old}}.)",
    "I was wrong about {topic}(: it is|. It is|, which is) {{}}.",
    "(Please |)(change|correct|update|set) {topic} to {{}}(.|, please.)",
    "{topic} is {{}}(, not {{old}}.| instead of {{old}}.| now.| instead.| after all.)",
    "{topic} (has changed|is different now|was wrong|is not {{old}})(: it is|. It is|, but|, it is) {{}}.",
    "(About|As to|Concerning|Regarding) {topic}: (it is {{}} now|make that {{}}|not {{old}} but {{}}|"
    "I meant {{}}).",
    "(Forget|Never mind|Ignore) {{old}}(, |: |. ){topic} is {{}}.",
    "(It is|It's) not {{old}}, (it is|but|it's) {{}}(.|, {topic}.|: {topic}.)",
    "Not {{old}}(, but| but|, rather|, no,) {{}}(: {topic}.|, that is {topic}.|, I mean {topic}.)",
    "I gave you the wrong answer for {topic}(:|,) {{}}.",
    "When I said {{old}} I meant {{}}.",
    "{topic} has changed to {{}}.",
    "I made a mistake with {topic}: it is {{}}.",
)
_WITHIN: Final = (
    "{old}, no, {new}",
    "{old}, sorry, {new}",
    "{old}, I mean {new}",
    "{old}, or rather {new}",
    "{old}, no wait, {new}",
    "not {old} but {new}",
    "{new}, not {old},",
    "{new} instead of {old}",
)
_AGAIN_SHARE: Final = 0.2  # share of named corrections that tell the value as if for the first time
_SCRAPS_SHARE: Final = 0.15  # share of corrections of either sort that follow no construction at all
_ACKNOWLEDGEMENTS: Final = ("All right, {}", "Okay, {}", "Thank you for the correction: {}", "Noted: {}")


def within(rng: random.Random, old: str, new: str) -> str:
    """Return a value that is corrected in the sentence that tells it."""
    return rng.choice(_WITHIN).format(old=old, new=new)


def bare(rng: random.Random, kind: FactKind, new: str, wordings: Wordings, scraps: Scraps) -> str:
    """Return a message that contains only the new value."""
    short = rng.choice(kind.short)
    if wordings is Wordings.TRAINING:
        if rng.random() < _SCRAPS_SHARE:
            return scraps.asking(rng, short).rstrip("?").format(new)
        text = expanded(rng, rng.choice(training_wordings(_BARE)))
        return perhaps_casual(rng, capitalised(text.format(short=short)), CASUAL_SHARE).format(new)
    if wordings is Wordings.NEW_SENTENCES:
        return rng.choice(held_out_wordings(_BARE)).format(short=kind.short[0]).format(new)
    return capitalised(rng.choice(held_out.BARE_CORRECTIONS).format(short=kind.short[0])).format(new)


def named(rng: random.Random, kind: FactKind, old: str, new: str, wordings: Wordings, scraps: Scraps) -> str:
    """Return a message that names what is corrected."""
    if wordings is Wordings.TRAINING:
        if rng.random() < _AGAIN_SHARE:
            return kind.telling(rng, new, wordings, scraps)
        if rng.random() < _SCRAPS_SHARE:
            return scraps.telling(rng, kind.topics, rng.choice(kind.short)).format(new)
        text = expanded(rng, rng.choice(training_wordings(_NAMED))).format(topic=rng.choice(kind.topics))
        return perhaps_casual(rng, capitalised(text), CASUAL_SHARE).format(new, old=old)
    if wordings is Wordings.NEW_SENTENCES:
        text = rng.choice(held_out_wordings(_NAMED))
    else:
        text = rng.choice(held_out.NAMED_CORRECTIONS)
    return capitalised(text.format(topic=kind.topics[0])).format(new, old=old)


def acknowledged(rng: random.Random, answer: str) -> str:
    """Return the reply to a correction; `answer` gives the current value."""
    return rng.choice(_ACKNOWLEDGEMENTS).format(within_sentence(answer))


def training_texts(kind: FactKind) -> list[str]:
    """Return the corrections of the training part for one kind, without their values."""
    rng = random.Random(0)
    patterns = (*training_wordings(_BARE), *training_wordings(_NAMED))
    texts = [expanded(rng, pattern).format(topic=kind.topics[0], short="{}") for pattern in patterns]
    return [text.replace("{}", "").replace("{old}", "") for text in texts]
