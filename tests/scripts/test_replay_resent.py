"""Chats that are resent whole find their state; one whose edits are counted finds what it has in common."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from pensieve_jax.workload import ConversationTrace, TurnTrace
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
            await script.Conversation(trace, 0).run(http, replayed)
            Flags.edited = 1.0
            await script.Conversation(trace, 1).run(http, replayed)

    with FaultyServer(tmp_path) as server:
        asyncio.run(replay(server.url))
    assert replayed.turns["first"] == 2 and replayed.turns["resent"] == 3
    assert replayed.turns["edited"] + replayed.turns["regenerated"] == 3
    assert replayed.fraction(["resent"]) == 1.0 and replayed.possible["resent"] > 100
    assert 0 < replayed.fraction(["edited", "regenerated"]) <= 1.0
