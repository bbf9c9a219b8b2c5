"""The front end's side of the socket: turns as asynchronous iterators, and answers to calls.

Owns: the turns, calls and waiters of one engine process.
Does not know: how an engine is started, or what a prompt is.

The connection holds only weak references to turns, so that a turn is cancelled when its caller drops it. A
caller that fails or is cancelled thus needs no clean-up for its turn. The event loop keeps the tasks that
wait for a turn.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

from pensieve_jax.core.errors import EngineDiedError, PensieveError
from pensieve_jax.history.server_tables.changes import HistoryChange
from pensieve_jax.server.async_engine import EngineInfo
from pensieve_jax.server.engine_process.messages import (
    Answer,
    Call,
    Cancel,
    Ending,
    EngineMessage,
    Failed,
    Ready,
    Report,
    SentError,
    SentTurn,
    received_error,
    sent_change,
    submission,
)
from pensieve_jax.server.engine_process.running_turn import RunningTurn
from pensieve_jax.server.engine_process.wire import FrameReader, FrameWriter, WireError

_LOST = (
    "The engine's process died. Conversations keep their last committed turn; the history may already "
    "contain this turn."
)


class EngineConnection(asyncio.Protocol):
    """Connection to one engine process, used from one event loop.

    Attributes:
      opening: the engine's first message: its description, or the error of its start. The future raises
        EngineDiedError if the process died before.
      lost: set when the socket is closed; all waiters are then notified at once.
      stats: the latest counters that the engine sent.
      last_heard_s: the time of the engine's latest message, by `time.monotonic`.
    """

    def __init__(self, numbers: Iterator[int]) -> None:
        """Take the numbers of turns and calls from `numbers`, which later engine processes share."""
        self._loop = asyncio.get_running_loop()
        self.opening: asyncio.Future[EngineInfo | SentError] = self._loop.create_future()
        self.lost = asyncio.Event()
        self.stats: dict[str, float] = {}
        self.last_heard_s = time.monotonic()
        self._numbers = numbers
        self._reader = FrameReader(EngineMessage.__value__)
        self._writer = FrameWriter()
        self._transport: asyncio.Transport | None = None
        self._problem: WireError | None = None
        self._turns: dict[int, weakref.ref[RunningTurn]] = {}
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._idle: list[asyncio.Future[None]] = []

    # Outgoing messages

    def send(self, message: Any) -> None:
        """Write a message; raises EngineDiedError if the connection is closed, and WireError."""
        self._write(self._writer.frame(message))

    def submit(self, turns: Sequence[tuple[SentTurn, str | None]]) -> list[RunningTurn]:
        """Send all turns or none, with their ids if they have one. Only the turns raise errors."""
        problem: EngineDiedError | WireError | None = None
        try:
            self.send(submission([turn for turn, _ in turns]))
        except (EngineDiedError, WireError) as error:
            problem = error
        found = []
        for sent, turn_id in turns:
            number = sent.number
            has_logprobs = sent.params.logprobs is not None
            turn = RunningTurn(self, number, turn_id or f"turn-{number}", has_logprobs=has_logprobs)
            if problem is None:
                self._turns[number] = weakref.ref(turn, partial(self._dropped, number))
            else:
                turn.fail(problem)
            found.append(turn)
        return found

    def refused(self, number: int, error: Exception) -> RunningTurn:
        """Return a turn that was not sent and that raises `error`."""
        turn = RunningTurn(self, number, f"turn-{number}", has_logprobs=False)
        turn.fail(error)
        return turn

    def cancel(self, *numbers: int) -> None:
        """Ask the engine to cancel turns; it reports their ends like any other."""
        if not self.lost.is_set():
            self.send(Cancel(list(numbers)))

    def cancel_all(self) -> None:
        """Ask the engine to cancel every turn."""
        if self._turns:
            self.cancel(*self._turns)

    async def call(self, name: str, arguments: Sequence[Any]) -> Any:
        """Send a call and wait for its answer; raises the call's error."""
        number = next(self._numbers)
        return await self._answer(number, Call(number, name, list(arguments)))

    async def apply(self, change: HistoryChange) -> None:
        """Send a change of the history and wait for its answer; raises the change's error."""
        number = next(self._numbers)
        await self._answer(number, sent_change(number, change))

    async def idle(self) -> None:
        """Wait until no turn runs."""
        while self._turns:
            waiter = self._loop.create_future()
            self._idle.append(waiter)
            await waiter

    async def wait_for_change(self, number: int) -> None:
        """Wait until a turn is accepted, has a new delta, or ends."""
        waiter = self._loop.create_future()
        self._waiting.setdefault(number, []).append(waiter)
        await waiter

    def close(self) -> None:
        """Close the socket once all data is sent; this stops the engine."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the socket at once, without sending buffered data."""
        if self._transport is not None:
            self._transport.abort()

    def _write(self, frame: bytearray) -> None:
        if self._transport is None or self.lost.is_set() or self._transport.is_closing():
            raise EngineDiedError(_LOST)
        self._transport.write(frame)

    async def _answer(self, number: int, message: Any) -> Any:
        answer = self._calls[number] = self._loop.create_future()
        try:
            self.send(message)
            return await answer
        finally:
            del self._calls[number]

    def _dropped(self, number: int, _: weakref.ref[RunningTurn]) -> None:
        """Cancel a garbage-collected turn. The collector may run in another thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.cancel, number)

    # Incoming data, called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport of the new connection."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Note that the engine is alive, and handle each complete message."""
        self.last_heard_s = time.monotonic()
        try:
            for message in self._reader.feed(data):
                self._receive(message)
        except WireError as error:
            self._give_up(error)

    def eof_received(self) -> None:
        """Check that the stream of the stopped engine ended between two frames."""
        try:
            self._reader.finish()
        except WireError as error:
            self._give_up(error)

    def connection_lost(self, error: Exception | None) -> None:
        """Set `lost`, then fail every turn and call, so that their waiters find it set."""
        self.lost.set()
        died = EngineDiedError(_LOST if self._problem is None else f"{_LOST} {self._problem}")
        for number in list(self._turns):
            self._end(number, lambda turn: turn.fail(died))
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(died)
        if not self.opening.done():
            self.opening.set_exception(died)
            self.opening.exception()  # marks it as retrieved, as no caller may wait for it any more

    def _give_up(self, problem: WireError) -> None:
        self._problem = problem
        self.abort()

    def _receive(self, message: Ready | Failed | Report) -> None:
        if isinstance(message, Report):
            self._take_report(message)
        elif not self.opening.done():
            self.opening.set_result(message.info if isinstance(message, Ready) else message.error)

    def _take_report(self, report: Report) -> None:
        turns, waiting = self._turns, self._waiting
        for number in report.accepted:
            turn = self._turn(number)
            if turn is not None:
                turn.accept()
                self._wake(number)
        logprobs = report.logprobs
        for number, text, ids in zip(report.numbers, report.texts, report.token_ids, strict=True):
            ref = turns.get(number)
            if ref is not None and (turn := ref()) is not None:
                turn.add(text, ids, logprobs.get(number) if logprobs else None)
                if number in waiting:
                    self._wake(number)
        for ending in report.endings:
            self._end(ending.number, _ending_of(ending))
        for answer in report.answers:
            self._take_answer(answer)
        if report.stats is not None:
            self.stats = report.stats

    def _turn(self, number: int) -> RunningTurn | None:
        ref = self._turns.get(number)
        return None if ref is None else ref()

    def _wake(self, number: int) -> None:
        for waiter in self._waiting.pop(number, ()):
            if not waiter.done():
                waiter.set_result(None)

    def _end(self, number: int, settle: Callable[[RunningTurn], None]) -> None:
        turn = self._turn(number)
        self._turns.pop(number, None)
        if turn is not None:
            settle(turn)
        self._wake(number)
        if not self._turns:
            idle, self._idle = self._idle, []
            for waiter in idle:
                if not waiter.done():
                    waiter.set_result(None)

    def _take_answer(self, answer: Answer) -> None:
        waiter = self._calls.get(answer.number)
        if waiter is None or waiter.done():
            return
        if answer.error is not None:
            waiter.set_exception(received_error(answer.error))
        else:
            waiter.set_result(answer.value)


def _ending_of(ending: Ending) -> Callable[[RunningTurn], None]:
    """Return the function that applies an ending to its turn."""
    output, error = ending.output, ending.error
    if output is not None:
        return lambda turn: turn.end(output)
    failure = PensieveError("The turn ended without a result.") if error is None else received_error(error)
    return lambda turn: turn.fail(failure)


def numbering() -> Iterator[int]:
    """Return the numbers of turns and calls, which are unique across restarts of an engine."""
    return itertools.count(1)
