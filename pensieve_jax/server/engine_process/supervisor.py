"""An engine that is started again when it dies, as one `EngineService` over all its lives.

Owns: its state, when to start it again and when to give up, draining, and the end.
Does not know: how a life begins, what a message looks like, or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pensieve_jax.core.errors import (
    EngineClosedError,
    EngineDiedError,
    HistoryCorruptError,
    HistoryMismatchError,
    HistoryMissingError,
    InvalidRequestError,
)
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.history.server_tables.changes import HistoryChange
from pensieve_jax.server.async_engine import EngineInfo, EngineState
from pensieve_jax.server.engine_process.client import EngineConnection, numbering
from pensieve_jax.server.engine_process.messages import SentError, received_error, sent_spec
from pensieve_jax.server.engine_process.running_turn import RunningTurn
from pensieve_jax.server.engine_process.spawn import Begin, EngineHandle
from pensieve_jax.server.engine_process.wire import WireError

_log = logging.getLogger(__name__)
# The front goes on reading the old file: an engine over another one would write what nobody finds.
_HISTORY_IS_GONE: Final = (HistoryCorruptError, HistoryMismatchError, HistoryMissingError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """How often an engine that died is started again.

    Attributes:
      most, within_s: so many times in so many seconds; with the next death it stays dead.
      first_delay_s, longest_delay_s: before the second of these starts, doubled for each one that follows;
        the first is at once.
    """

    most: int = 5
    within_s: float = 600.0
    first_delay_s: float = 1.0
    longest_delay_s: float = 30.0

    def delay_s(self, num_before: int) -> float:
        """How long to wait after so many starts."""
        if not num_before:
            return 0.0
        return min(self.first_delay_s * 2 ** (num_before - 1), self.longest_delay_s)


class SupervisedEngine:
    """An engine elsewhere; see `EngineService` for what its methods promise.

    Attributes:
      gave_up: set when it is not started again: it died too often, or its history is gone.
      is_damaged: that its history is gone: it is missing, was damaged and has been set aside, or is not of
        this model.
    """

    def __init__(
        self,
        begin: Begin,
        *,
        restarts: Restarts | None = None,
        patience_s: float = 10.0,
        answer_s: float = 30.0,
    ) -> None:
        """Nothing is started yet.

        Args:
          begin: starts one life.
          restarts: when it is called again.
          patience_s: how long a life may take to end, or to cancel its turns, before it is killed.
          answer_s: how long a call or a change may take; an engine that is stuck would collect them.
        """
        self.gave_up = asyncio.Event()
        self.is_damaged = False
        self._begin = begin
        self._restarts = restarts or Restarts()
        self._patience_s = patience_s
        self._answer_s = answer_s
        self._numbers = numbering()
        self._state: EngineState = "starting"
        self._epoch = 0
        self._info: EngineInfo | None = None
        self._life: EngineHandle | None = None
        self._connection: EngineConnection | None = None
        self._watch: asyncio.Task[None] | None = None
        self._starts_s: deque[float] = deque()

    # As EngineService

    @property
    def info(self) -> EngineInfo:
        """What the engine said of itself; raises EngineClosedError before it is ready."""
        if self._info is None:
            raise EngineClosedError("The engine is starting; wait until it is ready.")
        return self._info

    @property
    def state(self) -> EngineState:
        """What it can be asked for; an engine that has died is none that is ready, whoever asks first."""
        has_died = self._connection is not None and self._connection.lost.is_set()
        return "starting" if self._state == "ready" and has_died else self._state

    @property
    def epoch(self) -> int:
        """Counts the times that it became ready."""
        return self._epoch

    @property
    def last_heard_s(self) -> float:
        """Seconds since the engine's process said anything; it does once a second."""
        return float("inf") if self._connection is None else time.monotonic() - self._connection.last_heard_s

    @property
    def last_stats(self) -> dict[str, float]:
        """The engine's counters, at most a second old while it runs."""
        return {} if self._connection is None else self._connection.stats

    def submit(self, spec: TurnSpec) -> RunningTurn:
        """Queue a turn; raises EngineClosedError while none is taken."""
        return self.submit_all([spec])[0]

    def submit_all(self, specs: Sequence[TurnSpec]) -> list[RunningTurn]:
        """Queue turns, all or none."""
        connection = self._open_for_turns()
        sent = [
            (sent_spec(next(self._numbers), spec), None if spec.node is None else spec.node.turn_id)
            for spec in specs
        ]
        return connection.submit(sent)

    async def apply(self, change: HistoryChange) -> None:
        """Change what the history keeps beside turns; EngineClosedError without an answer leaves it open."""
        await self._in_time(self._open().apply(change))

    async def call(self, name: str, *arguments: Any) -> Any:
        """One of `calls.CALLS` by name; raises EngineClosedError without an answer."""
        if not isinstance(name, str):
            raise InvalidRequestError("call", name, "the name of a method, such as 'stats'")
        try:
            return await self._in_time(self._open().call(name, arguments))
        except WireError as error:
            limit = "plain values, which can cross to the engine's process"
            raise InvalidRequestError(f"{name}(...)", list(arguments), limit, str(error)[:-1]) from error

    async def drain(self, deadline_s: float) -> None:
        """Take no more turns, and wait for those that run, or cancel them when the time is over."""
        is_number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
        if not is_number or not 0 <= deadline_s < math.inf:
            raise InvalidRequestError("deadline_s", deadline_s, "a finite number of seconds, at least 0")
        if self._state == "dead" or self._connection is None:
            return
        self._state, connection = "draining", self._connection
        try:
            async with asyncio.timeout(deadline_s):
                await connection.idle()
        except TimeoutError:
            connection.cancel_all()
            await self._idle_or_killed(connection)

    async def _idle_or_killed(self, connection: EngineConnection) -> None:
        """Wait for what was cancelled; an engine that is stuck would have everybody wait for ever."""
        try:
            async with asyncio.timeout(self._patience_s):
                await connection.idle()
        except TimeoutError:
            _log.error("The engine cancelled no turn within %g s, and is killed.", self._patience_s)
            self.kill()
            await connection.lost.wait()

    async def _in_time[T](self, asked: Awaitable[T]) -> T:
        limit = asyncio.timeout(self._answer_s)
        try:
            async with limit:
                return await asked
        except TimeoutError:
            if not limit.expired():
                raise
            sentence = f"The engine has not answered within {self._answer_s:g} s; it may still do so."
            raise EngineClosedError(sentence) from None

    # Its lives

    async def open(self) -> None:
        """Start the engine and wait until it is ready.

        Raises what keeps it from starting: ConfigError, model_defs.ModelError, HistoryError; EngineDiedError
        if its process died or the system cannot start one; EngineClosedError if it was told to end meanwhile.
        """
        self._state = "starting"
        try:
            error = await self._live()
            if error is not None:
                raise received_error(error)
        except BaseException:
            self._state = "dead"
            raise
        self._watch = asyncio.create_task(self._keep_alive())
        self._watch.add_done_callback(self._watch_ended)

    async def close(self) -> None:
        """Cancel what runs and end the engine; a second call does nothing."""
        self._state = "dead"
        try:
            if self._watch is not None:
                self._watch.cancel()
                await asyncio.wait([self._watch])
                self._watch = None
            await self._bury()
        finally:
            self.kill()  # one that has not ended, because whoever waited for that was cancelled

    def kill(self) -> None:
        """End it at once, without waiting for anything."""
        self._state = "dead"
        self.kill_life()

    def kill_life(self) -> None:
        """Kill the engine's process, of an engine that is stuck: it is started again as after any death."""
        if self._life is not None:
            self._life.kill()

    def _open(self) -> EngineConnection:
        """The engine, for what can be asked of it while it drains, too."""
        if self._connection is None or self._state not in ("ready", "draining"):
            raise EngineClosedError(f"The engine takes no calls: it is {self._state}.")
        return self._connection

    def _open_for_turns(self) -> EngineConnection:
        if self._connection is None or self.state != "ready":
            raise EngineClosedError(f"The engine takes no turns: it is {self.state}.")
        return self._connection

    async def _live(self) -> SentError | None:
        """Begin a life; returns why it is none, or when it is ready. One that does not become ready is ended.

        Raises EngineDiedError if it died or could not begin; EngineClosedError if it is not wanted any more.
        """
        try:
            found = await self._opening()
            if not self._is_starting():
                raise EngineClosedError(f"The engine is not wanted any more: it is {self._state}.")
        except EngineDiedError as error:
            how = await self._bury()
            raise EngineDiedError(f"The engine's process died before it was ready: it {how}.") from error
        except OSError as error:  # too many processes or open files, no memory
            await self._kill_and_bury()
            problem = error.strerror or str(error)
            raise EngineDiedError(f"The engine's process cannot be started: {problem}.") from error
        except BaseException:
            await self._kill_and_bury()
            raise
        if isinstance(found, SentError):
            await self._bury()
            return found
        self._info = found
        self._epoch += 1
        self._state = "ready"
        return None

    async def _opening(self) -> EngineInfo | SentError:
        """Begin a life, and wait for the first that it says."""
        life = self._life = await self._begin()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(
            lambda: EngineConnection(self._numbers), sock=life.front
        )
        self._connection = connection
        if life.greeting is not None:
            may_make = life.greeting.may_make_history and not self._epoch
            connection.send(msgspec.structs.replace(life.greeting, may_make_history=may_make))
        return await connection.opening

    def _is_starting(self) -> bool:
        """Whether nobody has told it to end."""
        return self._state == "starting"

    async def _kill_and_bury(self) -> None:
        if self._life is not None:
            self._life.kill()
        await self._bury()

    async def _bury(self) -> str:
        """Wait for the end of a life whose socket is closed, or end it; how it ended."""
        life, connection = self._life, self._connection
        if connection is not None:
            connection.close()
            await self._lost_or_cut_off(connection)
        if life is None:
            return "never began"
        life.front.close()
        try:
            async with asyncio.timeout(self._patience_s):
                how = await life.wait()
        except TimeoutError:
            life.kill()
            how = await life.wait()
        self._life = None  # only now: whoever cancels this wait, or ends the server meanwhile, must find it
        return how

    async def _lost_or_cut_off(self, connection: EngineConnection) -> None:
        """Wait for the end of a socket, which an engine that is stuck keeps open: it reads nothing more."""
        try:
            async with asyncio.timeout(self._patience_s):
                await connection.lost.wait()
        except TimeoutError:
            if self._life is not None:
                self._life.kill()
            connection.abort()
            await connection.lost.wait()

    async def _keep_alive(self) -> None:
        """Whenever the engine dies, start it again, until it died too often; draining engines stay dead."""
        while self._connection is not None:
            await self._connection.lost.wait()
            is_wanted, was_killed = self._state == "ready", self._state == "dead"
            self._state = "starting" if is_wanted else "dead"
            how = await self._bury()
            if not was_killed:
                _log.error("The engine's process %s.", how)
            if not is_wanted or not await self._live_again():
                if self._is_starting():
                    self.gave_up.set()
                self._state = "dead"
                return

    def _watch_ended(self, watch: asyncio.Task[None]) -> None:
        """Nobody starts the engine again; whoever watches over the server must know why."""
        self._state = "dead"
        error = None if watch.cancelled() else watch.exception()
        if error is not None:
            _log.error("The engine cannot be started again.", exc_info=error)
            self.gave_up.set()

    async def _live_again(self) -> bool:
        """Start until it is ready; False when that is of no use, or it is told to end meanwhile."""
        while self._is_starting():
            now_s = time.monotonic()
            while self._starts_s and now_s - self._starts_s[0] > self._restarts.within_s:
                self._starts_s.popleft()
            num_before = len(self._starts_s)
            if num_before >= self._restarts.most:
                _log.error("The engine died %d times in %g s: given up.", num_before, self._restarts.within_s)
                return False
            await asyncio.sleep(self._restarts.delay_s(num_before))
            if not self._is_starting():
                break
            self._starts_s.append(time.monotonic())
            try:
                problem = await self._live()
            except EngineDiedError as died:
                _log.error("%s", died)
                continue
            except EngineClosedError:
                break
            if problem is None:
                _log.info("The engine is ready again, after %.1f s.", time.monotonic() - now_s)
                return True
            error = received_error(problem)
            if isinstance(error, _HISTORY_IS_GONE):
                _log.error("The engine cannot start again: %s", error)
                self.is_damaged = True
                return False
            _log.error("The engine cannot start: %s", error)
        return False
