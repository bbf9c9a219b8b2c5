"""Two keys guess each other's ids: every route answers as for unknown ids, with the same steps.

Times cannot be asserted on a shared machine, so the tests compare the statements that the history runs and
the calls that the engine gets. `python -m tests.server.test_guessed_ids` measures times.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pensieve_jax.server.http.keys import ApiKeys
from tests.server.fakes import say
from tests.server.stored_server import StoredServer

OWNERS = ("ann", "bob")
ITEMS = [{"role": "user", "content": "x"}]
_DIGITS = re.compile("[0-9a-f]{16,}")


class Guess(NamedTuple):
    """A request with the ids of one owner's objects, by name in braces."""

    method: str
    path: str
    body: dict[str, Any] | None = None


GUESSES = (
    Guess("GET", "/v1/responses/{response}"),
    Guess("GET", "/v1/responses/{response}?stream=true"),
    Guess("GET", "/v1/responses/{response}/input_items"),
    Guess("POST", "/v1/responses/{response}/cancel"),
    Guess("DELETE", "/v1/responses/{response}"),
    Guess("GET", "/v1/conversations/{conversation}"),
    Guess("POST", "/v1/conversations/{conversation}", {"metadata": {}}),
    Guess("DELETE", "/v1/conversations/{conversation}"),
    Guess("GET", "/v1/conversations/{conversation}/items"),
    Guess("POST", "/v1/conversations/{conversation}/items", {"items": ITEMS}),
    Guess("GET", "/v1/conversations/{conversation}/items/{item}"),
    Guess("DELETE", "/v1/conversations/{conversation}/items/{item}"),
    Guess("POST", "/v1/responses", {"input": "and", "previous_response_id": "{response}"}),
    Guess("POST", "/v1/responses", {"input": "and", "conversation": "{conversation}"}),
    Guess("POST", "/v1/responses", {"input": "a", "background": True, "previous_response_id": "{response}"}),
    Guess("POST", "/v1/responses", {"input": [{"type": "item_reference", "id": "{reply}"}]}),
    Guess("POST", "/v1/responses", {"input": [{"type": "item_reference", "id": "{item}"}]}),
    Guess("POST", "/v1/responses/input_tokens", {"input": "x", "previous_response_id": "{response}"}),
    Guess("POST", "/v1/responses/input_tokens", {"input": "x", "conversation": "{conversation}"}),
    Guess("POST", "/v1/completions", {"prompt": "x", "previous_response_id": "cmpl-{turn}"}),
    Guess("POST", "/v1/completions", {"prompt": "x", "previous_response_id": "{response}"}),
    Guess("POST", "/v1/completions", {"prompt": "x", "previous_response_id": "{completion}"}),
    Guess("GET", "/v1/pensieve/trees/{root}"),
    Guess("POST", "/v1/pensieve/trees/{root}", {"title": "Trip"}),
    Guess("GET", "/v1/pensieve/explain?response_id={response}"),
    Guess("GET", "/v1/pensieve/explain?response_id={completion}"),
    Guess("POST", "/v1/pensieve/push_out", {"response_id": "{response}"}),
    Guess("POST", "/v1/pensieve/push_out", {"response_id": "{completion}"}),
    Guess("POST", "/v1/pensieve/forget_state", {"response_id": "{response}"}),
    Guess("POST", "/v1/pensieve/forget_state", {"response_id": "{completion}"}),
)


