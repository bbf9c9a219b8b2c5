"""A background response is brought to its end.

Owns: that its turn runs on as many engines as that takes, that it ends in the history before anybody is told,
and when those whose clients wait come first.
Does not know: which responses run, or who asked for them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from pensieve_jax.core.errors import (
    HistoryError,
    HistoryUnavailableError,
    PensieveError,
    UnknownRecordError,
    UnknownTurnError,
)
from pensieve_jax.core.outputs import Output
from pensieve_jax.engine.validation import TurnSpec
from pensieve_jax.history.server_tables.changes import EndResponse, ResponseDraft, ResponseRecord
from pensieve_jax.server.api.response_events import failure_object
from pensieve_jax.server.api.response_object import kept_response
from pensieve_jax.server.api.response_plan import ENGINE_FIELDS
from pensieve_jax.server.api.response_runs import ResponseRun
from pensieve_jax.server.async_engine import UNANSWERED, AsyncTurn
from pensieve_jax.server.context.resolver import ResolvedContext
from pensieve_jax.server.http.errors import ApiError, as_api_error, not_found, overloaded
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.turns.checks import commit_context
from pensieve_jax.server.turns.run import RunningTurns, run_turns

_log = logging.getLogger(__name__)

RETRY_S: Final = 0.5
"""Between two tries of what an engine or a history could not do."""


class BackgroundDriver:
    """Of one server. Used by the event loop's thread only."""

    def __init__(self, services: Services) -> None:
        """Of what the server is made of."""
        self._services = services

    async def drive(
        self, run: ResponseRun, spec: TurnSpec, draft: ResponseDraft, resolved: ResolvedContext | None
    ) -> None:
        """Run it until it has ended, on as many engines as that takes."""
        services = self._services
        while True:
            try:
                output = await self._run_once(run, spec)
                break
            except ApiError as error:
                if error.status not in (429, 503):
                    await self.fail(run, draft, error)
                    return
            except PensieveError as error:
                if await self._tell_end(run, draft):  # committed before the engine died, or cancelled
                    return
                if not isinstance(error, (*UNANSWERED, HistoryUnavailableError)):
                    await self.fail(run, draft, as_api_error(error, ENGINE_FIELDS))
                    return
            if services.engine.state == "draining":
                # It stays queued in the history: the next server runs it.
                run.fail(overloaded("The server is about to end; the response goes on when it is back.", 30))
                return
            run.begin_again()
            await asyncio.sleep(RETRY_S)
        if resolved is not None:
            commit_context(services, resolved, output)
        await self._tell_end(run, draft)

    async def fail(self, run: ResponseRun, draft: ResponseDraft, error: ApiError) -> None:
        """End it in the history and for those who follow it, as soon as that can be written."""
        change = EndResponse(
            owner=draft.owner,
            response_id=draft.response_id,
            status="failed",
            completed_at_s=self._services.now_s(),
            error=json.dumps(failure_object(error)),
        )
        is_logged = False
        while True:
            try:
                await self._services.engine.apply(change)
            except (*UNANSWERED, HistoryError) as failure:
                # It stands in the history as queued: this server says how it ended, or the next one runs it.
                if self._services.engine.state == "draining":
                    break
                if not is_logged:
                    _log.error("the end of a background response could not be written", exc_info=failure)
                    is_logged = True
                await asyncio.sleep(RETRY_S)
                continue
            except PensieveError:  # it was deleted
                pass
            break
        run.fail(error)

    async def read[T](self, work: Callable[[], Awaitable[T]]) -> T:
        """What the history says, as soon as it can be read."""
        is_logged = False
        while True:
            try:
                return await work()
            except HistoryError as error:
                if not is_logged:
                    _log.error("background responses could not be read", exc_info=error)
                    is_logged = True
            await asyncio.sleep(RETRY_S)

    # Inside

    async def _tell_end(self, run: ResponseRun, draft: ResponseDraft) -> bool:
        """Whether it has ended in the history, and if so how: live and later, everybody sees the same."""
        history, owner, response_id = self._services.history, draft.owner, draft.response_id

        def kept() -> tuple[ResponseRecord, Sequence[int]]:
            record: ResponseRecord = history.response(owner, response_id)
            turn_id = record.turn_id
            return record, () if turn_id is None else history.turn(owner, turn_id).output_token_ids

        try:
            record, token_ids = await self.read(lambda: self._services.read(owner, kept))
        except (UnknownRecordError, UnknownTurnError):  # it was deleted
            run.fail(not_found("response", response_id))
            return True
        if record.status == "queued":
            return False
        run.begin_again()
        run.take(token_ids)
        run.end(kept_response(record))
        return True

    async def _run_once(self, run: ResponseRun, spec: TurnSpec) -> Output:
        services = self._services
        services.limits.check_ready()
        if services.limits.num_waiting or not self._has_share(run.owner):
            raise overloaded("Those whose clients wait come first.", 1)
        running: RunningTurns | None = None

        async def start() -> Sequence[AsyncTurn]:
            turn = services.engine.submit(spec)
            await turn.accepted()
            return [turn]

        try:
            running = await run_turns(
                services,
                run.owner,
                start,
                num_tokens=len(spec.prompt_token_ids),
                max_tokens=spec.params.max_tokens,
            )
            (turn,) = running.turns
            async for delta in turn:
                run.take(delta.token_ids)
            assert turn.output is not None
            return turn.output
        finally:
            if running is not None:
                await running.close()

    def _has_share(self, owner: str) -> bool:
        return self._services.limits.in_flight(owner) < self._services.settings.max_in_flight_per_key
