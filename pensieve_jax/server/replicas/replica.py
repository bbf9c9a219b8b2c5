"""The replica's side: runs the turns and calls of front ends on one engine.

Owns: the reports of turns that were submitted together, the report rate, and the handling of duplicate turns.
Does not know: Ray, routing, or what a front end does when this replica is lost.

A report is sent at once if a turn begins or ends, and otherwise at most once every 20 ms, because a message
costs both processes more than the tokens in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from pensieve_jax.core.errors import EngineClosedError, PensieveError
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.server.async_engine import AsyncTurn, EngineInfo, EngineService
from pensieve_jax.server.engine_process.messages import (
    Answer,
    Apply,
    Call,
    Ending,
    Report,
    received_change,
    received_spec,
    sent_error,
    submitted,
)
from pensieve_jax.server.replicas.links import (
    REPORT,
    ReplicaReport,
    decoded_question,
    decoded_submission,
    encoded,
)
from pensieve_jax.server.replicas.merging import OF_ALL

BATCH_S: Final = 0.02
_START_S: Final = 120.0
"""How long turns wait for an engine that restarts."""
_POLL_S: Final = 0.05


class Replica:
    """Replica with one engine, for several front ends. Use it from one event loop only."""

    def __init__(self, engine: EngineService, name: str, *, batch_s: float = BATCH_S) -> None:
        """Serve a ready engine under a unique name; a delta waits at most `batch_s` to be batched."""
        self._engine = engine
        self._name = name
        self._batch_s = batch_s
        self._running: dict[str, _Batch] = {}

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of turns without a first token. The autoscaling policy uses this value."""
        return sum(batch.queued_tokens for batch in set(self._running.values()))

    async def run(self, submission: bytes) -> AsyncGenerator[bytes]:
        """Run turns and yield their encoded `Report`s until all have ended.

        Closing the generator cancels the turns.
        """
        sent = submitted(decoded_submission(submission))
        batch = _Batch(self._batch_s)
        turn_ids: list[str] = []
        try:
            specs = [received_spec(one) for one in sent]
            turn_ids = [spec.node.turn_id for spec in specs if spec.node is not None]
            await self._take_over(turn_ids)
            self._running |= dict.fromkeys(turn_ids, batch)
            await self._submit(batch, [one.number for one in sent], specs)
            async for report in batch.reports():
                yield encoded(report)
        finally:
            await batch.close()
            for turn_id in turn_ids:
                if self._running.get(turn_id) is batch:
                    del self._running[turn_id]

    async def ask(self, question: bytes) -> bytes:
        """Return the encoded answer to a call or a history change."""
        asked = decoded_question(question)
        try:
            value = await self._answer(asked)
        except PensieveError as error:
            return encoded(Answer(asked.number, error=sent_error(error)))
        return encoded(Answer(asked.number, value))

    # Private methods

    async def _answer(self, asked: Call | Apply) -> Any:
        is_alone = isinstance(asked, Apply) or (asked.name != REPORT and asked.name not in OF_ALL)
        if is_alone:  # a question to all replicas need not wait, because the others answer it
            await self._wait_while_it_starts()
        if isinstance(asked, Apply):
            await self._engine.apply(received_change(asked))
            return None
        if asked.name == REPORT:
            engine = self._engine
            heard_s, stats = engine.last_heard_s, dict(engine.last_stats)
            return msgspec.to_builtins(
                ReplicaReport(self._name, engine.state, heard_s, stats, self._info()),
                builtin_types=(bytes,),
            )
        return await self._engine.call(asked.name, *asked.arguments)

    def _info(self) -> EngineInfo | None:
        try:
            return self._engine.info
        except EngineClosedError:
            return None

    async def _submit(self, batch: _Batch, numbers: Sequence[int], specs: Sequence[TurnSpec]) -> None:
        """Submit turns as soon as the engine accepts turns, and report a refusal."""
        try:
            await self._wait_while_it_starts()
            if batch.is_closed:
                raise EngineClosedError("The turn was submitted again; only the later submission continues.")
            batch.follow(numbers, specs, self._engine.submit_all(specs))
        except PensieveError as error:
            batch.refuse(numbers, error)

    async def _take_over(self, turn_ids: Sequence[str]) -> None:
        """Cancel earlier submissions of the same turns, because their front end is gone."""
        for batch in {self._running[turn_id] for turn_id in turn_ids if turn_id in self._running}:
            await batch.close()

    async def _wait_while_it_starts(self) -> None:
        """Wait while the engine restarts, which takes seconds. The request belongs to this replica."""
        until_s = time.monotonic() + _START_S
        while self._engine.state == "starting" and time.monotonic() < until_s:
            await asyncio.sleep(_POLL_S)


