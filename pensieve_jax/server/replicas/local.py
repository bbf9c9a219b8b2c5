"""Replicas on this machine, behind one address: Ray, Serve and the application, from start to end.

Owns: in which order they start and end, and what signals mean.
Does not know: command lines, turns, or what the actors do.

The first SIGTERM or Ctrl-C drains: the front takes no more turns, and those that run get `drain_s`; while
replicas start there are none. The second ends everything at once. SIGHUP has the front read its keys again.
Front and replicas that die are Serve's to start again; where Ray itself dies, the status is 1.

Ray's processes go with `ray.shutdown`. Serve's own, `serve.shutdown`, waits up to half a minute for
actors that still start.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import time
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
from pensieve_jax.server.main import EXIT_AT_ONCE, EXIT_ENDED, address_of, bind
from pensieve_jax.server.replicas.plan import FLUSH_S, ReplicaPlan
from pensieve_jax.server.replicas.serve_app import FRONT, REPLICA, application
from pensieve_jax.server.replicas.startup import (
    ReplicaMonitor,
    Seen,
    StartReport,
    problem_in_words,
    telling,
    watching,
)

_log = logging.getLogger(__name__)

APP: Final = "pensieve"
_RAY_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nobody asked for reports to Ray's makers
}
_LOGS: Final = "/tmp/ray/session_latest/logs"  # Ray's default, which docs/replicas.md names
_LOOK_S: Final = 0.2
_KEYS_S: Final = 10.0
_WATCH_S: Final = 2.0
NEEDED: Final = ("gcs_server", "raylet")
"""Of the processes that Ray starts here, those that it does not start again."""
_STORE_BYTES: Final = 200_000_000  # of Ray's objects, of which turns make none
_UNREACHED: Final = (RayError, RayServeException, TimeoutError)
_NOT_STARTED: Final = (RayError, RayServeException, OSError)


class ReplicasNotStartedError(PensieveError):
    """Ray, Serve or the replicas could not be started; the message has what they said."""


def serve_replicas(plan: ReplicaPlan, settings: ServerSettings, announce: Callable[[str], None]) -> int:
    """Serve until told to end; the exit status. For the main thread, which signals interrupt.

    `announce` is called with the address once the first request would be answered. Raises ConfigError for
    more replicas than there are GPUs or an address that is taken, and ReplicasNotStartedError.
    """
    check_reachable(plan.history)  # of what Ray would say much later, and at length
    with bind(settings.host, settings.port) as free:
        address, port = address_of(free), free.getsockname()[1]
    with LocalSignals() as signals, ExitStack() as ending:
        _log.info("starting Ray on this machine")
        try:
            with signals.interrupting():
                num_gpus = ending.enter_context(running_ray())
                signals.take_over()  # Ray has handlers of its own
                _log.info("Ray's processes log in %s", os.path.realpath(_LOGS))
                _start(plan, settings, num_gpus, port)
        except KeyboardInterrupt:
            return 0
        except SystemExit as error:
            # While Ray starts, it makes an exit with the signal's number of a SIGTERM. Any other is its own.
            if signals.is_ending or error.code == signal.SIGTERM:
                return 0
            _log.error("the start has ended without being told to, with status %s", error.code)
            return EXIT_ENDED
        except _NOT_STARTED as error:
            raise _not_started(error) from error
        announce(address)
        with watching(ReplicaMonitor(plan.replicas, _log.warning), _seen, _WATCH_S):
            if not _until_told(signals):
                return EXIT_ENDED
        _log.info("ending: turns that run get %g s; a second signal ends them at once", settings.drain_s)
        _drain(settings.drain_s)
    return 0


def _start(plan: ReplicaPlan, settings: ServerSettings, num_gpus: int, port: int) -> None:
    plan.check_gpus(num_gpus)
    _log.info("starting Ray Serve")
    serve.start(proxy_location="Disabled")  # the front listens
    named = f"{plan.replicas} replica{'s' * (plan.replicas != 1)}"
    _log.info("starting %s; a first start compiles, which takes minutes, once", named)
    app = application(plan, settings, plan.gpus_each(num_gpus), (settings.host, port))
    with telling(StartReport(plan.replicas, _log.info), _seen):
        try:
            serve.run(app, name=APP)
        except RuntimeError as error:  # Serve's for deployments that fail; elsewhere it is a bug of ours
            raise _not_started(error) from error


def _application() -> ApplicationStatusOverview | None:
    """What Serve says of the application; None where it says nothing, and Ray would be started to ask."""
    if not ray.is_initialized():
        return None
    try:
        return serve.status().applications.get(APP)
    except _UNREACHED:
        return None


def _seen() -> Seen | None:
    """How far the application has come; None while nobody can say."""
    app = _application()
    if app is None:
        return None
    num_ready = {
        name: sum(num for state, num in one.replica_states.items() if state == "RUNNING")
        for name, one in app.deployments.items()
    }
    problems = [problem_in_words(name, one.message) for name, one in app.deployments.items()]
    problem = next((one for one in problems if one), "")
    return Seen(num_ready.get(REPLICA, 0), num_ready.get(FRONT, 0) > 0, problem)


def _until_told(signals: LocalSignals) -> bool:
    """Wait for the first signal that ends; False where Ray has ended by itself, and nothing is served."""
    while (number := signals.next(_WATCH_S)) is None or number == signal.SIGHUP:
        if number is not None:
            _reload_keys()
        elif ended := _ended_processes():
            _log.error("Ray has ended without being told to: %s", ", ".join(ended))
            return False
    return True


def _ended_processes() -> list[str]:
    """Processes of Ray that have ended and that nothing goes on without."""
    node: Any = ray._private.worker._global_node
    return [] if node is None else [name for name, _ in node.dead_processes() if name in NEEDED]


def _drain(seconds: float) -> None:
    """Have turns end, while the front still tells their clients, and then the engines."""
    with _warning("the replicas could not be drained"):
        serve.get_app_handle(APP).drain.remote(seconds).result(timeout_s=seconds + FLUSH_S)
    with _warning("the application could not be deleted"):  # engines are to end also where no front answers
        serve.delete(APP, _blocking=False)
        until_s = time.monotonic() + FLUSH_S
        while APP in serve.status().applications and time.monotonic() < until_s:
            time.sleep(_LOOK_S)


@contextmanager
def _warning(words: str) -> Iterator[None]:
    """Where Ray or Serve does not answer, say so and go on."""
    try:
        yield
    except _UNREACHED as error:
        _log.warning("%s: %s", words, error)


def _reload_keys() -> None:
    try:
        problem = serve.get_app_handle(APP).reload_keys.remote().result(timeout_s=_KEYS_S)
    except _UNREACHED as error:
        problem = f"the front could not be asked to read its keys again: {error}"
    if problem is None:
        _log.info("keys read again")
    else:
        _log.error("%s", problem)


def set_ray_environment() -> None:
    """Of the processes that Ray starts here, as far as whoever started this one says nothing."""
    for name, value in _RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def running_ray() -> Iterator[int]:
    """Ray on this machine, unless this process has one already; how many GPUs it has.

    Raises ReplicasNotStartedError where it does not start.
    """
    is_ours = not ray.is_initialized()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # what is to be said is said here
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
            address="local",  # whatever RAY_ADDRESS says: that is for whoever deploys a file
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
        )
    except Exception as error:  # nothing of ours runs here, and Ray raises this very class, among others
        raise ReplicasNotStartedError(_in_words([str(error)])) from error


def _not_started(error: Exception) -> ReplicasNotStartedError:
    """With what the deployments say, which Serve's error does not."""
    app = _application()
    found = {} if app is None else {name: one.message for name, one in app.deployments.items()}
    said = [line for line in (problem_in_words(*one) for one in found.items()) if line]
    return ReplicasNotStartedError(_in_words(said or [str(error)]))


