"""Reports of turns that were submitted together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from pensieve_jax.server.replicas.replica import _Batch
from tests.deadlines import TIMEOUT_S


class Turn:
    """A turn without any output."""

    is_cancelled = False

    async def accepted(self) -> None:
        pass

    async def cancel(self) -> None:
        self.is_cancelled = True

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        await asyncio.get_running_loop().create_future()


def test_closed_turns_are_reported_at_once():
    """Reports of more output would wait for an hour."""

    async def work() -> None:
        batch, turn = _Batch(3600.0), Turn()
        spec: Any = SimpleNamespace(num_new_tokens=7)
        turns: Any = [turn]
        batch.follow([5], [spec], turns)
        reports = batch.reports()
        async with asyncio.timeout(TIMEOUT_S):
            assert (await anext(reports)).accepted == [5]
            assert batch.queued_tokens == 7
            await batch.close()
            assert turn.is_cancelled and batch.is_closed and not batch.queued_tokens
            assert not (await anext(reports)).endings
            assert await anext(reports, None) is None

    asyncio.run(work())
