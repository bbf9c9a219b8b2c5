"""Places of background responses: together, or one alone, first come, first served."""

from __future__ import annotations

import asyncio
import random

import pytest

from pensieve_jax.server.openai.responses.run_gate import RunGate
from tests.deadlines import TIMEOUT_S
from tests.seeds import new_seed


class Holder:
    """A response that holds a place until it is told to leave it."""

    def __init__(self, gate: RunGate, running: list[Holder], *, alone: bool) -> None:
        self.alone = alone
        self.may_leave = asyncio.Event()
        self.task = asyncio.ensure_future(self._hold(gate, running))

    async def _hold(self, gate: RunGate, running: list[Holder]) -> None:
        async with gate.place(alone=self.alone):
            running.append(self)
            try:
                await self.may_leave.wait()
            finally:
                running.remove(self)


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def test_one_alone_waits_for_the_others_and_is_not_overtaken() -> None:
    async def work() -> None:
        gate, running = RunGate(), []
        first, second = (Holder(gate, running, alone=False) for _ in range(2))
        await settle()
        alone = Holder(gate, running, alone=True)
        await settle()
        late = Holder(gate, running, alone=False)
        await settle()
        assert running == [first, second]
        for held in (first, second):
            held.may_leave.set()
        await settle()
        assert running == [alone]
        alone.may_leave.set()
        await settle()
        assert running == [late]
        late.may_leave.set()
        await settle()

    asyncio.run(work())


@pytest.mark.parametrize("waits", [False, True])
def test_a_cancelled_one_leaves_its_place_to_the_next(waits: bool) -> None:
    async def work() -> None:
        gate, running = RunGate(), []
        first, second, third = (Holder(gate, running, alone=True) for _ in range(3))
        await settle()
        (second if waits else first).task.cancel()
        await settle()
        assert running == [first if waits else second]
        (first if waits else second).may_leave.set()
        await settle()
        assert running == [third]
        third.may_leave.set()
        await settle()

    asyncio.run(work())


def test_a_place_given_in_the_moment_of_a_cancellation_is_passed_on() -> None:
    async def work() -> None:
        gate, running = RunGate(), []
        first, second, third = (Holder(gate, running, alone=True) for _ in range(3))
        await settle()
        first.may_leave.set()
        while running:
            await asyncio.sleep(0)
        second.task.cancel()  # the gate has admitted it, and it has not run since
        await settle()
        assert running == [third]
        third.may_leave.set()
        await settle()
        assert second.task.cancelled()

    asyncio.run(work())


def test_random_lives_leave_an_empty_gate() -> None:
    rng = random.Random(new_seed())

    async def work() -> None:
        gate, running = RunGate(), []
        holders: list[Holder] = []
        for _ in range(3000):
            match rng.randrange(4):
                case 0:
                    holders.append(Holder(gate, running, alone=rng.random() < 0.4))
                case 1 if running:
                    rng.choice(running).may_leave.set()
                case 2 if holders:
                    rng.choice(holders).task.cancel()
                case 3:
                    await asyncio.sleep(0)
            assert len(running) <= 1 or not any(held.alone for held in running)
            holders = [held for held in holders if not held.task.done()]
        for held in holders:
            held.may_leave.set()
        await asyncio.gather(*(held.task for held in holders), return_exceptions=True)
        async with asyncio.timeout(TIMEOUT_S), gate.place(alone=True):
            assert running == []

    asyncio.run(work())
