"""Chats that are resent whole reuse their KV cache; an edited chat reuses the common prefix."""

from __future__ import annotations

import asyncio
import json

import httpx2
import pytest

from pensieve_lab.workload import ConversationTrace, TurnTrace
from tests.launching import load
from tests.server.faults.served import FaultyServer


@pytest.mark.long
def test_resent_chats_are_found(tmp_path, monkeypatch):
    script = load("replay_resent")

    class Flags:
        edited, scale = 0.0, 1.0

    monkeypatch.setattr(script, "FLAGS", Flags)
    trace = ConversationTrace("one", tuple(TurnTrace(6, 12) for _ in range(4)))
    replayed = script.Replayed()

    async def replay(url: str) -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as http:
            # Of the seeds 0 to 7, a random model's reply is not found again with 0 and 4.
            await script.Conversation(trace, 2).run(http, replayed)
            Flags.edited = 1.0
            await script.Conversation(trace, 1).run(http, replayed)

    with FaultyServer(tmp_path) as server:
        asyncio.run(replay(server.url))
    assert replayed.turns["first"] == 2 and replayed.turns["resent"] == 3
    assert replayed.turns["edited"] + replayed.turns["regenerated"] == 3
    assert replayed.fraction(["resent"]) == 1.0 and replayed.possible["resent"] > 100
    assert 0 < replayed.fraction(["edited", "regenerated"]) <= 1.0


def test_each_turn_is_sampled_with_a_seed_of_its_own_that_is_the_same_in_every_run(monkeypatch):
    script = load("replay_resent")

    class Flags:
        edited, scale = 0.0, 1.0

    monkeypatch.setattr(script, "FLAGS", Flags)
    trace = ConversationTrace("one", tuple(TurnTrace(6, 12) for _ in range(3)))

    def seeds(conversation_seed: int) -> list[int]:
        sent = []

        def answer(request: httpx2.Request) -> httpx2.Response:
            sent.append(json.loads(request.content)["seed"])
            usage = {"prompt_tokens": 6, "total_tokens": 18, "prompt_tokens_details": {"cached_tokens": 0}}
            usage["pensieve"] = {"recomputed_tokens": 0}
            return httpx2.Response(200, json={"usage": usage, "choices": [{"message": {"content": "yes"}}]})

        async def replay() -> None:
            transport = httpx2.MockTransport(answer)
            async with httpx2.AsyncClient(base_url="http://server", transport=transport) as http:
                await script.Conversation(trace, conversation_seed).run(http, script.Replayed())

        asyncio.run(replay())
        return sent

    first = seeds(0)
    assert len(set(first)) == 3 and seeds(0) == first
    assert not set(seeds(1)) & set(first)