class GuessTarget:
    """A server with Ann's objects, whose ids Bob guesses.

    Attributes:
        steps: statements of the history and calls of the engine.
        known, unknown: Ann's ids by name, and ids of the same form that never existed.
    """

    def __init__(self, directory: Path) -> None:
        keys = directory / "keys"
        keys.write_text("\n".join(f"{who}:{hashlib.sha256(who.encode()).hexdigest()}" for who in OWNERS))
        self.server = StoredServer(directory / "history.sqlite", say("hello"), keys=ApiKeys(str(keys)))
        self.engine = self.server.engine
        self.steps: list[str] = []
        self.known: dict[str, str] = {}
        self.unknown: dict[str, str] = {}

    async def fill(self) -> None:
        """Create one of each of Ann's objects."""
        response = (await self.ask("ann", Guess("POST", "/v1/responses", {"input": "hi"})))[1]
        conversation = (await self.ask("ann", Guess("POST", "/v1/conversations", {"items": ITEMS})))[1]
        where = f"/v1/conversations/{conversation['id']}/items"
        item = (await self.ask("ann", Guess("GET", where)))[1]["data"][0]["id"]
        completion = (await self.ask("ann", Guess("POST", "/v1/completions", {"prompt": "hi"})))[1]
        self.known = {
            "response": response["id"],
            "turn": response["id"].removeprefix("resp_"),
            "reply": response["output"][0]["id"],
            "conversation": conversation["id"],
            "item": item,
            "completion": completion["id"],  # in memory only
            "root": response["id"].removeprefix("resp_")[:16],
        }
        digits = dict.fromkeys(_DIGITS.search(one)[0] for one in self.known.values())
        never = {one: f"{number:x}" * len(one) for number, one in enumerate(digits)}
        self.unknown = {
            name: _DIGITS.sub(lambda one: never[one[0]], known) for name, known in self.known.items()
        }

    async def ask(self, owner: str, guess: Guess) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {owner}"}
        status, _, raw = await self.server.harness.open(*guess, headers).whole()
        return status, "a stream" if raw.startswith(b"event:") else json.loads(raw)

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Record every statement and every call."""
        (reading,) = self.server.reader._connections._idle  # a single user always gets the same connection
        connections = (reading, self.engine.store._connection)
        for connection in connections:
            connection.set_trace_callback(self.steps.append)
        try:
            yield
        finally:
            assert self.server.reader._connections._idle == [reading]
            for connection in connections:
                connection.set_trace_callback(None)

    def close(self) -> None:
        self.server.close()


def filled(guess: Guess, ids: dict[str, str]) -> Guess:
    path, body = guess.path, json.dumps(guess.body)
    for name, one in ids.items():
        path, body = path.replace(f"{{{name}}}", one), body.replace(f"{{{name}}}", one)
    return Guess(guess.method, path, json.loads(body))


def anonymous(text: str, ids: dict[str, str]) -> str:
    for name, one in ids.items():
        text = text.replace(_DIGITS.search(one)[0], f"<{name}>")
    return text


def test_every_route_with_an_id_is_covered(tmp_path):
    def shape(method: str, path: str) -> tuple[str, str]:
        return method, re.sub(r"{\w+}", "{}", path.partition("?")[0])

    with closing(GuessTarget(tmp_path)) as target:
        routes = {shape(route.method, route.path) for route in target.server.routes if "{" in route.path}
    paths = [(guess.method, guess.path.partition("?")[0]) for guess in GUESSES]
    guessed = {shape(method, path) for method, path in paths if "{" in path}
    of_nobody = {("GET", "/page/{}"), ("GET", "/page/vendor/{}"), ("GET", "/v1/models/{model:path}")}
    assert guessed == routes - of_nobody and of_nobody <= routes


def test_another_owners_id_takes_the_same_steps_as_an_unknown_id(tmp_path):
    async def guess_all(target: GuessTarget) -> None:
        await target.fill()
        for guess in GUESSES:
            told = []
            for ids in (target.known, target.unknown):
                target.steps.clear()
                target.engine.calls.clear()
                num_turns, num_changes = len(target.engine.turns), len(target.engine.changes)
                with target.traced():
                    status, said = await target.ask("bob", filled(guess, ids))
                asked = [anonymous(str(step), ids) for step in (*target.steps, *target.engine.calls)]
                asked += [type(change).__name__ for change in target.engine.changes[num_changes:]]
                asked += ["turn" for _ in target.engine.turns[num_turns:]]
                told.append((status, anonymous(json.dumps(said), ids), asked))
            assert told[0] == told[1], guess
            assert told[0][0] == 404, guess
        for guess in GUESSES:  # they still exist
            if guess.method == "GET":
                assert (await target.ask("ann", filled(guess, target.known)))[0] == 200, guess
        going_on = Guess("POST", "/v1/completions", {"prompt": "x", "previous_response_id": "{completion}"})
        assert (await target.ask("ann", filled(going_on, target.known)))[0] == 200

    with closing(GuessTarget(tmp_path)) as target:
        asyncio.run(guess_all(target))


def p_value(one: list[float], other: list[float]) -> float:
    """Return Mann and Whitney's two-sided p-value: normal approximation, ties at mean ranks."""
    pairs = sorted([(x, 0) for x in one] + [(x, 1) for x in other])
    rank_sum, at = 0.0, 0
    while at < len(pairs):
        end = at
        while end < len(pairs) and pairs[end][0] == pairs[at][0]:
            end += 1
        rank_sum += (at + 1 + end) / 2 * sum(1 for _, which in pairs[at:end] if not which)
        at = end
    n, m = len(one), len(other)
    deviation = rank_sum - n * (n + m + 1) / 2
    return math.erfc(abs(deviation) / math.sqrt(n * m * (n + m + 1) / 12) / math.sqrt(2))


async def measure(target: GuessTarget, num_requests: int) -> list[dict[str, Any]]:
    """Return, per guess, this thread's seconds for another owner's id and an unknown one, and p.

    The requests are sent in random order.
    """
    await target.fill()
    draw, rows = random.Random(0), []
    for guess in GUESSES:
        taken: dict[bool, list[float]] = {True: [], False: []}
        requests = {True: filled(guess, target.known), False: filled(guess, target.unknown)}
        for number in range(2 * num_requests + 50):
            is_known = draw.random() < 0.5
            began_s = time.thread_time()
            await target.ask("bob", requests[is_known])
            if number >= 50:
                taken[is_known].append(time.thread_time() - began_s)
        medians = {is_known: statistics.median(times) * 1e6 for is_known, times in taken.items()}
        rows.append(
            {
                "request": f"{guess.method} {guess.path}",
                "fields": sorted(guess.body or {}),
                "anothers_us": round(medians[True], 2),
                "unknown_us": round(medians[False], 2),
                "p": round(p_value(taken[True], taken[False]), 4),
            }
        )
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, closing(GuessTarget(Path(directory))) as target:
        target.engine.info = replace(target.engine.info)
        rows = asyncio.run(measure(target, int(sys.argv[1]) if len(sys.argv) > 1 else 2000))
        threshold = 0.001 / len(rows)  # one false alarm in a thousand runs, over all requests
        print(json.dumps({"threshold": threshold, "told_apart": [r for r in rows if r["p"] < threshold]}))
