"""Kill processes at random bytes of the wire under load; then look for lost and doubled turns.

    python -m tests.server.faults.kills --num_deaths=200 --seed=0

Three kinds of clients hold dialogues: one retries lost requests as openai's client does, one uses an
Idempotency-Key, one sends once and sometimes leaves. The engine, the front end, or both are killed after a
random number of bytes to or from the engine, and restarted. Prints the outcome and one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sqlite3
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx2
import numpy as np

from pensieve_jax.core.sampling_params import SamplingParams
from tests.deadlines import TIMEOUT_S
from tests.engine.oracles import FakeBench, TurnFacts
from tests.server.faults.served import FaultyServer
from tests.server.faults.worker import FORKS, PlannedKill

_AGAIN = (409, 500, 503)
_PATIENCE_S = 600.0
_MAX_TURNS = 5
_DEATHS_OF_A_RUN = 10
type Kind = Literal["retry", "key", "once"]


@dataclass
class Sent:
    """A turn that a client sent, once or more often; `marker` is its whole text.

    Attributes:
        seen: id and text of the completed response that its client received.
        num_tries: how often it was sent.
    """

    marker: str
    kind: Kind
    conversation: str | None
    seen: tuple[str, str] | None = None
    num_tries: int = 0


@dataclass
class Scene:
    """State that all clients share."""

    server: FaultyServer
    random: random.Random
    sent: list[Sent] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    ending: bool = False

    @property
    def num_seen(self) -> int:
        """Number of turns whose response a client received."""
        return sum(one.seen is not None for one in self.sent)


def plan(draw: random.Random, num_deaths: int) -> list[PlannedKill]:
    """Draw deaths of every kind, early and late."""
    whos: Sequence[Any] = ("engine", "engine", "engine", "front", "both")
    return [
        PlannedKill(
            draw.choice(whos), draw.choice(("in", "out")), draw.randint(1, draw.choice((2500, 6000, 20000)))
        )
        for _ in range(num_deaths)
    ]


class Client:
    """A client that holds one dialogue after the other."""

    def __init__(self, scene: Scene, number: int) -> None:
        self._scene = scene
        self._name = f"client {number}"
        self._kind: Kind = ("retry", "key", "once")[number % 3]  # type: ignore[assignment]
        self._http = httpx2.AsyncClient(timeout=TIMEOUT_S, trust_env=False)
        self._num_sent = 0

    async def run(self) -> None:
        async with self._http:
            while not self._scene.ending:
                await self._dialogue()

    async def _dialogue(self) -> None:
        draw = self._scene.random
        conversation = await self._new_conversation() if draw.random() < 0.5 else None
        previous = None
        for _ in range(draw.randint(1, _MAX_TURNS)):
            self._num_sent += 1
            sent = Sent(f"{self._name} turn {self._num_sent}", self._kind, conversation)
            self._scene.sent.append(sent)
            body = {
                "input": sent.marker,
                "max_output_tokens": draw.randint(1, 60),
                "temperature": draw.choice((0.0, 1.0)),
                "stream": draw.random() < 0.5,
                **({"conversation": conversation} if conversation else {"previous_response_id": previous}),
            }
            await self._send(sent, body)
            if sent.seen is not None:
                previous = sent.seen[0]

    async def _send(self, sent: Sent, body: dict[str, Any]) -> None:
        scene = self._scene
        async with asyncio.timeout(_PATIENCE_S):
            while sent.seen is None:
                headers = {"Idempotency-Key": sent.marker} if sent.kind == "key" else {}
                if sent.kind == "retry" and sent.num_tries:
                    headers["x-stainless-retry-count"] = str(sent.num_tries)
                sent.num_tries += 1
                leaves = sent.kind == "once" and scene.random.random() < 0.3
                try:
                    async with asyncio.timeout(scene.random.random() * 0.3 if leaves else None):
                        sent.seen = await self._try(body, headers)
                except httpx2.TimeoutException as error:
                    raise AssertionError(f"{sent} was not answered: {body}") from error
                except httpx2.TransportError:
                    scene.statuses["connection lost"] += 1
                except TimeoutError:
                    scene.statuses["left"] += 1
                if sent.kind == "once":
                    return
                if sent.seen is None:
                    await asyncio.sleep(0.1)

    async def _try(self, body: dict[str, Any], headers: dict[str, str]) -> tuple[str, str] | None:
        """Return the response's id and text; None if it must be sent again."""
        url = f"{self._scene.server.url}/v1/responses"
        async with self._http.stream("POST", url, json=body, headers=headers) as answer:
            self._scene.statuses[str(answer.status_code)] += 1
            if answer.status_code != 200:
                said = (await answer.aread()).decode()
                assert answer.status_code in _AGAIN, (body, said)
                assert set(json.loads(said)["error"]) == {"message", "type", "param", "code"}, said
                return None
            if not body["stream"]:
                return _seen(json.loads(await answer.aread()))
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if event["type"] in ("response.completed", "response.incomplete"):
                        return _seen(event["response"])
                    if event["type"] == "response.failed":
                        self._scene.statuses["failed in its stream"] += 1
                        return None
        raise httpx2.ReadError("the stream broke off")

    async def _new_conversation(self) -> str:
        """Create a conversation; create another if the first request's outcome is unknown."""
        while True:
            try:
                answer = await self._http.post(f"{self._scene.server.url}/v1/conversations", json={})
            except httpx2.TransportError:
                await asyncio.sleep(0.05)
                continue
            if answer.status_code == 200:
                return str(answer.json()["id"])
            assert answer.status_code in _AGAIN, answer.text
            await asyncio.sleep(0.05)


