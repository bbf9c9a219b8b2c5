"""Runs replicas on this machine behind one address: starts and stops Ray, Serve and the application.

Owns: the order in which they start and stop, and the meaning of signals.
Does not know: command lines, turns, or what the actors do.

The first SIGTERM or Ctrl-C drains: the front end accepts no more turns, and running turns get `drain_s`
seconds. During the start, when no turns run, the first signal ends the server immediately. The second signal
ends everything at once. The exit status is that of `server.main`: 0 after SIGTERM, and 130 after Ctrl-C. On
SIGHUP, the front end reloads its keys. Serve restarts a front end or replica that dies. If Ray itself dies,
the exit status is 1.

`ray.shutdown` ends Ray's processes. It is used instead of `serve.shutdown`, which waits up to half a minute
for actors that still start.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatusOverview

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.history.opening import check_reachable
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.main import EXIT_AT_ONCE, EXIT_ENDED, EXIT_INTERRUPTED
from pensieve_jax.server.replicas.plan import FLUSH_S, ReplicaPlan
from pensieve_jax.server.replicas.serve_app import FRONT, REPLICA, application
from pensieve_jax.server.replicas.startup import (
    AppStatus,
    ReplicaMonitor,
    StartReport,
    monitoring,
    problem_in_words,
    reporting_start,
)
from pensieve_jax.server.sockets import address_of, bind

_log = logging.getLogger(__name__)

APP: Final = "pensieve"
_RAY_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",  # send no usage reports to Ray's developers unless the user enables them
}
_LOGS: Final = "/tmp/ray/session_latest/logs"  # Ray's default, which docs/replicas.md names
_POLL_S: Final = 0.2
_ANSWER_S: Final = 10.0
_WATCH_S: Final = 2.0
NEEDED: Final = ("gcs_server", "raylet")
"""Processes of Ray that Ray does not restart."""
_STORE_BYTES: Final = 200_000_000  # Ray's object store, which turns do not use
_UNREACHED: Final = (RayError, RayServeException, TimeoutError)
_NOT_STARTED: Final = (RayError, RayServeException, OSError)


class ReplicasNotStartedError(PensieveError):
    """Ray, Serve or the replicas could not be started; the message includes their errors."""


def serve_replicas(plan: ReplicaPlan, settings: ServerSettings, announce: Callable[[str], None]) -> int:
    """Serve until a signal or a failure, and return the exit status. Call it in the main thread.

    `announce` is called with the address once requests are served. Raises ConfigError if there are too few
    GPUs or if the address is in use, and ReplicasNotStartedError.
    """
    check_reachable(plan.history)  # fails early; the error through Ray would be late and long
    with bind(settings.host, settings.port) as free:
        address, port = address_of(free), free.getsockname()[1]
    with LocalSignals() as signals, ExitStack() as ending:
        _log.info("starting Ray on this machine")
        try:
            with signals.interrupting():
                num_gpus = ending.enter_context(running_ray())
                signals.take_over()  # Ray has installed its own handlers
                _log.info("Ray's processes log in %s", os.path.realpath(_LOGS))
                _start(plan, settings, num_gpus, port)
        except KeyboardInterrupt:
            return signals.drained
        except SystemExit as error:
            # During its start, Ray turns a SIGTERM into an exit with that signal's number.
            if signals.is_ending or error.code == signal.SIGTERM:
                return signals.drained
            _log.error("the start stopped unexpectedly with status %s", error.code)
            return EXIT_ENDED
        except _NOT_STARTED as error:
            raise _not_started(error) from error
        _log_memory(plan.replicas)
        announce(address)
        with monitoring(ReplicaMonitor(plan.replicas, _log.warning), _app_status, _WATCH_S):
            if not _wait_for_signal(signals):
                return EXIT_ENDED
        _log.info("draining: running turns get %g s; a second signal ends them at once", settings.drain_s)
        _drain(settings.drain_s)
    return signals.drained


def _start(plan: ReplicaPlan, settings: ServerSettings, num_gpus: int, port: int) -> None:
    plan.check_gpus(num_gpus)
    _log.info("starting Ray Serve")
    serve.start(proxy_location="Disabled")  # the front end listens itself
    named = f"{plan.replicas} replica{'s' * (plan.replicas != 1)}"
    _log.info("starting %s; the first start compiles the steps, which takes minutes", named)
    app = application(plan, settings, plan.gpus_each(num_gpus), (settings.host, port))
    with reporting_start(StartReport(plan.replicas, _log.info), _app_status):
        try:
            serve.run(app, name=APP)
        except RuntimeError as error:  # Serve raises it for failed deployments; elsewhere it would be a bug
            raise _not_started(error) from error


def _application() -> ApplicationStatusOverview | None:
    """Return Serve's status of the application, or None if it is unknown.

    If Ray does not run, the status is unknown, because the query would start Ray.
    """
    if not ray.is_initialized():
        return None
    try:
        return serve.status().applications.get(APP)
    except _UNREACHED:
        return None


def _app_status() -> AppStatus | None:
    """Return the progress of the application, or None while it is unknown."""
    app = _application()
    if app is None:
        return None
    num_ready = {
        name: sum(num for state, num in one.replica_states.items() if state == "RUNNING")
        for name, one in app.deployments.items()
    }
    problems = [problem_in_words(name, one.message) for name, one in app.deployments.items()]
    problem = next((one for one in problems if one), "")
    return AppStatus(num_ready.get(REPLICA, 0), num_ready.get(FRONT, 0) > 0, problem)


def _wait_for_signal(signals: LocalSignals) -> bool:
    """Wait for the first signal that ends the server; return False if Ray has died before."""
    while (number := signals.next(_WATCH_S)) is None or number == signal.SIGHUP:
        if number is not None:
            _reload_keys()
        elif ended := _ended_processes():
            _log.error("Ray stopped unexpectedly; these processes have ended: %s", ", ".join(ended))
            return False
    return True


def _ended_processes() -> list[str]:
    """Return the names of Ray's indispensable processes that have ended."""
    node: Any = ray._private.worker._global_node
    return [] if node is None else [name for name, _ in node.dead_processes() if name in NEEDED]


