"""Replay chats that are resent whole every turn, and count what of them is found in state.

    python -m pensieve_lab.programs.replay_resent --num_conversations=60

Starts `pensieve serve`. Lengths are of the synthetic ShareGPT-like trace, or of `--trace`; text is made of
words. Every turn sends all messages again, `--concurrency` conversations at a time; a part of the turns edits
an earlier reply, or asks for the last reply once more. What could be found of a context is what an earlier
request of the conversation had in common with it: after a plain turn everything but the last sampled token,
which was never computed. Reported: tokens found in state over tokens that could be found, by what was done,
and contexts by what they were matched with. The last line is one JSON document (see `--json`); the exit
status is 1 below `--target`.
"""

from __future__ import annotations

import asyncio
import random
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx2
from absl import flags

from pensieve_jax import PensieveError
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table
from pensieve_lab.common.trace_files import TOKENIZER_HELP, read_trace_file
from pensieve_lab.serving.served import ServedProcess
from pensieve_lab.workload import SHAREGPT, ConversationTrace, Trace, generate_trace

FLAGS = flags.FLAGS
_SERVER = "--model=chat --gpu_pages=1500 --max_num_running=8 --token_buckets=8,256"
_SENTENCE = "i am looking for a place to eat in san jose something cheap italian please is there one near"
_MATCH = re.compile(r'^pensieve:context_match_total\{kind="(\w+)".*\} (\d+)', re.MULTILINE)
_PATIENCE_S = 600.0
KINDS = ("resent", "edited", "regenerated")


class Replayed:
    """Tokens by what a turn did: that could be found, and that were."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.possible: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.recomputed: Counter[str] = Counter()
        self.turns: Counter[str] = Counter()

    def count(self, kind: str, possible: int, usage: dict[str, Any]) -> None:
        """A turn's answer."""
        self.turns[kind] += 1
        self.possible[kind] += possible
        # Of what could not be found nothing counts, should there be more by accident.
        self.found[kind] += min(possible, usage["prompt_tokens_details"]["cached_tokens"])
        self.recomputed[kind] += usage["pensieve"]["recomputed_tokens"]

    def fraction(self, kinds: Sequence[str] = KINDS) -> float:
        """Of what could be found."""
        possible = sum(self.possible[kind] for kind in kinds)
        return sum(self.found[kind] for kind in kinds) / possible if possible else 1.0


class Conversation:
    """One client's messages, and how long their contexts were."""

    def __init__(self, trace: ConversationTrace, seed: int) -> None:
        """Of these lengths; `seed` is of words and edits."""
        self._trace = trace
        self._random = random.Random(seed)
        # Without seeds, replies differ from run to run, and with them the contexts that are counted.
        self._reply_seeds = random.Random(f"replies {seed}")
        self._messages: list[dict[str, str]] = []
        # Of replies behind contexts that are as they were sent: place, and tokens of the context.
        self._replies: list[tuple[int, int]] = []
        self._num_tokens = 0  # of the latest context with its reply

    async def run(self, http: httpx2.AsyncClient, replayed: Replayed) -> None:
        """All turns that fit into the context."""
        for number, turn in enumerate(self._trace.turns):
            kind, possible = self._change() if number else ("first", 0)
            if kind != "regenerated":
                self._messages.append({"role": "user", "content": self._text(turn.prompt_tokens)})
            answer = await http.post("/v1/chat/completions", json=self._body(turn.output_tokens))
            if answer.status_code == 400 and "context_length" in answer.text:
                return
            answer.raise_for_status()
            said = answer.json()
            usage = said["usage"]
            replayed.count(kind, possible, usage)
            self._replies.append((len(self._messages), usage["prompt_tokens"]))
            self._messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
            self._num_tokens = usage["total_tokens"]

    def _change(self) -> tuple[str, int]:
        """What the user does with what was said, and how much of the context is as it was."""
        draw = self._random.random()
        if draw >= FLAGS.edited:
            return "resent", self._num_tokens - 1
        if draw < FLAGS.edited / 2:
            self._messages.pop()
            return "regenerated", self._replies.pop()[1] - 1
        index = self._random.randrange(len(self._replies))
        del self._replies[index + 1 :]  # their contexts are others now
        place, num_tokens = self._replies[index]
        self._messages[place] = {"role": "assistant", "content": self._text(12)}
        return "edited", num_tokens

    def _text(self, num_tokens: int) -> str:
        return " ".join(self._random.choices(_SENTENCE.split(), k=max(1, int(num_tokens * FLAGS.scale))))

    def _body(self, output_tokens: int) -> dict[str, Any]:
        num_tokens = max(1, int(output_tokens * FLAGS.scale))
        return {
            "messages": self._messages,
            "max_tokens": num_tokens,
            "temperature": 1,
            "seed": self._reply_seeds.getrandbits(63),
            "stream": False,
        }


