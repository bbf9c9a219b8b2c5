"""Replays chats that resend all messages in every turn, and counts the tokens that are reused from the cache.

    python -m pensieve_lab.programs.replay_resent --num_conversations=60

The program starts `pensieve serve`. Lengths are those of the synthetic ShareGPT-like trace, or of `--trace`;
text is made of words. Every turn resends all messages, `--concurrency` conversations at a time. Some turns
edit an earlier reply, or regenerate the last one. The reusable part of a context is what an earlier request
of the conversation had in common with it: after a plain turn everything but the last sampled token, which was
never computed. The report has reused tokens over reusable tokens by kind of turn, and contexts by kind of
match. The last line is one JSON document (see `--json`); the exit status is 1 below `--target`.
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
    """Reusable and reused tokens by kind of turn."""

    def __init__(self) -> None:
        self.possible: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.recomputed: Counter[str] = Counter()
        self.turns: Counter[str] = Counter()

    def count(self, kind: str, possible: int, usage: dict[str, Any]) -> None:
        """Count the answer of a turn."""
        self.turns[kind] += 1
        self.possible[kind] += possible
        # Tokens beyond the reusable ones do not count, even if some match by accident.
        self.found[kind] += min(possible, usage["prompt_tokens_details"]["cached_tokens"])
        self.recomputed[kind] += usage["pensieve"]["recomputed_tokens"]

    def fraction(self, kinds: Sequence[str] = KINDS) -> float:
        """Return reused tokens over reusable tokens."""
        possible = sum(self.possible[kind] for kind in kinds)
        return sum(self.found[kind] for kind in kinds) / possible if possible else 1.0


class Conversation:
    """Messages of one client, and the lengths of their contexts."""

    def __init__(self, trace: ConversationTrace, seed: int) -> None:
        """Use the trace's lengths; `seed` determines words and edits."""
        self._trace = trace
        self._random = random.Random(seed)
        # Without seeds, replies and so the counted contexts would differ from run to run.
        self._reply_seeds = random.Random(f"replies {seed}")
        self._messages: list[dict[str, str]] = []
        # Replies whose contexts are unchanged since they were sent: index, and tokens of the context.
        self._replies: list[tuple[int, int]] = []
        self._num_tokens = 0  # tokens of the latest context with its reply

    async def run(self, http: httpx2.AsyncClient, replayed: Replayed) -> None:
        """Take all turns that fit into the context."""
        for number, turn in enumerate(self._trace.turns):
            kind, possible = self._change() if number else ("first", 0)
            if kind != "regenerated":
                self._messages.append({"role": "user", "content": self._text(turn.prompt_tokens)})
            answer = await http.post("/v1/chat/completions", json=self._body(turn.output_tokens))
            if answer.status_code == 400 and "context_length" in answer.text:
                return
            answer.raise_for_status()
            body = answer.json()
            usage = body["usage"]
            replayed.count(kind, possible, usage)
            self._replies.append((len(self._messages), usage["prompt_tokens"]))
            self._messages.append({"role": "assistant", "content": body["choices"][0]["message"]["content"]})
            self._num_tokens = usage["total_tokens"]

    def _change(self) -> tuple[str, int]:
        """Change the messages as a user would; return the kind and how many context tokens are unchanged."""
        draw = self._random.random()
        if draw >= FLAGS.edited:
            return "resent", self._num_tokens - 1
        if draw < FLAGS.edited / 2:
            self._messages.pop()
            return "regenerated", self._replies.pop()[1] - 1
        index = self._random.randrange(len(self._replies))
        del self._replies[index + 1 :]  # their contexts have changed
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
    """Replay the trace; return reused tokens, and contexts by kind of match."""
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
    """Return the conversations; raises ConfigError and TraceError."""
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
    flags.DEFINE_string("trace", None, "File of lengths or texts; default: the synthetic ShareGPT-like one.")
    flags.DEFINE_string("tokenizer", None, TOKENIZER_HELP)
    flags.DEFINE_integer("num_conversations", 60, "Conversations.")
    flags.DEFINE_integer("concurrency", 8, "Conversations at a time.")
    flags.DEFINE_float("scale", 0.1, "Factor from the trace's tokens to words and to reply tokens.")
    flags.DEFINE_float("edited", 0.05, "Share of turns that edit or regenerate a reply.")
    flags.DEFINE_float("target", 0.95, "Minimum share of reused tokens among reusable ones.")
    flags.DEFINE_integer("data_seed", 0, "Seed of lengths, words and edits.", lower_bound=0)
    flags.DEFINE_string("server_flags", _SERVER, "Flags of `pensieve serve`.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
