"""Patterns that stand for thousands of sentences around a fact, and sentences that follow no construction.

Owns: the patterns, and how words of other texts are put around the words that a sentence needs.
Does not know: kinds of facts, held-out wordings, or how often a pattern is drawn.
Called by `facts`, `corrections` and `questions`.

In a pattern "(a|b)" is one of the two. {question} is a question within a sentence ("what my dog is called"),
{topic} a name of what is asked for ("my dog's name"), {clause} a statement. Scraps of other texts around
these words teach a small model to find them wherever they are.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import Final

from pensieve_lab.chat_training.wordings import capitalised

QUESTION_PATTERNS: Final = (
    "(My mother|My father|A friend|The clerk|A stranger|The lady|That man|A nurse|The driver) "
    "(asked|asks|keeps asking|is asking|has just asked) me {question}(.|, so tell me.|. What is it?|. Help!)",
    "(It would be nice|It would help me|I would be happy|I would be glad|It is important) (to know|"
    "to hear|to "
    "learn) {question}.",
    "(Can|Could|Would|Will) you (please |kindly |quickly |)(say|tell me|repeat|confirm|write down|"
    "check|look up|"
    "recall|remind me|explain) {question}(, please|)?",
    "(Please |Kindly |Quickly |Now |Just |)(say|repeat|confirm|write down|check|look up|recall|spell out) "
    "{question}.",
    "(I am|I'm) (curious|wondering|unsure|asking myself|trying to recall|trying to remember|about to forget) "
    "{question}.",
    "(I|We) (would like|want|need|have|wish|hope) to (know|hear|learn|find out|be told|check) {question}.",
    "(Do you|Can you|Could you) (happen to |still |perhaps )(know|recall|remember|say) {question}?",
    "(Is it|Would it be) (possible|okay|fine) to (ask|know|hear) {question}?",
    "(What|And what) about {question}?",
    "(My memory is bad|I have a bad memory|I am so forgetful|My head is empty)(:|.|;) {question}?",
    "(I told|I gave|I have told|I mentioned to) you {question}(, didn't I|, right|)(?|. What was it?|"
    ". Say it.)",
    "(You|Surely you|I hope you|I think you) (know|remember|noted|have heard|wrote down) "
    "{question}(.|, so say "
    "it.|. What was it?|. Tell me.)",
    "{question}? (That is my question|I must know|I need it now|Tell me|It slipped my mind|Answer, please).",
    "(The form|This paper|The man here|The lady at the desk|My boss) wants (me to say|to hear|to be told) "
    "{question}.",
    "(If you|In case you|As you) (know|remember|recall|noted) {question}, (tell me|say so|please say it).",
    "(For the form|For the record|For my notes|To be sure|Once more|To check), {question}?",
    "(There is something I forgot|I have one question|My question is|Let me ask|I ask you): {question}?",
    "(It is|It's) about {question}(.|. Can you help?|: what do you have?)",
    "(Did|Have) (I|we) (say|said|mention|mentioned|tell you|told you) (already |earlier |before |"
    "){question}?",
    "(Nobody|No one here|None of us) (knows|remembers|can say) {question}(, do you?|. Do you?|, but you do.)",
    "{question}, (do you know|can you say|can you tell|do you remember|if I may ask)?",
    "(Prove|Show|Demonstrate) that you (listened|paid attention|remember): {question}?",
)
TOPIC_PATTERNS: Final = (
    "(Can|Could|Would|Will) you (please |kindly |quickly |)(say|tell me|repeat|confirm|write down|"
    "check|look up|"
    "recall|remind me of|spell out|give me) {topic}(, please|)?",
    "(Please |Kindly |Quickly |Now |Just |)(say|repeat|confirm|write down|check|look up|recall|print|"
    "show|name|"
    "mention) {topic}(.|, please.|!)",
    "(I|We) (would like|want|need|have|wish|hope) to (know|hear|see|find out|be told|check|have) {topic}.",
    "(I|We) (cannot|can't|could not) (recall|remember|find|think of|say) {topic}.",
    "(My mother|My father|A friend|The clerk|A stranger|The lady|That man|A nurse|The driver) "
    "(asked|asks|keeps asking|is asking|has just asked) (me for|about|me about) {topic}.",
    "(The form|This paper|The man here|The lady at the desk|My boss) (needs|wants|asks for|requires) "
    "{topic}(.|, "
    "so tell me.|. What is it?)",
    "(I am|I'm) (curious about|unsure about|trying to recall|trying to remember|looking for|about to forget) "
    "{topic}.",
    "(Do you|Can you|Could you) (happen to |still |perhaps )(know|recall|remember|have) {topic}?",
    "(You|Surely you|I hope you|I think you) (know|remember|noted|have|wrote down) {topic}(.|, so "
    "say it.|. What "
    "was it?|. Tell me.)",
    "(My memory is bad|I have a bad memory|I am so forgetful|My head is empty)(:|.|;) {topic}?",
    "{topic}: (do you know it|can you say it|what was it|tell me|say it, please|which one was it)?",
    "(What|How) (did I say|did I tell you|did I mention) (about|regarding|concerning) {topic}?",
    "(It is|It's) about {topic}(.|. Can you help?|: what do you have?)",
    "(For the form|For the record|For my notes|To be sure|Once more|To check), {topic}(?|, please.)",
    "What (is|would be) {topic}(, again|, please|, do you think|)?",
    "(Where|In your notes|In what I said), (what|which) is {topic}?",
    "(Nobody|No one here|None of us) (knows|remembers|has) {topic}(, do you?|. Do you?|, but you do.)",
    "(Prove|Show|Demonstrate) that you (listened|paid attention|remember): {topic}?",
    "(Time|I am ready|It is time) (for|to hear) {topic}.",
    "(Is|Was) there anything about {topic}(| in your notes| in what I said)?",
)
CLAUSE_PATTERNS: Final = (
    "(I|We) (want|would like|need) you to (know|remember|note|hear|keep in mind) that {clause}.",
    "(It is|It's) (good|important|useful|worth it) to (know|remember|note) that {clause}.",
    "(Maybe|Perhaps|Surely) you (know|heard|noticed|can see) that {clause}.",
    "(My mother|My father|A friend|My doctor|Everybody here) (says|thinks|believes|told you) that {clause}.",
    "(As|Since|Because) {clause}, (I am happy|I am here|I ask you to note it|you should know it).",
    "(One|Some|A last|A first) (thing|detail|note|word) (about me|for you|for later|first): {clause}.",
    "(I am|I'm) (happy|glad|proud|pleased|here|writing) to (say|tell you|report|announce) that {clause}.",
    "(Before|While) (we begin|we start|we talk|I forget|you look|we go on), {clause}.",
    "{clause}(, and that matters|, as I said|, believe it or not|, to be exact|, for what it is "
    "worth|, okay).",
    "(Hey|Hello|Okay|So|Well|Look|See), (just to say|to let you know|in short|first of all)(,|:) {clause}.",
)
_SCRAP_WORDS: Final = 5  # largest number on either side
_INNER_WORDS: Final = 3  # largest number between what is told and its value
_BARE_SHARE: Final = 0.3  # share of places for scraps that stay empty
_COMMA_SHARE: Final = 0.3
_WORD: Final = re.compile(r"[a-z]+(?=[ ,.?!;:]|$)")
_NOT_SCRAPS: Final = frozenset(
    (
        *("i", "my", "me", "mine", "our", "we", "us", "you", "your", "name", "named", "call", "called"),
        *("people", "is", "are", "was", "am", "not", "no"),
        *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    )
)


class Scraps:
    """Sequences of words from other texts that tell no facts."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Keep the words of `texts` in lower case, except those with which facts are told."""
        self._words = [word for text in texts for word in _plain_words(text)] or ["so"]

    def draw(self, rng: random.Random, most: int) -> str:
        """Return up to `most` words; often none."""
        if rng.random() < _BARE_SHARE:
            return ""
        start = rng.randrange(len(self._words))
        return " ".join(self._words[start : start + rng.randint(1, most)])

    def around(self, rng: random.Random, text: str) -> str:
        """Return `text` with scraps before and after it."""
        return self._joined(rng, (self.draw(rng, _SCRAP_WORDS), text, self.draw(rng, _SCRAP_WORDS)))

    def telling(self, rng: random.Random, cores: Sequence[str], short: str) -> str:
        """Return the topic and its value (still "{}") in either order, with scraps around and between."""
        parts = [rng.choice(cores), short]
        if rng.random() < 0.5:
            parts.reverse()
        inner = " ".join(part for part in (parts[0], self.draw(rng, _INNER_WORDS), parts[1]) if part)
        return capitalised(self.around(rng, inner)) + rng.choice((".", ".", ".", "!", ""))

    def asking(self, rng: random.Random, core: str) -> str:
        """Return a question's core with scraps around it."""
        return capitalised(self.around(rng, core)) + rng.choice((".", "?", "?", "?", ""))

    @staticmethod
    def _joined(rng: random.Random, parts: Sequence[str]) -> str:
        text = ""
        for part in filter(None, parts):
            comma = "," if rng.random() < _COMMA_SHARE else ""
            text = f"{text}{comma} {part}" if text else part
        return text


def _plain_words(text: str) -> list[str]:
    return [word for word in _WORD.findall(text) if word not in _NOT_SCRAPS]