class _Batch:
    """Turns that were submitted together, and their output since the last report.

    One task per turn writes to the next report, and `reports` sends it. `_has_more` is set when the report is
    not empty; `_is_urgent` when it must not wait for the end of the interval.
    """

    def __init__(self, batch_s: float) -> None:
        self._batch_s = batch_s
        self._report = Report()  # the next one
        self._has_more = asyncio.Event()
        self._is_urgent = asyncio.Event()
        self._num_left = 0  # turns without an ending in a report
        self._queued: dict[int, int] = {}  # prompt tokens by number of turns without a first token
        self._turns: list[AsyncTurn] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None
        self.is_closed = False

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of turns without a first token."""
        return sum(self._queued.values())

    def follow(self, numbers: Sequence[int], specs: Sequence[TurnSpec], turns: Sequence[AsyncTurn]) -> None:
        """Start to report the output of these turns."""
        self._num_left = len(turns)
        self._turns = list(turns)
        for number, spec, turn in zip(numbers, specs, turns, strict=True):
            self._queued[number] = spec.num_new_tokens
            task = asyncio.ensure_future(self._follow(number, turn))
            task.add_done_callback(self._has_ended)
            self._tasks.append(task)

    def refuse(self, numbers: Sequence[int], error: PensieveError) -> None:
        """Report that the engine refused all these turns."""
        self._report.endings += [Ending(number, error=sent_error(error)) for number in numbers]
        self._wake(is_urgent=True)

    async def reports(self) -> AsyncGenerator[Report]:
        """Yield reports until all turns have ended."""
        sent_s = 0.0
        while True:
            await self._has_more.wait()
            await self._wait_until(sent_s + self._batch_s)
            if self._failure is not None:
                raise self._failure
            report, self._report = self._report, Report()
            self._has_more.clear()
            self._is_urgent.clear()
            sent_s = time.monotonic()
            yield report
            if not self._num_left and not self._has_more.is_set():
                return

    async def close(self) -> None:
        """Cancel the unfinished turns and wait for their ends. Do not call `follow` afterwards."""
        self.is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        turns, self._turns = self._turns, []
        for turn in turns:
            await turn.cancel()
        self._queued.clear()
        if self._num_left:
            self._num_left = 0
            self._wake(is_urgent=True)

    # Private methods

    async def _wait_until(self, until_s: float) -> None:
        """Wait until this time, or until the report is urgent if that is earlier."""
        left_s = until_s - time.monotonic()
        if left_s > 0 and not self._is_urgent.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._is_urgent.wait()

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        """Store an unexpected error, so that `reports` raises it and the front end does not wait for ever."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failure = self._failure or error
            self._wake(is_urgent=True)

    async def _follow(self, number: int, turn: AsyncTurn) -> None:
        report_error: PensieveError | None = None
        try:
            await turn.accepted()
            self._report.accepted.append(number)
            self._wake(is_urgent=True)
            async for delta in turn:
                is_first = self._queued.pop(number, None) is not None
                report = self._report
                report.numbers.append(number)
                report.texts.append(delta.text)
                ids = delta.token_ids
                report.token_ids.append(ids[0] if len(ids) == 1 else list(ids))
                if delta.logprobs is not None:
                    report.logprobs.setdefault(number, []).extend(delta.logprobs)
                self._wake(is_urgent=is_first)
        except PensieveError as error:
            report_error = error
        self._queued.pop(number, None)
        ending = Ending(number, turn.output)
        if report_error is not None:
            ending = Ending(number, error=sent_error(report_error))
        self._report.endings.append(ending)
        self._num_left -= 1
        self._wake(is_urgent=True)

    def _wake(self, *, is_urgent: bool) -> None:
        self._has_more.set()
        if is_urgent:
            self._is_urgent.set()