async def replay(address: str, trace: Trace) -> tuple[Replayed, dict[str, int]]:
    """Everything once; what was found, and contexts by kind of match."""
    replayed, places = Replayed(), asyncio.Semaphore(FLAGS.concurrency)
    async with httpx2.AsyncClient(base_url=address, timeout=_PATIENCE_S, trust_env=False) as http:

        async def one(number: int, conversation: ConversationTrace) -> None:
            async with places:
                await Conversation(conversation, FLAGS.data_seed + number).run(http, replayed)

        async with asyncio.TaskGroup() as group:
            for number, conversation in enumerate(trace.conversations):
                group.create_task(one(number, conversation))
        metrics = (await http.get("/metrics")).text
    return replayed, {kind: int(count) for kind, count in _MATCH.findall(metrics)}


def read_trace() -> Trace:
    """The conversations; raises ConfigError and TraceError."""
    if FLAGS.trace is None:
        return generate_trace(SHAREGPT, num_conversations=FLAGS.num_conversations, seed=FLAGS.data_seed)
    trace, _ = read_trace_file(FLAGS.trace, None, FLAGS.tokenizer)
    several = [one for one in trace.conversations if len(one.turns) > 1]
    return Trace(trace.name, tuple(several[: FLAGS.num_conversations]))


def main() -> int:
    trace = read_trace()
    with ServedProcess(shlex.split(FLAGS.server_flags)) as server:
        replayed, matches = asyncio.run(replay(server.address, trace))
    columns = ["turns", "number", "could be found", "found", "recomputed", "%"]
    rows = [
        [
            *(kind, replayed.turns[kind], replayed.possible[kind], replayed.found[kind]),
            *(replayed.recomputed[kind], round(100 * replayed.fraction([kind]), 2)),
        ]
        for kind in ("first", *KINDS)
    ]
    print(table(columns, rows))
    print(f"contexts by match: {matches}")
    fraction = replayed.fraction()
    results = {
        "trace": trace.name,
        "turns": dict(replayed.turns),
        "possible_tokens": dict(replayed.possible),
        "found_tokens": dict(replayed.found),
        "recomputed_tokens": dict(replayed.recomputed),
        "found_fraction": round(fraction, 5),
        "matches": matches,
        "target": FLAGS.target,
    }
    print_document(json_line("replay_resent", results, units={"tokens": "tokens"}, device="cpu"))
    if not matches:
        raise PensieveError("The server counts no matches.")
    return EXIT_FAILED if fraction < FLAGS.target else 0


def define_flags() -> None:
    """The command line."""
    flags.DEFINE_string("trace", None, "File of lengths or texts; default: the synthetic ShareGPT-like one.")
    flags.DEFINE_string("tokenizer", None, TOKENIZER_HELP)
    flags.DEFINE_integer("num_conversations", 60, "Conversations.")
    flags.DEFINE_integer("concurrency", 8, "Conversations at a time.")
    flags.DEFINE_float("scale", 0.1, "Words for a token of the trace, and tokens of replies.")
    flags.DEFINE_float("edited", 0.05, "Part of the turns that edits a reply or asks for it once more.")
    flags.DEFINE_float("target", 0.95, "Least part of the tokens that could be found.")
    flags.DEFINE_integer("data_seed", 0, "Of lengths, words and edits.", lower_bound=0)
    flags.DEFINE_string("server_flags", _SERVER, "Of `pensieve serve`.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
