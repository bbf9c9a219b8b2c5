"""Responses in the background: they go on when their client leaves, and when the server ends.

Owns: which of them run, that each is in the history before any client is told of it, that its turn runs on as
many engines as that takes, that it ends once, first in the history, and that it is run again after a restart,
with the same seed and the same id; the form of its job in the history; that requests with a waiting client go
first; when the history is told to forget what has expired.
Does not know: requests, or how an answer is written.

Nothing stays queued in the history without a server that runs it: not what an earlier server left, and not
what an engine queued whose answer was lost.
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
    HistoryError,
    HistoryUnavailableError,
    PensieveError,
    UnknownRecordError,
    UnknownTurnError,
)
from pensieve_jax.core.outputs import Output
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.turn_node import TurnNode
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.history.server_tables.changes import (
    EndResponse,
    Expire,
    QueueResponse,
    ResponseDraft,
    ResponseRecord,
)
from pensieve_jax.server.async_engine import UNANSWERED, AsyncTurn
from pensieve_jax.server.context.resolver import Memory, ResolvedContext
from pensieve_jax.server.http.admission import MAX_RETRY_AFTER_S
from pensieve_jax.server.http.errors import (
    ApiError,
    as_api_error,
    internal_error,
    not_found,
    overloaded,
    rate_limited,
    renamed_fields,
)
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.logs import log_end_of_task
from pensieve_jax.server.openai.responses.events import failure_object
from pensieve_jax.server.openai.responses.plan import ENGINE_FIELDS, ResponsePlan
from pensieve_jax.server.openai.responses.response import head_of, kept_response
from pensieve_jax.server.openai.responses.retries import CompletionWatcher
from pensieve_jax.server.openai.responses.run import ResponseRun
from pensieve_jax.server.turns.checks import commit_context
from pensieve_jax.server.turns.run import RunningTurns, run_turns

_log = logging.getLogger(__name__)

MAX_RUNS: Final = 1000
"""Background responses that have not ended, of all owners."""
LOOK_S: Final = 10.0
"""Between two looks for those that another server has left."""
RETRY_S: Final = 0.5
"""Between two tries of what an engine or a history could not do."""
_PERIOD_S: Final = 600.0
"""Between two times that what has expired is forgotten."""


class BackgroundResponses:
    """The background responses of one server. Used by the event loop's thread only."""

    def __init__(self, services: Services, locks: set[tuple[str, str]]) -> None:
        """`locks` has the conversations, by owner and id, of which a turn runs."""
        self._services = services
        self._driver = BackgroundDriver(services)
        self._locks = locks
        self._runs: dict[tuple[str, str], ResponseRun] = {}
        self._being_queued: set[ResponsePlan] = set()
        self._num_doubts = 0  # answers of the engine that were lost: what they were of is done, or will be
        self._num_settled = 0
        self._ends = CompletionWatcher[tuple[str, str]]()

    @property
    def num_running(self) -> int:
        """Responses that have not ended."""
        return len(self._runs)

    @property
    def is_in_doubt(self) -> bool:
        """Whether the history may say, now or soon, what nobody here knows of; `settle` ends that."""
        return self._num_settled < self._num_doubts

    def find(self, owner: str, response_id: str) -> ResponseRun | None:
        """A response that has not ended."""
        return self._runs.get((owner, response_id))

    async def current[**P, T](self, owner: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` reads of the history: records, one or several, later than any of them ended here.

        Nothing happens between that and the return: what it says is queued may be adopted.
        """
        while True:
            with self._ends.seen() as ended:
                found = await self._services.read(owner, work, *args, **kwargs)
            records = found if isinstance(found, list) else [found]
            keys = {(one.owner, one.response_id) for one in records if isinstance(one, ResponseRecord)}
            if not keys & ended:
                return found

    async def queue(self, plan: ResponsePlan, run: ResponseRun, unlock: Callable[[], None]) -> None:
        """Keep a response as queued, and have it run; raises ApiError and what the engine raises."""
        started = False
        try:
            self._check_share(run.owner)
            self._services.limits.check_ready()
            self._being_queued.add(plan)
            with renamed_fields(ENGINE_FIELDS):
                resolved, spec = await self._queued(plan)
            assert plan.draft is not None and plan.head is not None
            run.begin(plan.head)
            self._start(run, plan.draft, partial(self._driver.drive, run, spec, plan.draft, resolved), unlock)
            started = True
        finally:
            self._being_queued.discard(plan)
            if not started:
                unlock()

    def adopt(self, record: ResponseRecord) -> ResponseRun | None:
        """Have a response run that the history has as queued; None for one that is not to run here.

        Another server may have claimed it, or nobody yet: `settle` claims.

        `record` is as it stands in the history now; see `current`.
        """
        key = (record.owner, record.response_id)
        if key in self._runs:
            return self._runs[key]
        is_wanted = record.status == "queued" and self._services.engine.state != "draining"
        is_wanted = is_wanted and self._services.history.claims.holds(record.response_id)
        if not is_wanted or record.job is None or self._is_being_queued(*key):
            return None
        try:
            spec, draft = decode_job(record.job)
        except msgspec.DecodeError:
            spec, draft = None, draft_of(record)
        run = ResponseRun(draft.owner, draft.body_sha256, background=True)
        run.begin(head_of(record))
        if spec is None:
            sentence = "An earlier release left this response, and this one cannot run it."
            work = partial(self._driver.fail, run, draft, ApiError(500, "server_error", sentence))
        else:
            work = partial(self._driver.drive, run, spec, draft, None)
        self._start(run, draft, work, self._locked(draft))
        return run

    async def settle(self) -> None:
        """Run what stands in the history as queued; what was in doubt has then happened, or never will.

        Raises what the engine raises.
        """
        num_doubts = self._num_doubts
        if self.is_in_doubt:  # it answers in order: behind this, what was sent before is done
            await self._services.engine.call("census")
            if num_doubts <= self._num_settled:  # somebody else who waited has done the rest
                return
        records = await self._driver.read(self._unfinished)
        for record in records:
            try:
                self.adopt(record)
            except Exception as error:  # nobody expected it, and the others are to run all the same
                _log.error("a background response could not be run", exc_info=error)
        if num_doubts > self._num_settled or self._services.history.claims.are_shared:
            await self._stop_cancelled({(record.owner, record.response_id) for record in records})
        self._num_settled = max(self._num_settled, num_doubts)
        queued = {plan.draft.response_id for plan in self._being_queued if plan.draft is not None}
        self._services.history.claims.keep_only({response_id for _, response_id in self._runs} | queued)

    async def cancel(self, owner: str, record: ResponseRecord) -> dict[str, Any]:
        """End a response, unless it has ended; its response object as it is then.

        Raises what the engine raises; where its answer was lost, the response goes on until the history has
        been asked whether it has ended.
        """
        change = EndResponse(
            owner=owner,
            response_id=record.response_id,
            status="cancelled",
            completed_at_s=self._services.now_s(),
        )
        try:
            await self._services.engine.apply(change)
        except UNANSWERED:
            self._num_doubts += 1
            raise
        return await self._stopped(owner, record.response_id)

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """From start to end: run what was left, and leave to a later server what has not ended."""
        tasks = [
            asyncio.ensure_future(work) for work in (self._adopt_left(), expire_now_and_then(self._services))
        ]
        for task in tasks:
            task.add_done_callback(
                log_end_of_task(_log, "what runs in the background has ended; start the server anew")
            )
        try:
            yield
        finally:
            tasks += [run.task for run in self._runs.values() if run.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # Inside

    async def _unfinished(self) -> list[ResponseRecord]:
        return await self.current("", self._claimed)

    def _claimed(self) -> list[ResponseRecord]:
        """Those that are queued, later than claims of all of them that no other server has."""
        history = self._services.history
        found: list[ResponseRecord] = history.unfinished_background()
        if not history.claims.are_shared or not found:
            return found
        for record in found:
            history.claims.take(record.response_id)
        again: list[ResponseRecord] = history.unfinished_background()
        return again

    async def _stopped(self, owner: str, response_id: str) -> dict[str, Any]:
        """Stop running a response that has ended in the history; its response object."""
        run = self.find(owner, response_id)
        if run is not None and run.task is not None:
            run.task.cancel()
            await asyncio.wait({run.task})
        try:
            response = kept_response(await self._read(owner, response_id))
        except PensieveError as error:
            if run is not None and not run.has_ended:
                run.fail(as_api_error(error))
            raise
        if run is not None and not run.has_ended:
            run.end(response)
        return response

    async def _stop_cancelled(self, queued: set[tuple[str, str]]) -> None:
        """Stop those that were cancelled without a word; `queued` are all that have not ended."""
        for owner, response_id in self._runs.keys() - queued:
            with suppress(PensieveError):  # it was deleted, or cannot be read: its end tells
                record = await self._read(owner, response_id)
                if record.status == "cancelled":
                    await self._stopped(owner, response_id)

    async def _read(self, owner: str, response_id: str) -> ResponseRecord:
        record: ResponseRecord = await self._services.read(
            owner, self._services.history.response, owner, response_id
        )
        return record

    def _check_share(self, owner: str) -> None:
        """No key may fill the background for the others; without keys, nobody's share is another's loss.

        What waits to be queued counts: those that come at once would else all find room.
        """
        if len(self._runs) + len(self._being_queued) >= MAX_RUNS:
            raise overloaded(
                "There are too many responses in the background; try again later.", MAX_RETRY_AFTER_S
            )
        settings = self._services.settings
        most = settings.max_in_flight_per_key
        if settings.api_keys_file is None:
            return
        num_queued = sum(plan.owner == owner for plan in self._being_queued)
        if num_queued + sum(key[0] == owner for key in self._runs) >= most:
            sentence = f"A key may have {most} responses in the background; wait for one of them."
            raise rate_limited(sentence, self._services.limits.retry_after_s())

    async def _queued(self, plan: ResponsePlan) -> tuple[ResolvedContext, TurnSpec]:
        """Keep a response as queued, behind a turn that the history has, as `start_turns` finds one."""
        context, unknown = plan.context, None
        for memory in Memory:
            resolved = await self._services.run_cpu(plan.owner, context.thought, context.find, memory)
            (spec,) = plan.specs(resolved)
            assert plan.draft is not None
            name = plan.draft.response_id
            await self._services.read(
                plan.owner, self._services.history.claims.take, name
            )  # before it is seen
            job = encode_job(spec, plan.draft)
            change = QueueResponse(draft=plan.draft, job=job, parent_id=resolved.node.parent_id)
            try:
                await self._services.engine.apply(change)
                return resolved, spec
            except UnknownTurnError as error:
                unknown = error
                if resolved.parent is not None:
                    resolved.index.forget(plan.owner, resolved.parent.turn_id)
            except UNANSWERED:
                self._num_doubts += 1
                raise
        assert unknown is not None
        raise unknown

    def _is_being_queued(self, owner: str, response_id: str) -> bool:
        """Whether it stands in the history before the engine has said so."""
        drafts = [plan.draft for plan in self._being_queued if plan.owner == owner]
        return any(draft is not None and draft.response_id == response_id for draft in drafts)

    def _start(
        self,
        run: ResponseRun,
        draft: ResponseDraft,
        work: Callable[[], Awaitable[None]],
        unlock: Callable[[], None],
    ) -> None:
        """Have `work` bring a response to its end."""
        key = (draft.owner, draft.response_id)
        self._runs[key] = run

        async def drive() -> None:
            is_expected = False
            try:
                await work()
                is_expected = True
            except asyncio.CancelledError:  # whoever cancelled it says what became of it
                is_expected = True
                raise
            finally:
                try:
                    if not is_expected:  # queued, it would be run and fail again and again
                        await self._driver.fail(run, draft, internal_error())
                finally:
                    del self._runs[key]
                    self._services.history.claims.give_up(draft.response_id)
                    self._ends.end(key)
                    unlock()

        run.task = asyncio.ensure_future(drive())

    async def _adopt_left(self) -> None:
        """Run what is left behind: by an earlier server or engine, or by a change whose answer was lost."""
        services, epoch, looked_s, is_logged = self._services, 0, -math.inf, False
        while True:
            now_s = asyncio.get_running_loop().time()
            # Of servers that share a history one may die and leave some, at any time.
            is_time = services.history.claims.are_shared and now_s - looked_s >= LOOK_S
            is_new = epoch != services.engine.epoch
            if services.engine.state == "ready" and (is_new or self.is_in_doubt or is_time):
                asked, looked_s = services.engine.epoch, now_s
                try:
                    await self.settle()
                    epoch, is_logged = asked, False
                except UNANSWERED:  # still in doubt, or there is another engine soon
                    pass
                except PensieveError as error:  # a history that refuses, say: what is queued is run later
                    if not is_logged:
                        _log.error("background responses could not be run; trying again", exc_info=error)
                        is_logged = True
            await asyncio.sleep(RETRY_S)

    def _locked(self, draft: ResponseDraft) -> Callable[[], None]:
        """Lock the conversation that a response is appended to, unless a turn of it runs; what unlocks it."""
        if draft.conversation is None:
            return lambda: None
        lock = (draft.owner, draft.conversation.conversation_id)
        if lock in self._locks:  # the one of both that ends last will find that the conversation has changed
            return lambda: None
        self._locks.add(lock)
        return lambda: self._locks.discard(lock)


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
                sentence = "The server is about to end; the response goes on when it is back."
                run.fail(overloaded(sentence, MAX_RETRY_AFTER_S))
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


class _Job(msgspec.Struct):
    node: TurnNode
    draft: ResponseDraft
    params: SamplingParams
    prompt_token_ids: list[int]
    messages: list[dict[str, Any]]


def encode_job(spec: TurnSpec, draft: ResponseDraft) -> bytes:
    """The job of a turn with a node, and of what is kept with it."""
    assert spec.node is not None
    job = _Job(
        node=replace(spec.node, attachment=None),
        draft=draft,
        params=spec.params,
        prompt_token_ids=list(spec.prompt_token_ids),
        messages=[dict(message) for message in spec.messages or ()],
    )
    return msgspec.msgpack.encode(job)


def decode_job(job: bytes) -> tuple[TurnSpec, ResponseDraft]:
    """The turn of a job, with its draft attached to its node, and the draft.

    Raises msgspec.DecodeError for bytes that are no job of this release.
    """
    kept = msgspec.msgpack.decode(job, type=_Job)
    node = replace(kept.node, attachment=kept.draft)
    return TurnSpec(kept.prompt_token_ids, kept.params, messages=tuple(kept.messages), node=node), kept.draft


def draft_of(record: ResponseRecord) -> ResponseDraft:
    """What its record says of a response whose job cannot be read."""
    names = ("response_id", "owner", "request", "input_items", "output_item_id", "created_at_s")
    return ResponseDraft(
        **{name: getattr(record, name) for name in names}, expires_at_s=record.expires_at_s, background=True
    )


async def expire_now_and_then(services: Services) -> None:
    """Have the history forget what has expired, until this is cancelled."""
    while True:
        if services.engine.state == "ready":
            now_s = services.now_s()
            with suppress(PensieveError):  # the next time
                await services.engine.apply(Expire(now_s=now_s))
                while await services.read(
                    "", services.history.has_expired, now_s
                ):  # a few at a time, with steps in between
                    await services.engine.apply(Expire(now_s=now_s))
        await asyncio.sleep(_PERIOD_S)