def _seen(response: dict[str, Any]) -> tuple[str, str]:
    assert response["status"] in ("completed", "incomplete"), response
    return response["id"], response["output"][0]["content"][0]["text"]


async def run(scene: Scene, num_clients: int) -> None:
    """Run clients until every planned death has happened; start and restart the servers.

    All deaths may come before the first turn is sent, so clients continue until as many turns as clients
    completed.
    """
    async with asyncio.TaskGroup() as group:
        for number in range(num_clients):
            group.create_task(Client(scene, number).run())
        while scene.server.num_deaths_left or scene.num_seen < num_clients:
            await asyncio.to_thread(scene.server.revive)
            await asyncio.sleep(0.05)
        scene.ending = True
        while len(group._tasks) > 0:  # the last ones may still be in a dialogue whose front end died
            await asyncio.to_thread(scene.server.revive)
            await asyncio.sleep(0.05)


def check(scene: Scene) -> Counter[str]:
    """Compare the history with what clients received, after the server has ended."""
    counts: Counter[str] = Counter()
    with sqlite3.connect(scene.server.history) as history:
        rows = history.execute(
            "SELECT response_id, turn_id, status, input_items, request FROM responses"
        ).fetchall()
        turns = dict(history.execute("SELECT turn_id, output_text FROM turns"))
        items: dict[str, list[Any]] = defaultdict(list)
        for conversation, item in history.execute(
            "SELECT conversation_id, item FROM items ORDER BY conversation_id, position"
        ):
            items[conversation].append(json.loads(item))
        assert history.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        check_tokens(history)
    by_marker: dict[str, list[str]] = defaultdict(list)
    for response_id, turn_id, status, input_items, _ in rows:
        by_marker[json.loads(input_items)[0]["content"][0]["text"]].append(response_id)
        assert turn_id in turns and status in ("completed", "incomplete"), response_id
    assert sorted(turns) == sorted(row[1] for row in rows), "a turn without a response, or two of one"
    for sent in scene.sent:
        found = by_marker.pop(sent.marker, [])
        assert len(found) <= 1, f"{sent.marker} ({sent.kind}, {sent.num_tries} tries) is there as {found}"
        if sent.seen is not None:
            assert found == [sent.seen[0]], f"{sent.marker}: saw {sent.seen[0]}, history has {found}"
            assert turns[sent.seen[0].removeprefix("resp_")] == sent.seen[1], sent
        counts["seen" if sent.seen else "not seen but there" if found else "not seen and not there"] += 1
        counts["tries"] += sent.num_tries
        assert sent.seen is not None or sent.kind == "once"
    assert not by_marker, f"no client sent {by_marker}"
    _check_items(scene, items, rows, turns)
    return counts


