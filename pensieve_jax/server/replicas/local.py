"""Replicas on this machine, behind one address: Ray, Serve and the application, from start to end.

Owns: in which order they start and end, and what signals mean.
Does not know: command lines, turns, or what the actors do.
Called by: `pensieve serve --replicas=N`.

The first SIGTERM or Ctrl-C drains: Serve waits for the turns that run, as long as `drain_s` says; while
replicas start there are none. The second ends everything at once.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.history.opening import check_reachable
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.listening import EXIT_AT_ONCE, address_of, bind
from pensieve_jax.server.replicas.plan import FLUSH_S, ReplicaPlan
from pensieve_jax.server.replicas.serve_app import FRONT, REPLICA, application

_log = logging.getLogger(__name__)

APP: Final = "pensieve"
_RAY_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nobody asked for reports to Ray's makers
    # Of a machine that compiles beside it: one that is slow to start would be killed, and begin anew.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
_KEEP_ALIVE_S: Final = 75  # as of the single server
_LOOK_S: Final = 0.2
_STORE_BYTES: Final = 200_000_000  # of Ray's objects, of which turns make none


class ReplicasNotStartedError(PensieveError):
    """Ray Serve could not start the replicas; the message has what they said."""


def serve_replicas(plan: ReplicaPlan, settings: ServerSettings, announce: Callable[[str], None]) -> int:
    """Serve until told to end; the exit status. For the main thread, which signals interrupt.

    `announce` is called with the address once the first request would be answered. Raises ConfigError for
    more replicas than there are GPUs or an address that is taken, and ReplicasNotStartedError.
    """
    check_reachable(plan.history)  # of what Ray would say much later, and at length
    with bind(settings.host, settings.port) as free:
        address, port = address_of(free), free.getsockname()[1]
    with running_ray() as num_gpus, _Signals() as signals:
        try:
            with signals.interrupting():
                _start(plan, settings, num_gpus, port)
        except KeyboardInterrupt:
            serve.shutdown()
            return 0
        announce(address)
        signals.first.wait()
        _log.info("ending: turns that run get %g s; a second signal ends them at once", settings.drain_s)
        _drain(settings.drain_s + FLUSH_S)
        serve.shutdown()
    return 0


def _start(plan: ReplicaPlan, settings: ServerSettings, num_gpus: int, port: int) -> None:
    _log.info("starting %d replicas; a first start compiles, which takes minutes, once", plan.replicas)
    options = HTTPOptions(host=settings.host, port=port, keep_alive_timeout_s=_KEEP_ALIVE_S)
    serve.start(proxy_location="HeadOnly", http_options=options)
    run_application(plan, settings, num_gpus)


def _drain(seconds: float) -> None:
    """Take the application away: its turns end, while the proxy still tells their clients."""
    serve.delete(APP, _blocking=False)
    until_s = time.monotonic() + seconds
    while APP in serve.status().applications and time.monotonic() < until_s:
        time.sleep(_LOOK_S)


def set_ray_environment() -> None:
    """Of the processes that Ray starts here, as far as whoever started this one says nothing."""
    for name, value in _RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def running_ray() -> Iterator[int]:
    """Ray on this machine, unless it runs already; how many GPUs it has."""
    is_ours = not ray.is_initialized()
    if is_ours:
        set_ray_environment()
        ray.init(
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
        )
    try:
        yield int(ray.cluster_resources().get("GPU", 0))
    finally:
        if is_ours:
            ray.shutdown()


def run_application(plan: ReplicaPlan, settings: ServerSettings, num_gpus: int) -> None:
    """Have Serve run front and replicas, and wait until both are ready; raises what `serve_replicas` does."""
    plan.check_gpus(num_gpus)
    try:
        serve.run(application(plan, settings, plan.gpus_each(num_gpus)), name=APP)
    except RuntimeError as error:
        raise ReplicasNotStartedError(_why(error)) from error


def _why(error: RuntimeError) -> str:
    """What the deployments say, which Serve's error does not."""
    status = serve.status().applications.get(APP)
    said = (
        []
        if status is None
        else [status.deployments[name] for name in (REPLICA, FRONT) if name in status.deployments]
    )
    lines = [one.message for one in said if one.message]
    return "\n".join(["The replicas could not be started.", *(lines or [str(error)])])


class _Signals:
    """What this process was told, in place of what Ray would do."""

    def __init__(self) -> None:
        self.first = threading.Event()
        self._before: dict[int, Any] = {}
        self._interrupts = False

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """The first signal ends what stands inside, or ended it before: KeyboardInterrupt."""
        self._interrupts = True
        if self.first.is_set():
            raise KeyboardInterrupt
        try:
            yield
        finally:
            self._interrupts = False

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._told)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _told(self, number: int, frame: FrameType | None) -> None:
        if self.first.is_set():
            os._exit(EXIT_AT_ONCE)
        self.first.set()
        if self._interrupts:
            raise KeyboardInterrupt
