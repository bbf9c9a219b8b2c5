"""Turns that are stopped because their client does not read are closed whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.http.ledger import RESOURCES
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.turns.run import run_turns
from tests.server.fakes import FakeEngine, FakeTurn, Harness


def test_the_permit_returns_if_the_request_ends_while_its_turns_are_being_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine may take seconds to cancel a turn, and a second signal ends the server meanwhile."""

    async def scenario() -> None:
        harness = Harness(ROUTES, FakeEngine(), ServerSettings(budgets={"answer_bytes": 1}))
        services, engine = harness.services, harness.engine
        engine.script = None
        cancelling = asyncio.Event()

        async def cancel(turn: FakeTurn) -> None:
            cancelling.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(FakeTurn, "cancel", cancel)

        async def start() -> list[Any]:
            return engine.submit_all([TurnSpec(prompt_token_ids=[1], params=SamplingParams(logprobs=8))])

        running = await run_turns(services, "", start)
        engine.turns[0].feed("a" * 1000)
        running.charge_unread()
        closing = asyncio.ensure_future(running.close())
        await cancelling.wait()
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert services.limits.num_in_engine == 0
        assert all(services.ledger.held(name) == 0 for name in RESOURCES)

    asyncio.run(scenario())
