"""Responses in the background: they go on when their client leaves, and when the server ends.

Owns: which of them run, that each is in the history before anybody is told of it, that it ends once, and that
it is run again after a restart, with the same seed and the same id.
Does not know: requests, or how an answer is written.
Called by: `responses`; whoever starts a server, through its `lifespan`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import msgspec

from pensieve_jax.core.errors import (
    EngineClosedError,
    EngineDiedError,
    HistoryError,
    PensieveError,
    UnknownTurnError,
)
from pensieve_jax.core.outputs import Output
from pensieve_jax.engine.validation import TurnSpec
from pensieve_jax.history.changes import EndResponse, Expire, QueueResponse, ResponseDraft, ResponseRecord
from pensieve_jax.server.api.background_job import decode_job, encode_job
from pensieve_jax.server.api.common import commit_context
from pensieve_jax.server.api.response_events import failure_object
from pensieve_jax.server.api.response_object import head_of, kept_response
from pensieve_jax.server.api.response_plan import ENGINE_FIELDS, ResponsePlan
from pensieve_jax.server.api.response_runs import ResponseRun
from pensieve_jax.server.api.running import RunningTurns, run_turns
from pensieve_jax.server.async_engine import AsyncTurn
from pensieve_jax.server.context.resolver import Memory, ResolvedContext
from pensieve_jax.server.http.errors import (
    ApiError,
    as_api_error,
    context_too_long,
    internal_error,
    overloaded,
    rate_limited,
    renamed_fields,
)
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.threads import aside

_log = logging.getLogger(__name__)

MAX_RUNS: Final = 1000
"""Background responses that have not ended, of all owners."""
_RETRY_S: Final = 0.5
_EXPIRY_PERIOD_S: Final = 600.0


class BackgroundResponses:
    """The background responses of one server. Used by the event loop's thread only."""

    def __init__(self, services: Services, locks: set[tuple[str, str]]) -> None:
        """`locks` has the conversations, by owner and id, of which a turn runs."""
        self._services = services
        self._locks = locks
        self._runs: dict[tuple[str, str], ResponseRun] = {}

    @property
    def num_running(self) -> int:
        """Responses that have not ended."""
        return len(self._runs)

    def find(self, owner: str, response_id: str) -> ResponseRun | None:
        """A response that has not ended."""
        return self._runs.get((owner, response_id))

    async def queue(self, plan: ResponsePlan, run: ResponseRun, unlock: Callable[[], None]) -> None:
        """Keep a response as queued, and have it run; raises ApiError and what the engine raises."""
        started = False
        try:
            if len(self._runs) >= MAX_RUNS:
                raise overloaded("There are too many responses in the background; try again later.", 30)
            self._check_share(run.owner)
            self._services.limits.check_ready()
            with renamed_fields(ENGINE_FIELDS):
                resolved, spec = await self._queued(plan)
            assert plan.draft is not None and plan.head is not None
            run.begin(plan.head)
            self._start(run, spec, plan.draft, resolved, unlock)
            started = True
        finally:
            if not started:
                unlock()

    async def cancel(self, owner: str, record: ResponseRecord) -> dict[str, Any]:
        """End a response, unless it has ended; its response object as it is then."""
        run = self.find(owner, record.response_id)
        if run is not None and run.task is not None:
            run.task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.shield(_ended(run.task))
        if run is None or run.response is None:
            now_s = self._services.now_s()
            change = EndResponse(
                owner=owner, response_id=record.response_id, status="cancelled", completed_at_s=now_s
            )
            try:
                await self._services.engine.apply(change)
            except PensieveError as error:
                if run is not None:
                    run.fail(as_api_error(error))
                raise
        response = kept_response(self._services.history.response(owner, record.response_id))
        if run is not None and not run.has_ended:
            run.end(response)
        return response

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """From start to end: run what an earlier server left, and leave to a later one what has not ended."""
        tasks = [asyncio.ensure_future(self._resume()), asyncio.ensure_future(self._expire())]
        try:
            yield
        finally:
            tasks += [run.task for run in self._runs.values() if run.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # Inside

    def _check_share(self, owner: str) -> None:
        """No key may fill the background for the others; without keys, nobody's share is another's loss."""
        settings = self._services.settings
        most = settings.max_in_flight_per_key
        if settings.api_keys_file is not None and sum(key[0] == owner for key in self._runs) >= most:
            sentence = f"A key may have {most} responses in the background; wait for one of them."
            raise rate_limited(sentence, self._services.limits.retry_after_s())

    async def _queued(self, plan: ResponsePlan) -> tuple[ResolvedContext, TurnSpec]:
        """Keep a response as queued, behind a turn that the history has, as `start_turns` finds one."""
        context, unknown = plan.context, None
        for memory in Memory:
            resolved = await aside(context.is_long, context.find, memory)
            (spec,) = plan.specs(resolved)
            _check_length(self._services, resolved)
            assert plan.draft is not None
            job = encode_job(spec, plan.draft)
            change = QueueResponse(draft=plan.draft, job=job, parent_id=resolved.node.parent_id)
            try:
                await self._services.engine.apply(change)
                return resolved, spec
            except UnknownTurnError as error:
                unknown = error
                if resolved.parent is not None:
                    resolved.index.forget(plan.owner, resolved.parent.turn_id)
        assert unknown is not None
        raise unknown

    def _start(
        self,
        run: ResponseRun,
        spec: TurnSpec,
        draft: ResponseDraft,
        resolved: ResolvedContext | None,
        unlock: Callable[[], None],
    ) -> None:
        key = (draft.owner, draft.response_id)
        self._runs[key] = run

        async def drive() -> None:
            is_expected = False
            try:
                await self._drive(run, spec, draft, resolved)
                is_expected = True
            except asyncio.CancelledError:  # whoever cancelled it says what became of it
                is_expected = True
                raise
            finally:
                del self._runs[key]
                unlock()
                if not is_expected:
                    run.fail(internal_error())

        run.task = asyncio.ensure_future(drive())

    async def _drive(
        self, run: ResponseRun, spec: TurnSpec, draft: ResponseDraft, resolved: ResolvedContext | None
    ) -> None:
        """Run it until it has ended, on as many engines as that takes."""
        services = self._services
        while True:
            try:
                output = await self._run_once(run, spec)
                break
            except (EngineClosedError, EngineDiedError):
                if self._was_committed(run, draft):  # before the engine died
                    return
            except ApiError as error:
                if error.status not in (429, 503):
                    await self._fail(run, draft, error)
                    return
            except PensieveError as error:
                await self._fail(run, draft, as_api_error(error, ENGINE_FIELDS))
                return
            if services.engine.state == "draining":
                # It stays queued in the history: the next server runs it.
                run.fail(overloaded("The server is about to end; the response goes on when it is back.", 30))
                return
            run.begin_again()
            await asyncio.sleep(_RETRY_S)
        if resolved is not None:
            commit_context(services, resolved, output)
        # As it is kept: whoever followed it live and whoever asks later see the same.
        run.end(kept_response(services.history.response(draft.owner, draft.response_id)))

    def _was_committed(self, run: ResponseRun, draft: ResponseDraft) -> bool:
        history = self._services.history
        record: ResponseRecord = history.response(draft.owner, draft.response_id)
        if record.turn_id is None:
            return False
        run.begin_again()
        run.take(history.turn(draft.owner, record.turn_id).output_token_ids)
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
            running = await run_turns(services, run.owner, start, num_tokens=len(spec.prompt_token_ids))
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

    async def _fail(self, run: ResponseRun, draft: ResponseDraft, error: ApiError) -> None:
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
            except (EngineClosedError, EngineDiedError, HistoryError) as failure:
                # It stands in the history as queued: this server says how it ended, or the next one runs it.
                if self._services.engine.state == "draining":
                    break
                if not is_logged:
                    _log.error("the end of a background response could not be written", exc_info=failure)
                    is_logged = True
                await asyncio.sleep(_RETRY_S)
                continue
            except PensieveError:  # it was deleted
                pass
            break
        run.fail(error)

    async def _resume(self) -> None:
        """Run what an earlier server left, once there is an engine."""
        for record in await self._unfinished():
            if (record.owner, record.response_id) in self._runs or record.job is None:
                continue
            run = ResponseRun(record.owner, "", background=True)
            run.begin(head_of(record))
            try:
                spec, draft = decode_job(record.job)
            except msgspec.DecodeError:
                sentence = "An earlier release left this response, and this one cannot run it."
                await self._fail(run, _draft_of(record), ApiError(500, "server_error", sentence))
                continue
            self._start(run, spec, draft, None, self._locked(draft))

    async def _unfinished(self) -> list[ResponseRecord]:
        """What an earlier server left, as soon as there is an engine and the history can be read."""
        is_logged = False
        while True:
            if self._services.engine.state == "ready":
                try:
                    found: list[ResponseRecord] = self._services.history.unfinished_background()
                    return found
                except HistoryError as error:
                    if not is_logged:
                        _log.error("background responses of before could not be read", exc_info=error)
                        is_logged = True
            await asyncio.sleep(_RETRY_S)

    def _locked(self, draft: ResponseDraft) -> Callable[[], None]:
        """Lock the conversation that a response is appended to; what unlocks it."""
        if draft.conversation is None:
            return lambda: None
        lock = (draft.owner, draft.conversation.conversation_id)
        self._locks.add(lock)
        return lambda: self._locks.discard(lock)

    async def _expire(self) -> None:
        """Now and then, have the history forget what has expired."""
        while True:
            if self._services.engine.state == "ready":
                now_s = self._services.now_s()
                with suppress(PensieveError):  # the next time
                    await self._services.engine.apply(Expire(now_s=now_s))
                    while self._services.history.has_expired(now_s):  # a few at a time, with steps in between
                        await self._services.engine.apply(Expire(now_s=now_s))
            await asyncio.sleep(_EXPIRY_PERIOD_S)


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait({task})


def _check_length(services: Services, resolved: ResolvedContext) -> None:
    """Refuse at once what the engine would refuse later; raises ApiError 400."""
    most = services.engine.info.limits.max_context_tokens - 1
    if resolved.num_context_tokens > most:
        raise context_too_long(resolved.num_context_tokens, most, "input")


def _draft_of(record: ResponseRecord) -> ResponseDraft:
    names = ("response_id", "owner", "request", "input_items", "output_item_id", "created_at_s")
    return ResponseDraft(
        **{name: getattr(record, name) for name in names}, expires_at_s=record.expires_at_s, background=True
    )