def _in_words(said: list[str]) -> str:
    return "\n".join([f"The replicas could not be started; what they log is in {_LOGS}.", *said])


def kill_descendants() -> None:
    """End all that this process has started: some of Ray's outlive it by minutes, and ignore SIGTERM."""
    found, left = [], [os.getpid()]
    while left:
        pid = left.pop()
        with suppress(OSError):  # it has ended meanwhile, or this system has no such files
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                children = list(map(int, path.read_text().split()))
                found += children
                left += children
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class LocalSignals:
    """What this process was told, in place of what Ray would do. For the main thread."""

    def __init__(self) -> None:
        # A handler may run while its thread waits here: an Event's lock would be held by that thread itself.
        self._told: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._before: dict[int, Any] = {}
        self._is_ending = self._interrupts = False

    @property
    def is_ending(self) -> bool:
        """A signal that ends was told."""
        return self._is_ending

    def next(self, timeout_s: float) -> int | None:
        """Wait for a signal that nobody has seen yet, SIGHUP among them; None when the time is over."""
        try:
            return self._told.get(timeout=timeout_s)
        except queue.Empty:
            return None

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """The first signal that ends, ends what stands inside, or ended it before: KeyboardInterrupt."""
        self._interrupts = True
        if self._is_ending:
            raise KeyboardInterrupt
        try:
            yield
        finally:
            self._interrupts = False

    def take_over(self) -> None:
        """Have signals come here, also where somebody has taken them over since."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            before = signal.signal(number, self._tell)
            self._before.setdefault(number, before)

    def __enter__(self) -> LocalSignals:
        """Take the signals over."""
        self.take_over()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _tell(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP:
            if self._is_ending:
                kill_descendants()
                os._exit(EXIT_AT_ONCE)
            self._is_ending = True
        self._told.put(number)
        if self._is_ending and self._interrupts:
            raise KeyboardInterrupt
