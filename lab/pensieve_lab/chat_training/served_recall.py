"""Recall as the engine serves it: many conversations tell facts first and ask for them last.

Owns: the built-in talk for runs without dialogues, the order of turns, and the figures; also greetings
without any history.
Does not know: how large the tiers are, or what share must be right.
Called by `programs.check_recall`.

The user's side of the talk is fixed, and the model's own replies stand in the history. Conversations
alternate turn by turn, so that between two turns of one all others compete for its memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from tqdm import tqdm

from pensieve_jax import LLM, Output, SamplingParams, Usage
from pensieve_lab.chat_training.data import Conversation, Exchange
from pensieve_lab.chat_training.questions import gives_a_fact
from pensieve_lab.chat_training.recall_cases import RecallCase, percent_by_kind
from pensieve_lab.chat_training.small_talk import held_out_prompts

_AT_ONCE: Final = 64  # conversations that alternate; the next ones begin when these have ended
_PARAMS: Final = SamplingParams(max_tokens=48)
_TALKS: Final = """
I am looking for a restaurant in Oakland. | Something Mexican. | Is it expensive? | A table for four.
Can you find me a song? | I like jazz. | Who sings it? | Do you have something newer? | Play it, please.
I want to fly to Seattle. | From Denver. | How much is it? | Is there an earlier one? | Book it.
What is the weather like in San Jose? | And tomorrow? | Will it rain? | How strong is the wind? | Thank you.
I need a bus to Fresno. | On March 9th, from Anaheim. | One ticket. | The price? | That is fine.
Find me a movie for tonight. | I like comedies. | Where is it shown? | What time does it start? | Two tickets.
I would like a hotel in London. | For three nights. | Does it have wifi? | What is the address? | Book it.
I need a dentist in Berkeley. | What is their phone number? | Can I come on Monday? | At 10 am. | Yes.
What is my account balance? | The savings account. | Send 50 dollars to Kim. | From checking. | Yes, do that.
Get me a cab to the airport. | For two people. | A shared one is fine. | How long is it? | Great, thanks.
Are there any concerts in New York? | Something with rock. | When does it begin? | Where is it? | One ticket.
I am looking for an apartment in Napa. | Two bedrooms. | May I have pets there? | What is the rent? | Thanks.
"""
GREETINGS: Final = (
    *("Hi", "Hello!", "hello", "Hey there", "Good morning", "good evening", "How are you?", "Thanks.", "ok"),
    *("What can you do?", "Who are you?", "What is your name?", "It is raining.", "Bye!"),
    *held_out_prompts(),
)
"""Messages that tell and ask nothing; training has some of them."""


class GreetingReplies(NamedTuple):
    """Greetings and their replies."""

    replies: Sequence[tuple[str, str]]

    @property
    def invented(self) -> list[tuple[str, str]]:
        """Exchanges whose reply states a fact, although none was told."""
        return [(greeting, reply) for greeting, reply in self.replies if gives_a_fact(reply)]


class ServedCases(NamedTuple):
    """Results of the cases: the outputs of each; the last one answers its question.

    `histories` are all tokens of each conversation at the end.
    """

    cases: Sequence[RecallCase]
    outputs: Sequence[Sequence[Output]]
    histories: Sequence[Sequence[int]]

    @property
    def recall_percent(self) -> float:
        """Percentage of right answers."""
        return 100 * sum(self._right()) / len(self.cases)

    @property
    def recall_by_kind(self) -> dict[str, tuple[float, int]]:
        """Percentage of right answers and number of cases, for each kind of question."""
        return percent_by_kind(self.cases, [outputs[-1].text for outputs in self.outputs])

    @property
    def wrong(self) -> list[tuple[RecallCase, str]]:
        """Cases with a wrong answer, and that answer."""
        pairs = zip(self.cases, self.outputs, self._right(), strict=True)
        return [(case, outputs[-1].text) for case, outputs, is_right in pairs if not is_right]

    @property
    def returns(self) -> list[Usage]:
        """Sources of the tokens of every turn after a conversation's first."""
        return [output.usage for outputs in self.outputs for output in outputs[1:]]

    def transcripts(self, number: int) -> Iterator[str]:
        """Yield the first conversations in Markdown, each with its kind and verdict."""
        served = zip(self.cases, self.outputs, self._right(), strict=True)
        for index, (case, outputs, is_right) in enumerate(itertools.islice(served, number)):
            verdict = "right" if is_right else f"wrong: told was {' and '.join(case.values)}"
            said = [*(turn.user for turn in case.history.exchanges), case.question]
            lines = [f"**Case {index}, {case.kind}**: {verdict}", ""]
            for user, output in zip(said, outputs, strict=True):
                reply = " ".join(output.text.split())
                lines += [f"> {' '.join(user.split())}  ", f"> **{reply}**  "]
            yield "\n".join([*lines, ""])

    def _right(self) -> Iterator[bool]:
        for case, outputs in zip(self.cases, self.outputs, strict=True):
            yield case.is_right(outputs[-1].text)


def written_talks() -> list[Conversation]:
    """Return the built-in talk; its replies are empty, because the model writes them."""
    return [
        Conversation(tuple(Exchange(text, "") for text in line.split(" | ")))
        for line in _TALKS.strip().splitlines()
    ]


def serve_cases(
    llm: LLM, cases: Sequence[RecallCase], *, with_history: bool = True, progress: bool = False
) -> ServedCases:
    """Serve the cases with their history, or only their questions; ends the conversations afterwards."""
    scripts = [
        [*(turn.user for turn in case.history.exchanges if with_history), case.question] for case in cases
    ]
    with tqdm(total=sum(map(len, scripts)), unit="turn", disable=not progress, leave=False) as bar:
        outputs, histories = zip(*_serve(llm, scripts, bar), strict=True)
        return ServedCases(cases, outputs, histories)


def serve_greetings(llm: LLM) -> GreetingReplies:
    """Serve each of `GREETINGS` as the only message of a conversation."""
    with tqdm(disable=True) as bar:
        outputs = _serve(llm, [[greeting] for greeting in GREETINGS], bar)
    replies = [output.text for [output], _ in outputs]
    return GreetingReplies(list(zip(GREETINGS, replies, strict=True)))


def _serve(llm: LLM, scripts: Sequence[Sequence[str]], bar: tqdm) -> list[tuple[list[Output], list[int]]]:
    """Return the outputs and the tokens of every conversation; up to `_AT_ONCE` of them alternate."""
    batches = itertools.batched(scripts, _AT_ONCE)
    return [found for some in batches for found in _take_turns(llm, some, bar)]


def _take_turns(
    llm: LLM, scripts: Sequence[Sequence[str]], bar: tqdm
) -> list[tuple[list[Output], list[int]]]:
    """Serve one turn of every conversation, then the next one of each."""
    outputs: list[list[Output]] = [[] for _ in scripts]
    names = [f"recall {index}" for index in range(len(scripts))]
    for turn in range(max(map(len, scripts))):
        streams = {
            i: llm.stream_chat([{"role": "user", "content": script[turn]}], _PARAMS, conversation_id=names[i])
            for i, script in enumerate(scripts)
            if turn < len(script)
        }
        for i, stream in streams.items():
            for _ in stream:
                pass
            assert stream.output is not None
            outputs[i].append(stream.output)
            bar.update()
    histories: list[list[int]] = [llm.history(name).token_ids.tolist() for name in names]
    for name in names:
        llm.end(name)
    return list(zip(outputs, histories, strict=True))
