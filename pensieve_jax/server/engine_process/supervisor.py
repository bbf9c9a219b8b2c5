"""An `EngineService` that restarts its engine process when it dies.

Owns: the engine's state, the decision to restart or to give up, draining, and shutdown.
Does not know: how a process is started, the message format, or HTTP.
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
# The front end keeps reading the old history file. It would not see what an engine writes to another file.
_HISTORY_IS_GONE: Final = (HistoryCorruptError, HistoryMismatchError, HistoryMissingError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Limits for restarting an engine that died.

    Attributes:
      max_restarts, within_s: at most `max_restarts` restarts in `within_s` seconds; after the next death, the
        engine stays dead.
      first_delay_s, longest_delay_s: the delay before the second restart, doubled for each later one up to
        the longest. The first restart is immediate.
    """

    max_restarts: int = 5
    within_s: float = 600.0
    first_delay_s: float = 1.0
    longest_delay_s: float = 30.0

    def delay_s(self, num_before: int) -> float:
        """Return the delay before a restart that follows `num_before` recent restarts."""
        if not num_before:
            return 0.0
        return min(self.first_delay_s * 2 ** (num_before - 1), self.longest_delay_s)


class SupervisedEngine:
    """Engine that is restarted when it dies; see `EngineService` for the contracts of its methods.

    Attributes:
      gave_up: set when the engine is not restarted any more: it died too often, or its history is unusable.
      is_damaged: whether the history is unusable: it is missing, it was damaged and has been moved aside, or
        it belongs to another model.
    """

    def __init__(
        self,
        begin: Begin,
        *,
        restarts: RestartPolicy | None = None,
        patience_s: float = 10.0,
        answer_s: float = 30.0,
    ) -> None:
        """Create the engine without starting it.

        Args:
          begin: starts one engine process.
          restarts: the limits for calling `begin` again.
          patience_s: how long a process may take to end, or to cancel its turns, before it is killed.
          answer_s: how long a call or a change may take. Without a limit, calls to a hanging engine pile up.
        """
        self.gave_up = asyncio.Event()
        self.is_damaged = False
        self._begin = begin
        self._restarts = restarts or RestartPolicy()
        self._patience_s = patience_s
        self._answer_s = answer_s
        self._numbers = numbering()
        self._state: EngineState = "starting"
        self._epoch = 0
        self._info: EngineInfo | None = None
        self._handle: EngineHandle | None = None
        self._connection: EngineConnection | None = None
        self._watch: asyncio.Task[None] | None = None
        self._starts_s: deque[float] = deque()

    # As EngineService

    @property
    def info(self) -> EngineInfo:
        """Description of the engine; raises EngineClosedError before the engine is ready."""
        if self._info is None:
            raise EngineClosedError("The engine is starting; wait until it is ready.")
        return self._info

    @property
    def state(self) -> EngineState:
        """Engine state. A dead engine is never "ready", even before its restart has begun."""
        has_died = self._connection is not None and self._connection.lost.is_set()
        return "starting" if self._state == "ready" and has_died else self._state

    @property
    def epoch(self) -> int:
        """Number of times that the engine became ready."""
        return self._epoch

    @property
    def last_heard_s(self) -> float:
        """Seconds since the latest message of the engine's process, which sends one every second."""
        return float("inf") if self._connection is None else time.monotonic() - self._connection.last_heard_s

    @property
    def last_stats(self) -> dict[str, float]:
        """Counters of the engine, at most a second old while it runs."""
        return {} if self._connection is None else self._connection.stats

    def submit(self, spec: TurnSpec) -> RunningTurn:
        """Queue a turn; raises EngineClosedError while the engine accepts no turns."""
        return self.submit_all([spec])[0]

    def submit_all(self, specs: Sequence[TurnSpec]) -> list[RunningTurn]:
        """Queue all turns, or none of them."""
        connection = self._open_for_turns()
        sent = [
            (sent_spec(next(self._numbers), spec), None if spec.node is None else spec.node.turn_id)
            for spec in specs
        ]
        return connection.submit(sent)

    async def apply(self, change: HistoryChange) -> None:
        """Change the history's tables other than turns.

        Raises EngineClosedError if no answer arrives in time; the change may then still be made.
        """
        await self._in_time(self._open().apply(change))

    async def call(self, name: str, *arguments: Any) -> Any:
        """Call one of `calls.CALLS` by name; raises EngineClosedError if no answer arrives in time."""
        if not isinstance(name, str):
            raise InvalidRequestError("call", name, "the name of a method, such as 'stats'")
        try:
            return await self._in_time(self._open().call(name, arguments))
        except WireError as error:
            limit = "plain values, which can be sent to the engine's process"
            raise InvalidRequestError(f"{name}(...)", list(arguments), limit, str(error)[:-1]) from error

    async def drain(self, deadline_s: float) -> None:
        """Accept no more turns and wait for the running ones; cancel them after `deadline_s` seconds."""
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
        """Wait for cancelled turns to end; kill an engine that hangs, because the wait would never end."""
        try:
            async with asyncio.timeout(self._patience_s):
                await connection.idle()
        except TimeoutError:
            _log.error("The engine did not cancel its turns within %g s and is killed.", self._patience_s)
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
            sentence = f"The engine has not answered within {self._answer_s:g} s; it may still do the work."
            raise EngineClosedError(sentence) from None

    # Engine processes

    async def open(self) -> None:
        """Start the engine and wait until it is ready.

        Raises the error of the start: ConfigError, model_defs.ModelError, HistoryError; EngineDiedError if
        the process died or cannot be started; EngineClosedError if the engine was stopped meanwhile.
        """
        self._state = "starting"
        try:
            error = await self._start_once()
            if error is not None:
                raise received_error(error)
        except BaseException:
            self._state = "dead"
            raise
        self._watch = asyncio.create_task(self._keep_alive())
        self._watch.add_done_callback(self._watch_ended)

    async def close(self) -> None:
        """Cancel running turns and stop the engine; a second call does nothing."""
        self._state = "dead"
        try:
            if self._watch is not None:
                self._watch.cancel()
                await asyncio.wait([self._watch])
                self._watch = None
            await self._reap()
        finally:
            self.kill()  # the process may still run if the wait above was cancelled

    def kill(self) -> None:
        """Stop the engine for good by killing its process, without waiting."""
        self._state = "dead"
        self.kill_process()

    def kill_process(self) -> None:
        """Kill the process of a hanging engine. It is then restarted as after any death."""
        if self._handle is not None:
            self._handle.kill()

    def _open(self) -> EngineConnection:
        """Return the connection for calls, which are also allowed while the engine drains."""
        if self._connection is None or self._state not in ("ready", "draining"):
            raise EngineClosedError(f"The engine accepts no calls: it is {self._state}.")
        return self._connection

    def _open_for_turns(self) -> EngineConnection:
        if self._connection is None or self.state != "ready":
            raise EngineClosedError(f"The engine accepts no turns: it is {self.state}.")
        return self._connection

    async def _start_once(self) -> SentError | None:
        """Start a process and wait until it is ready. Return None, or the error that the engine reported.

        A process that does not become ready is ended. Raises EngineDiedError if the process died or could not
        be started, and EngineClosedError if the engine was stopped meanwhile.
        """
        try:
            found = await self._opening()
            if not self._is_starting():
                raise EngineClosedError(f"The engine was stopped while it started: it is {self._state}.")
        except EngineDiedError as error:
            how = await self._reap()
            raise EngineDiedError(f"The engine's process died before it was ready: it {how}.") from error
        except OSError as error:  # too many processes or open files, no memory
            await self._kill_and_reap()
            problem = error.strerror or str(error)
            raise EngineDiedError(f"The engine's process cannot be started: {problem}.") from error
        except BaseException:
            await self._kill_and_reap()
            raise
        if isinstance(found, SentError):
            await self._reap()
            return found
        self._info = found
        self._epoch += 1
        self._state = "ready"
        return None

    async def _opening(self) -> EngineInfo | SentError:
        """Start a process and wait for its first message."""
        handle = self._handle = await self._begin()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(
            lambda: EngineConnection(self._numbers), sock=handle.front
        )
        self._connection = connection
        if handle.greeting is not None:
            may_make = handle.greeting.may_make_history and not self._epoch
            connection.send(msgspec.structs.replace(handle.greeting, may_make_history=may_make))
        return await connection.opening

    def _is_starting(self) -> bool:
        """Return whether the engine is still to be started, as it may be stopped during a wait."""
        return self._state == "starting"

    async def _kill_and_reap(self) -> None:
        if self._handle is not None:
            self._handle.kill()
        await self._reap()

    async def _reap(self) -> str:
        """Close the socket, wait for the end of the process or kill it, and return how it ended."""
        handle, connection = self._handle, self._connection
        if connection is not None:
            connection.close()
            await self._lost_or_cut_off(connection)
        if handle is None:
            return "was never started"
        handle.front.close()
        try:
            async with asyncio.timeout(self._patience_s):
                how = await handle.wait()
        except TimeoutError:
            handle.kill()
            how = await handle.wait()
        self._handle = None  # not earlier: after a cancelled wait, `close` and `kill` still need it
        return how

    async def _lost_or_cut_off(self, connection: EngineConnection) -> None:
        """Wait until the socket is closed; kill a hanging engine, which does not read and keeps it open."""
        try:
            async with asyncio.timeout(self._patience_s):
                await connection.lost.wait()
        except TimeoutError:
            if self._handle is not None:
                self._handle.kill()
            connection.abort()
            await connection.lost.wait()

    async def _keep_alive(self) -> None:
        """Restart the engine whenever it dies, until it died too often; do not restart a draining engine."""
        while self._connection is not None:
            await self._connection.lost.wait()
            is_wanted, was_killed = self._state == "ready", self._state == "dead"
            self._state = "starting" if is_wanted else "dead"
            how = await self._reap()
            if not was_killed:
                _log.error("The engine's process %s.", how)
            if not is_wanted or not await self._restart():
                if self._is_starting():
                    self.gave_up.set()
                self._state = "dead"
                return

    def _watch_ended(self, watch: asyncio.Task[None]) -> None:
        """Mark the engine as dead when the restart task ends, and log its error if it failed."""
        self._state = "dead"
        error = None if watch.cancelled() else watch.exception()
        if error is not None:
            _log.error("The engine cannot be restarted.", exc_info=error)
            self.gave_up.set()

    async def _restart(self) -> bool:
        """Retry the start until the engine is ready; return False if that is hopeless or it was stopped."""
        while self._is_starting():
            now_s = time.monotonic()
            while self._starts_s and now_s - self._starts_s[0] > self._restarts.within_s:
                self._starts_s.popleft()
            num_before = len(self._starts_s)
            if num_before >= self._restarts.max_restarts:
                _log.error(
                    "The engine died %d times in %g s and is given up.", num_before, self._restarts.within_s
                )
                return False
            await asyncio.sleep(self._restarts.delay_s(num_before))
            if not self._is_starting():
                break
            self._starts_s.append(time.monotonic())
            try:
                problem = await self._start_once()
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
                _log.error("The engine cannot restart: %s", error)
                self.is_damaged = True
                return False
            _log.error("The engine cannot start: %s", error)
        return False
