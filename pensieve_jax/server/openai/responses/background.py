"""Background responses, which continue after their client leaves and after a server restart.

Owns: the set of running background responses, and the form of their jobs in the history.
Does not know: requests, or how a response is sent. Called by `ResponseCreation` and `Responses`.

A response is in the history before a client sees it. Its turn runs again, with the same seed and id, after
the engine or the server restarts. It ends once, first in the history. Turns of clients that wait go first.

Every response that is queued in the history has a server that runs it. That includes responses that an
earlier server left behind, and those that the engine queued although its confirmation was lost.

A response may kill its engine. So its row counts its runs without a known end. The count is stored before the
engine gets the turn, and taken back when the run ends without a death. A server that finds the response thus
knows of deaths that ended an earlier server. After `MAX_DEATHS` it fails. If the front end alone is killed,
its engine takes back the counts of its runs; servers that share the history wait for that.

Responses that ran beside a guilty one die with it, so after its first death a response is a suspect: it runs
without other background responses. Either it completes, or it is alone at its second death. This finds a
guilty response at its second death, and does not fail those that ran beside it. Halving the suspects instead
would need a death for each half. Suspects are at most the responses that ran at a time, so the others wait
for a bounded number of turns.

Turns of clients that wait run beside a suspect, since they must not wait for it. An innocent suspect fails if
such a turn kills the engine again, or if the whole server is killed again. A foreground turn is not run
again, so it needs no count.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from pensieve_jax.core.errors import (
    EngineDiedError,
    HistoryBusyError,
    HistoryError,
    HistoryUnavailableError,
    PensieveError,
    UnknownRecordError,
    UnknownTurnError,
)
from pensieve_jax.core.outputs import Output
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.core.turn_node import TurnNode
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.history.server_tables.changes import (
    EndResponse,
    QueueResponse,
    ResponseDraft,
    ResponseRecord,
    StartResponse,
    TakeBackStart,
)
from pensieve_jax.server.async_engine import UNANSWERED, AsyncDelta, AsyncTurn
from pensieve_jax.server.context.resolver import Memory, ResolvedContext
from pensieve_jax.server.http.admission import MAX_RETRY_AFTER_S
from pensieve_jax.server.http.errors import (
    ApiError,
    as_api_error,
    internal_error,
    not_found,
    overloaded,
    rate_limited,
)
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.logs import log_end_of_task
from pensieve_jax.server.openai.responses.events import failure_object
from pensieve_jax.server.openai.responses.expiry import Expiry
from pensieve_jax.server.openai.responses.pieces import ReplyPieces
from pensieve_jax.server.openai.responses.plan import PlanErrors, ResponsePlan, errors_of_job
from pensieve_jax.server.openai.responses.response import head_of, stored_logprobs, stored_response
from pensieve_jax.server.openai.responses.retries import CompletionWatcher
from pensieve_jax.server.openai.responses.run import ResponseRun
from pensieve_jax.server.openai.responses.run_gate import RunGate
from pensieve_jax.server.turns.checks import commit_context
from pensieve_jax.server.turns.run import RunningTurns, run_turns

_log = logging.getLogger(__name__)

MAX_RUNS: Final = 1000
"""Limit of background responses that have not ended, of all owners together."""
MAX_DEATHS: Final = 2
"""Deaths of the engine while a response ran, after which it fails."""
POLL_S: Final = 10.0
"""Interval of the search for responses that another server left behind."""
RETRY_S: Final = 0.5
"""Delay before retrying a failed call of the engine or the history."""
TAKE_BACK_S: Final = 1.0
"""Time in which the engine of a killed server ends its step and takes back the counts of its runs."""
_LEAVE_S: Final = 5.0
"""Time to take back the counts of runs when the server ends."""


class BackgroundResponses:
    """The background responses of one server. Used by the event loop's thread only."""

    def __init__(self, services: Services, locks: set[tuple[str, str]]) -> None:
        """`locks` contains the conversations with a running turn, by owner and id."""
        self._services = services
        self._driver = BackgroundRunner(services)
        self._expiry = Expiry(services, locks)
        self._locks = locks
        self._runs: dict[tuple[str, str], ResponseRun] = {}
        self._being_queued: set[ResponsePlan] = set()
        # Lost confirmations of the engine; each change was applied, will be applied, or was lost.
        self._num_lost = 0
        self._num_reconciled = 0
        self._is_leaving = False
        self._ends = CompletionWatcher[tuple[str, str]]()
        self._has_new_keys = False
        services.keys.on_change(self._look_at_keys)

    @property
    def num_running(self) -> int:
        """Number of background responses that have not ended."""
        return len(self._runs)

    @property
    def has_lost_confirmations(self) -> bool:
        """Whether the history may contain changes unknown to this server; `reconcile` finds out."""
        return self._num_reconciled < self._num_lost

    def find(self, owner: str, response_id: str) -> ResponseRun | None:
        """Return a response that has not ended, or None."""
        return self._runs.get((owner, response_id))

    async def current[**P, T](self, owner: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what `work` reads from the history, repeating the read if a record's run ended meanwhile.

        The result is one record or several. Nothing else runs between the last check and the return, so that
        the caller may run records that are queued.
        """
        while True:
            with self._ends.collect() as ended:
                found = await self._services.read(owner, work, *args, **kwargs)
            records = found if isinstance(found, list) else [found]
            keys = {(one.owner, one.response_id) for one in records if isinstance(one, ResponseRecord)}
            if not keys & ended:
                return found

    async def queue(self, plan: ResponsePlan, run: ResponseRun, unlock: Callable[[], None]) -> None:
        """Store a response as queued, and run it; raise ApiError and the engine's errors."""
        started = False
        try:
            self._check_share(run.owner)
            self._services.limits.check_ready()
            self._being_queued.add(plan)
            with plan.errors.renamed():
                resolved, spec = await self._queued(plan)
            assert plan.draft is not None and plan.head is not None
            run.begin(plan.head)
            work = partial(self._driver.drive, run, spec, plan.draft, resolved, plan.errors)
            self._start(run, plan.draft, work, unlock)
            started = True
        finally:
            self._being_queued.discard(plan)
            if not started:
                unlock()

    def run_queued(self, record: ResponseRecord, *, has_waited: bool = False) -> ResponseRun | None:
        """Run a response that is queued in the history; return None if it is not to run here.

        This server must have claimed it, which `reconcile` does; another server may have claimed it instead.

        Args:
          record: must be current; see `current`.
          has_waited: whether the engine of a killed server has had its time to take back a count.
        """
        key = (record.owner, record.response_id)
        if key in self._runs:
            return self._runs[key]
        if not has_waited and self._may_be_taken_back(record):
            return None
        is_wanted = record.status == "queued" and self._services.engine.state != "draining"
        is_wanted = is_wanted and self._services.history.claims.holds(record.response_id)
        if not is_wanted or record.job is None or self._is_being_queued(*key):
            return None
        try:
            spec, draft = decode_job(record.job)
        except msgspec.DecodeError:
            spec, draft = None, draft_of(record)
        new_pieces = partial(ReplyPieces, self._services.tokenizer)
        run = ResponseRun(draft.owner, draft.body_sha256, new_pieces, background=True)
        run.begin(head_of(record, NO_INPUT if spec is None else spec.template_input))
        if spec is None:
            sentence = "An earlier release queued this response, and this release cannot run it."
            work = partial(self._driver.fail, run, draft, ApiError(500, "server_error", sentence))
        else:
            errors = errors_of_job(spec)
            work = partial(self._driver.drive, run, spec, draft, None, errors, num_deaths=record.starts)
        self._start(run, draft, work, self._locked(draft))
        return run

    async def reconcile(self) -> None:
        """Run all responses that are queued in the history, and resolve lost confirmations.

        After this returns, a change whose confirmation was lost has been applied or never will be.

        Raises the engine's errors.
        """
        num_lost = self._num_lost
        if self.has_lost_confirmations:
            await self._wait_for_sent_changes()
            if num_lost <= self._num_reconciled:  # another caller of `reconcile` has done the rest
                return
        records = await self._driver.read(self._unfinished)
        waited_for = {record.response_id for record in records if self._may_be_taken_back(record)}
        if waited_for:
            await asyncio.sleep(TAKE_BACK_S)
            records = await self._driver.read(self._unfinished)
        for record in records:
            try:
                if self._services.keys.has_owner(record.owner):
                    self.run_queued(record, has_waited=record.response_id in waited_for)
                else:
                    await self.cancel(record.owner, record.response_id)
            except Exception as error:  # unexpected, but the other responses must still run
                _log.error("a background response could not be run", exc_info=error)
        if num_lost > self._num_reconciled or self._services.history.claims.are_shared:
            await self._stop_cancelled({(record.owner, record.response_id) for record in records})
        self._num_reconciled = max(self._num_reconciled, num_lost)
        queued = {plan.draft.response_id for plan in self._being_queued if plan.draft is not None}
        self._services.history.claims.keep_only({response_id for _, response_id in self._runs} | queued)

    async def cancel(self, owner: str, response_id: str) -> dict[str, Any]:
        """Cancel a response unless it has ended; return its response object.

        Raises the engine's errors. If the engine's confirmation was lost, the response continues until
        `reconcile` finds out whether it was cancelled.
        """
        change = EndResponse(
            owner=owner,
            response_id=response_id,
            status="cancelled",
            completed_at_s=self._services.now_s(),
        )
        try:
            await self._services.engine.apply(change)
        except UNANSWERED:
            self._num_lost += 1
            raise
        return await self._stopped(owner, response_id)

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Run responses that were left behind; at exit, leave unfinished ones to the next server."""
        tasks = [asyncio.ensure_future(work) for work in (self._run_left_behind(), self._expiry.run())]
        for task in tasks:
            task.add_done_callback(
                log_end_of_task(_log, "a background task stopped unexpectedly; restart the server")
            )
        try:
            yield
        finally:
            self._is_leaving = True
            tasks += [run.task for run in self._runs.values() if run.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._driver.take_back_starts()

    # Private methods

    def _look_at_keys(self) -> None:
        self._has_new_keys = True

    async def _cancel_revoked(self) -> None:
        """Cancel the responses of owners without a key; raise the engine's errors."""
        for owner, response_id in list(self._runs):
            if not self._services.keys.has_owner(owner):
                with suppress(UnknownRecordError):  # deleted meanwhile
                    await self.cancel(owner, response_id)
        self._has_new_keys = False

    async def _wait_for_sent_changes(self) -> None:
        """Wait until each change sent so far was applied or never will be; raise the engine's errors.

        An engine answers in the order in which it was asked, so it is done with them when it answers a later
        call. Any call would do; `census` changes nothing, and with replicas it goes to each of them.
        """
        await self._services.engine.call("census")

    def _may_be_taken_back(self, record: ResponseRecord) -> bool:
        """Return whether the engine of another server, killed a moment ago, may have a response to run here.

        A history file is free only once that engine has ended.
        """
        claims = self._services.history.claims
        is_new = (record.owner, record.response_id) not in self._runs
        return is_new and claims.are_shared and claims.holds(record.response_id) and record.starts > 0

    async def _unfinished(self) -> list[ResponseRecord]:
        return await self.current("", self._claimed)

    def _claimed(self) -> list[ResponseRecord]:
        """Return the queued responses, read after claiming all of them that no other server has claimed."""
        history = self._services.history
        found: list[ResponseRecord] = history.unfinished_background()
        if not history.claims.are_shared or not found:
            return found
        for record in found:
            history.claims.take(record.response_id)
        again: list[ResponseRecord] = history.unfinished_background()
        return again

    async def _stopped(self, owner: str, response_id: str) -> dict[str, Any]:
        """Stop the run of a response that has ended in the history, and return its response object."""
        run = self.find(owner, response_id)
        if run is not None and run.task is not None:
            run.task.cancel()
            await asyncio.wait({run.task})
        try:
            response = stored_response(await self._read(owner, response_id), self._services.token_texts)
        except PensieveError as error:
            if run is not None and not run.has_ended:
                run.fail(as_api_error(error))
            raise
        if run is not None and not run.has_ended:
            run.end(response)
        return response

    async def _stop_cancelled(self, queued: set[tuple[str, str]]) -> None:
        """Stop runs that were cancelled in the history only; `queued` are all records that have not ended."""
        for owner, response_id in self._runs.keys() - queued:
            with suppress(PensieveError):  # deleted or unreadable: the run itself will notice
                record = await self._read(owner, response_id)
                if record.status == "cancelled":
                    await self._stopped(owner, response_id)

    async def _read(self, owner: str, response_id: str) -> ResponseRecord:
        record: ResponseRecord = await self._services.read(
            owner, self._services.history.response, owner, response_id
        )
        return record

    def _check_share(self, owner: str) -> None:
        """Raise ApiError if there are too many background responses, in total or of this key.

        Responses that wait to be queued count too; otherwise simultaneous requests would all pass.
        """
        if len(self._runs) + len(self._being_queued) >= MAX_RUNS:
            raise overloaded("There are too many background responses; try again later.", MAX_RETRY_AFTER_S)
        settings = self._services.settings
        most = settings.max_in_flight_per_key
        if settings.api_keys_file is None:
            return
        num_queued = sum(plan.owner == owner for plan in self._being_queued)
        if num_queued + sum(key[0] == owner for key in self._runs) >= most:
            sentence = f"A key may have {most} background responses; wait until one of them ends."
            raise rate_limited(sentence, self._services.limits.retry_after_s())

    async def _queued(self, plan: ResponsePlan) -> tuple[ResolvedContext, TurnSpec]:
        """Store a response as queued after a durable turn, which is searched for as in `start_turns`."""
        context, unknown = plan.context, None
        for memory in Memory:
            resolved, (spec,) = await self._services.run_cpu(
                plan.owner, context.estimate, plan.prepared, memory
            )
            assert plan.draft is not None
            name = plan.draft.response_id
            # Claim it before other servers can see it.
            await self._services.read(plan.owner, self._services.history.claims.take, name)
            job = encode_job(spec, plan.draft)
            change = QueueResponse(
                draft=plan.draft,
                job=job,
                parent_id=resolved.node.parent_id,
                quota=self._services.settings.storage_quota,
            )
            try:
                await self._services.engine.apply(change)
                return resolved, spec
            except UnknownTurnError as error:
                unknown = error
                if resolved.parent is not None:
                    resolved.index.forget(plan.owner, resolved.parent.turn_id)
            except UNANSWERED:
                self._num_lost += 1
                raise
        assert unknown is not None
        raise unknown

    def _is_being_queued(self, owner: str, response_id: str) -> bool:
        """Return whether a response is being queued, so that the history may have it unconfirmed."""
        drafts = [plan.draft for plan in self._being_queued if plan.owner == owner]
        return any(draft is not None and draft.response_id == response_id for draft in drafts)

    def _start(
        self,
        run: ResponseRun,
        draft: ResponseDraft,
        work: Callable[[], Awaitable[None]],
        unlock: Callable[[], None],
    ) -> None:
        """Run `work`, which brings a response to its end, as a task."""
        key = (draft.owner, draft.response_id)
        self._runs[key] = run

        async def drive() -> None:
            is_expected = False
            try:
                await work()
                is_expected = True
            except asyncio.CancelledError:  # the caller that cancelled it reports the end
                is_expected = True
                raise
            finally:
                try:
                    if not is_expected:  # if it stayed queued, it would run and fail forever
                        await self._driver.fail(run, draft, internal_error())
                finally:
                    if not self._is_leaving and self._services.engine.state != "draining":
                        self._driver.forget(*key)
                    del self._runs[key]
                    self._services.history.claims.give_up(draft.response_id)
                    self._ends.notify(key)
                    unlock()

        run.task = asyncio.ensure_future(drive())

    async def _run_left_behind(self) -> None:
        """Run responses left behind by an earlier server or engine, or by a lost confirmation."""
        services, epoch, looked_s, is_logged = self._services, 0, -math.inf, False
        while True:
            now_s = asyncio.get_running_loop().time()
            # Another server that shares the history may die at any time and leave responses behind.
            is_time = services.history.claims.are_shared and now_s - looked_s >= POLL_S
            is_new = epoch != services.engine.epoch
            is_due = is_new or self.has_lost_confirmations or is_time or self._has_new_keys
            if services.engine.state == "ready" and is_due:
                asked, looked_s = services.engine.epoch, now_s
                try:
                    if self._has_new_keys:
                        await self._cancel_revoked()
                    await self.reconcile()
                    epoch, is_logged = asked, False
                except UNANSWERED:  # still unresolved, or the engine restarts soon
                    pass
                except PensieveError as error:  # for example a history that rejects reads: try again later
                    if not is_logged:
                        _log.error("background responses could not be run; trying again", exc_info=error)
                        is_logged = True
            await asyncio.sleep(RETRY_S)

    def _locked(self, draft: ResponseDraft) -> Callable[[], None]:
        """Lock the conversation of a response unless it is locked; return the function to unlock it."""
        if draft.conversation is None:
            return lambda: None
        lock = (draft.owner, draft.conversation.conversation_id)
        if lock in self._locks:
            # Of the two turns, the one that ends last will fail with a changed conversation.
            return lambda: None
        self._locks.add(lock)
        return lambda: self._locks.discard(lock)


class BackgroundRunner:
    """Runs background responses to their ends. Used by the event loop's thread only."""

    def __init__(self, services: Services) -> None:
        """Use the engine, the history and the limits of `services`."""
        self._services = services
        self._gate = RunGate()
        # Responses whose rows count a run that this server began.
        self._started: set[tuple[str, str]] = set()
        self._in_engine: set[tuple[str, str]] = set()

    async def drive(
        self,
        run: ResponseRun,
        spec: TurnSpec,
        draft: ResponseDraft,
        resolved: ResolvedContext | None,
        errors: PlanErrors,
        *,
        num_deaths: int = 0,
    ) -> None:
        """Run a response until it ends, starting again whenever the engine restarts.

        `num_deaths` counts its earlier runs without a known end.
        """
        services, key = self._services, (draft.owner, draft.response_id)
        while True:
            if num_deaths >= MAX_DEATHS:
                _log.error("response %s ran at %d deaths of the engine and fails", key[1], num_deaths)
                await self.fail(run, draft, _engine_died_running(num_deaths))
                return
            self._in_engine.discard(key)
            try:
                output = await self._run_once(run, spec, draft, num_deaths)
                break
            except ApiError as error:
                if error.status not in (429, 503):
                    await self.fail(run, draft, error)
                    return
            except PensieveError as error:
                if isinstance(error, EngineDiedError) and key in self._in_engine:
                    num_deaths += 1
                    self._started.remove(key)
                if await self._tell_end(run, draft):  # it was committed before the engine died, or cancelled
                    return
                if not isinstance(error, (*UNANSWERED, HistoryUnavailableError, HistoryBusyError)):
                    await self.fail(run, draft, errors.as_api_error(error))
                    return
            if services.engine.state == "draining":
                # It stays queued in the history; the next server runs it.
                sentence = "The server is shutting down; the response continues after the restart."
                run.fail(overloaded(sentence, MAX_RETRY_AFTER_S))
                return
            run.begin_again()
            await asyncio.sleep(RETRY_S)
        if resolved is not None:
            await commit_context(services, resolved, output)
        await self._tell_end(run, draft)

    async def take_back_starts(self) -> None:
        """Take the starts back of the runs that this server has stopped in order."""
        # If a count stays, its response runs alone next time.
        with suppress(TimeoutError, *UNANSWERED, HistoryError):
            async with asyncio.timeout(_LEAVE_S):
                for owner, response_id in list(self._started):
                    change = TakeBackStart(owner=owner, response_id=response_id)
                    await self._services.engine.apply(change)

    def forget(self, owner: str, response_id: str) -> None:
        """Forget the run of a response that has ended, or that another server runs."""
        self._started.discard((owner, response_id))
        self._in_engine.discard((owner, response_id))

    async def fail(self, run: ResponseRun, draft: ResponseDraft, error: ApiError) -> None:
        """Mark a response as failed in the history and for its followers, retrying until it is written."""
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
                # It is still queued in the history: retry here, or let the next server run it.
                if self._services.engine.state == "draining":
                    break
                # A restart of the engine is logged by its supervisor.
                if not is_logged and isinstance(failure, HistoryError):
                    _log.error("the end of a background response could not be written", exc_info=failure)
                    is_logged = True
                await asyncio.sleep(RETRY_S)
                continue
            except PensieveError:  # it was deleted
                pass
            break
        run.fail(error)

    async def read[T](self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`, which reads the history, retrying until it succeeds."""
        is_logged = False
        while True:
            try:
                return await work()
            except HistoryError as error:
                if not is_logged:
                    _log.error("background responses could not be read", exc_info=error)
                    is_logged = True
            await asyncio.sleep(RETRY_S)

    # Private methods

    async def _tell_end(self, run: ResponseRun, draft: ResponseDraft) -> bool:
        """Return whether the response has ended in the history, and if so end its run in the same way.

        Followers of the run and later readers of the history thus see the same response.
        """
        history, owner, response_id = self._services.history, draft.owner, draft.response_id

        def kept() -> tuple[ResponseRecord, tuple[int, ...]]:
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
        reply = AsyncDelta(record.output_text or "", token_ids, stored_logprobs(record))
        if not run.has_taken(reply):  # another server ran it, or this one before a restart
            run.begin_again()
            run.take(reply)
        run.end(stored_response(record, self._services.token_texts))
        return True

    async def _run_once(
        self, run: ResponseRun, spec: TurnSpec, draft: ResponseDraft, num_deaths: int
    ) -> Output:
        """Run a response once and return its output; a response that ran at a death runs alone."""
        self._check_place(run.owner)
        async with self._gate.place(alone=num_deaths > 0):
            self._check_place(run.owner)
            return await self._run_in_place(run, spec, draft, num_deaths)

    def _check_place(self, owner: str) -> None:
        """Raise ApiError 503 unless the engine has a place for a background response of this key."""
        limits = self._services.limits
        limits.check_ready()
        if limits.num_waiting or not limits.has_share(owner):
            raise overloaded("Requests of waiting clients go first.", 1)

    async def _run_in_place(
        self, run: ResponseRun, spec: TurnSpec, draft: ResponseDraft, num_deaths: int
    ) -> Output:
        services, key = self._services, (draft.owner, draft.response_id)
        running: RunningTurns | None = None

        async def start() -> Sequence[AsyncTurn]:
            counted = StartResponse(owner=key[0], response_id=key[1], starts=num_deaths + 1)
            await services.engine.apply(counted)
            self._started.add(key)
            self._in_engine.add(key)
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
                run.take(delta)
            assert turn.output is not None
            return turn.output
        finally:
            if running is not None:
                await running.close()


def _engine_died_running(num_deaths: int) -> ApiError:
    sentence = (
        f"The engine died {num_deaths} times while this response ran, so it is not run again. "
        "Send a shorter or another request."
    )
    return ApiError(500, "engine_died_running", sentence)


class _Job(msgspec.Struct):
    node: TurnNode
    draft: ResponseDraft
    params: SamplingParams
    prompt_token_ids: list[int]
    messages: list[dict[str, Any]]
    keep: int | None = None
    template_input: TemplateInput = NO_INPUT


def encode_job(spec: TurnSpec, draft: ResponseDraft) -> bytes:
    """Encode a turn with a node, and the record to store with it, as a job."""
    assert spec.node is not None
    job = _Job(
        node=replace(spec.node, attachment=None),
        draft=draft,
        params=spec.params,
        prompt_token_ids=list(spec.prompt_token_ids),
        messages=[dict(message) for message in spec.messages or ()],
        keep=spec.keep,
        template_input=spec.template_input,
    )
    return msgspec.msgpack.encode(job)


def decode_job(job: bytes) -> tuple[TurnSpec, ResponseDraft]:
    """Decode a job to its turn, with the draft attached to its node, and the draft.

    Raises msgspec.DecodeError for jobs of another release.
    """
    kept = msgspec.msgpack.decode(job, type=_Job)
    node = replace(kept.node, attachment=kept.draft)
    messages = tuple(kept.messages)
    spec = TurnSpec(
        kept.prompt_token_ids,
        kept.params,
        messages=messages,
        node=node,
        keep=kept.keep,
        template_input=kept.template_input,
    )
    return spec, kept.draft


def draft_of(record: ResponseRecord) -> ResponseDraft:
    """Return a draft with the fields of a record, for a response whose job cannot be read."""
    names = ("response_id", "owner", "request", "input_items", "output_item_id", "created_at_s")
    return ResponseDraft(
        **{name: getattr(record, name) for name in names}, expires_at_s=record.expires_at_s, background=True
    )
