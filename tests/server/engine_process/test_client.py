"""The connection to an engine process when it is lost; no process runs."""

from __future__ import annotations

import asyncio
import gc
import itertools

import pytest

from pensieve_jax.core.errors import EngineDiedError
from pensieve_jax.server.engine_process.client import EngineConnection
from pensieve_jax.server.engine_process.messages import Failed, sent_error


def test_a_lost_connection_fails_its_opening_and_reports_nothing_else():
    """The error is not reported as one that was never retrieved."""

    async def work() -> None:
        problems: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        connection = EngineConnection(itertools.count())
        opening = connection.opening
        connection.connection_lost(None)
        assert connection.lost.is_set()
        del connection, opening
        gc.collect()
        assert not problems

    asyncio.run(work())


def test_the_first_of_the_opening_messages_and_the_loss_counts():
    async def work() -> None:
        connection = EngineConnection(itertools.count())
        connection.connection_lost(None)
        with pytest.raises(EngineDiedError):
            await connection.opening
        other = EngineConnection(itertools.count())
        failed = Failed(sent_error(EngineDiedError("planted")))
        other._receive(failed)
        other._receive(Failed(sent_error(EngineDiedError("later"))))
        other.connection_lost(None)
        assert await other.opening == failed.error

    asyncio.run(work())