def _check_items(
    scene: Scene, items: dict[str, list[Any]], rows: Sequence[Any], turns: dict[str, str]
) -> None:
    """Check that every conversation has its turns, each once, in the order in which they were sent."""
    texts = {json.loads(row[3])[0]["content"][0]["text"]: turns[row[1]] for row in rows}
    expected: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for sent in scene.sent:
        if sent.conversation is not None and sent.marker in texts:
            expected[sent.conversation] += [("user", sent.marker), ("assistant", texts[sent.marker])]
    for conversation, said in expected.items():
        found = [(item["role"], item["content"][0]["text"]) for item in items.get(conversation, [])]
        assert found == said, f"{conversation} has {found}, not {said}"
    assert set(items) == set(expected)


def check_tokens(history: sqlite3.Connection) -> None:
    """Check each reply against the reference on its path: no turn used another conversation's KV cache."""
    turns = {
        row[0]: row[1:]
        for row in history.execute(
            "SELECT t.turn_id, parent_id, prompt_ids, output_ids, seed, num_tokens, request "
            "FROM turns t JOIN responses r USING (owner, turn_id)"
        )
    }

    def tokens(turn_id: str | None) -> tuple[int, ...]:
        if turn_id is None:
            return ()
        _, prompt, output, *_ = turns[turn_id]
        return (*kept(turn_id), *_ids(prompt), *_ids(output))

    def kept(turn_id: str) -> tuple[int, ...]:
        """Return the tokens before a turn's own; its prompt may have replaced the end of the path."""
        parent, prompt, output, _, num_tokens, _ = turns[turn_id]
        return tokens(parent)[: num_tokens - len(_ids(prompt)) - len(_ids(output))]

    for turn_id, (_, prompt, output, seed, _, request) in turns.items():
        asked = json.loads(request)
        params = SamplingParams(
            max_tokens=asked["max_output_tokens"], temperature=asked["temperature"], seed=seed
        )
        facts = TurnFacts(kept(turn_id), _ids(prompt), params, seed, 2000)
        assert tuple(FakeBench().continuation(facts)) == _ids(output), turn_id


def _ids(blob: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(blob, np.int32).tolist())


def scenario(directory: Path, seed: int, num_deaths: int, num_clients: int = 9) -> dict[str, Any]:
    """Run one scenario from its seed; return figures of what happened."""
    draw = random.Random(seed)
    deaths = plan(draw, num_deaths)
    with FaultyServer(directory, deaths, **{FORKS: ""}) as server:
        server._plan.write_text(server._plan.read_text() + "null\n")
        scene = Scene(server, draw)
        asyncio.run(run(scene, num_clients))
        assert server.close() == 0, server.log[-3000:]
        counts = check(scene)
        assert "Traceback" not in server.log, server.log[-6000:]
        return {
            "seed": seed,
            "deaths": dict(Counter(f"{death.who} {death.way}" for death in deaths)),
            "front_starts": server.num_starts,
            "turns": dict(counts),
            "answers": dict(scene.statuses),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_deaths", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for seed in range(arguments.seed, arguments.seed + -(-arguments.num_deaths // _DEATHS_OF_A_RUN)):
        with tempfile.TemporaryDirectory() as directory:
            figures = scenario(Path(directory), seed, _DEATHS_OF_A_RUN)
        print(json.dumps(figures), flush=True)
        for name in ("deaths", "turns", "answers"):
            totals[name].update(figures[name])
    print(json.dumps({"kills": totals["deaths"].total(), **totals}))


if __name__ == "__main__":
    main()