def _drain(seconds: float) -> None:
    """Drain the turns while the front end still serves their clients, then stop the engines."""
    with _warning("the replicas could not be drained"):
        serve.get_app_handle(APP).drain.remote(seconds).result(timeout_s=seconds + FLUSH_S)
    with _warning("the application could not be deleted"):  # also stops engines if no front end answers
        serve.delete(APP, _blocking=False)
        until_s = time.monotonic() + FLUSH_S
        while APP in serve.status().applications and time.monotonic() < until_s:
            time.sleep(_POLL_S)


@contextmanager
def _warning(words: str) -> Iterator[None]:
    """Log a warning and continue if Ray or Serve does not answer."""
    try:
        yield
    except _UNREACHED as error:
        _log.warning("%s: %s", words, error)


def _log_memory(num_replicas: int) -> None:
    """Log what the KV cache of each replica takes. Replicas with equal lines share one."""
    with _warning("the size of the KV caches is unknown"):
        lines = serve.get_app_handle(APP).memory_in_words.remote().result(timeout_s=_ANSWER_S)
        for line, count in Counter(lines).items():
            _log.info("%d of %d replicas: %s", count, num_replicas, line)


def _reload_keys() -> None:
    try:
        problem = serve.get_app_handle(APP).reload_keys.remote().result(timeout_s=_ANSWER_S)
    except _UNREACHED as error:
        problem = f"the front end did not reload its keys: {error}"
    if problem is None:
        _log.info("keys reloaded")
    else:
        _log.error("%s", problem)


def set_ray_environment() -> None:
    """Set the environment of the processes that Ray starts here, unless the user has set the variables."""
    for name, value in _RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def running_ray() -> Iterator[int]:
    """Start Ray on this machine, unless this process has it already, and yield its number of GPUs.

    Raises ReplicasNotStartedError if Ray does not start.
    """
    is_ours = not ray.is_initialized()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # this module logs the progress itself
    try:
        if is_ours:
            _start_ray()
        yield int(ray.cluster_resources().get("GPU", 0))
    finally:
        if is_ours:
            ray.shutdown()
        else:
            serve.shutdown()


def _start_ray() -> None:
    set_ray_environment()
    try:
        ray.init(
            address="local",  # ignores RAY_ADDRESS, which is for deployments by a Serve file
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
        )
    except Exception as error:  # Ray raises plain Exception, too; no code of this project runs here
        raise ReplicasNotStartedError(_in_words([str(error)])) from error


def _not_started(error: Exception) -> ReplicasNotStartedError:
    """Return an error with the messages of the deployments, which Serve's error lacks."""
    app = _application()
    found = {} if app is None else {name: one.message for name, one in app.deployments.items()}
    problems = [line for line in (problem_in_words(*one) for one in found.items()) if line]
    return ReplicasNotStartedError(_in_words(problems or [str(error)]))


def _in_words(problems: list[str]) -> str:
    return "\n".join([f"The replicas could not be started; their logs are in {_LOGS}.", *problems])


def kill_descendants() -> None:
    """Kill all descendants of this process; some of Ray's outlive it by minutes and ignore SIGTERM."""
    found, left = [], [os.getpid()]
    while left:
        pid = left.pop()
        with suppress(OSError):  # the process has ended meanwhile, or this system has no /proc
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                children = list(map(int, path.read_text().split()))
                found += children
                left += children
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class LocalSignals:
    """Signals that this process received, handled instead of Ray's handlers. Use it in the main thread."""

    def __init__(self) -> None:
        # A handler may interrupt its own thread while that waits here. With an Event it would deadlock,
        # because the thread would already hold the Event's lock.
        self._received: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._before: dict[int, Any] = {}
        self._first: int | None = None  # of the signals that end the server
        self._interrupts = False

    @property
    def drained(self) -> int:
        """Exit status of a server that the first signal has ended."""
        return EXIT_INTERRUPTED if self._first == signal.SIGINT else 0

    @property
    def is_ending(self) -> bool:
        """Whether a signal that ends the server was received."""
        return self._first is not None

    def next(self, timeout_s: float) -> int | None:
        """Return the next unhandled signal, which may be SIGHUP, or None after `timeout_s` seconds."""
        try:
            return self._received.get(timeout=timeout_s)
        except queue.Empty:
            return None

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise KeyboardInterrupt in the block at the first ending signal, or at once if it came before."""
        self._interrupts = True
        if self.is_ending:
            raise KeyboardInterrupt
        try:
            yield
        finally:
            self._interrupts = False

    def take_over(self) -> None:
        """Install the handlers, also again after other code has replaced them."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            before = signal.signal(number, self._tell)
            self._before.setdefault(number, before)

    def __enter__(self) -> LocalSignals:
        """Install the signal handlers."""
        self.take_over()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _tell(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP:
            if self.is_ending:
                kill_descendants()
                os._exit(EXIT_AT_ONCE)
            self._first = number
        self._received.put(number)
        if self.is_ending and self._interrupts:
            raise KeyboardInterrupt
