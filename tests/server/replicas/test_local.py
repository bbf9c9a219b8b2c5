"""Ray and Serve on this machine from start to shutdown: order, messages and signals. Neither of them runs."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.main import EXIT_ENDED, EXIT_INTERRUPTED
from pensieve_jax.server.replicas.plan import ReplicaPlan
from tests.deadlines import TIMEOUT_S
from tests.launching import ROOT

pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from Ray's imports

PLAN = ReplicaPlan(history="postgresql://me@host/chats", model="chat", replicas=2)
SETTINGS = ServerSettings(port=0, drain_s=7.0, is_routed=True)


STATUS_OF = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: 0}
MEMORY = "KV cache: 1 GiB on the CPU"


class Stage:
    """Fake of Ray and of Serve: `done` records the calls, and `when` holds what happens at each.

    Attributes:
        goes: whether the application disappears when it is deleted.
        answers: what the front end returns, or raises, by method.
        ended: dead processes of Ray, by kind; messages: of deployments, by name.
    """

    def __init__(self) -> None:
        self.done: list[object] = []
        self.when: dict[str, object] = {}
        self.goes = True
        self.answers: dict[str, object] = {"memory_in_words": [MEMORY, MEMORY]}
        self.ended: list[tuple[str, object]] = []
        self.messages: dict[str, str] = {}
        self._private = SimpleNamespace(worker=SimpleNamespace(_global_node=self))
        self._there = False

    def told(self, what: object, name: str) -> None:
        self.done.append(what)
        if name in self.when:
            self.when[name]()

    # The interface of the module `ray`.

    def is_initialized(self) -> bool:
        return ("init", "local") in self.done and self.done[-1] != "ray.shutdown"

    def init(self, address: str | None = None, **options: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(signal.SIGTERM))  # as Ray does
        self.told(("init", address), "init")

    def cluster_resources(self) -> dict[str, float]:
        return {}

    def shutdown(self) -> None:
        self.told("ray.shutdown", "shutdown")

    def dead_processes(self) -> list[tuple[str, object]]:
        if "look" in self.when:
            self.when.pop("look")()
        return self.ended

    # The interface of the module `ray.serve`.

    def start(self, **options: object) -> None:
        self.told("start", "start")

    def run(self, application: object, name: str) -> None:
        self._there = True
        self.told("run", "run")

    def status(self) -> object:
        if "status" in self.when:
            self.when["status"]()
        states = {
            name: SimpleNamespace(replica_states={"RUNNING": 2}, message=self.messages.get(name, ""))
            for name in NAMES
        }
        return SimpleNamespace(
            applications={"pensieve": SimpleNamespace(deployments=states)} if self._there else {}
        )

    def delete(self, name: str, _blocking: bool) -> None:
        self._there = not self.goes
        self.told("delete", "delete")

    def get_app_handle(self, name: str) -> object:
        return SimpleNamespace(
            drain=self._method("drain"),
            memory_in_words=self._method("memory_in_words"),
            reload_keys=self._method("reload_keys"),
            name=name,
        )

    def _method(self, name: str) -> object:
        def remote(*arguments: object) -> object:
            def result(timeout_s: float) -> object:
                self.told((name, *arguments, timeout_s), name)
                answer = self.answers.get(name)
                if isinstance(answer, Exception):
                    raise answer
                return answer

            return SimpleNamespace(result=result)

        return SimpleNamespace(remote=remote)


NAMES = ("EngineReplica", "Front")


@pytest.fixture
def stage(monkeypatch):
    from pensieve_jax.server.replicas import local

    found = Stage()
    serving = SimpleNamespace(
        start=found.start,
        run=found.run,
        status=found.status,
        delete=found.delete,
        get_app_handle=found.get_app_handle,
        shutdown=lambda: found.told("serve.shutdown", ""),
    )
    monkeypatch.setattr(local, "ray", found)
    monkeypatch.setattr(local, "serve", serving)
    monkeypatch.setattr(local, "check_reachable", lambda history: None)
    monkeypatch.setattr(local, "application", lambda *_: None)
    monkeypatch.setattr(local, "_POLL_S", 0.0)
    monkeypatch.setattr(local, "_WATCH_S", 0.001)
    for name in local._RAY_ENVIRONMENT:
        monkeypatch.setenv(name, "")
    for name in ("pensieve_jax", "pensieve_jax.server"):  # an earlier test may have redirected these loggers
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    return found


def serve_replicas(announce=lambda address: None):
    from pensieve_jax.server.replicas import local

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    try:
        return local.serve_replicas(PLAN, SETTINGS, announce)
    finally:
        after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        for number, handler in zip((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), before, strict=True):
            signal.signal(number, handler)
        assert before == after


def ends(address):
    signal.raise_signal(signal.SIGTERM)


STARTING = [("init", "local"), "start", "run"]
STARTED = [*STARTING, ("memory_in_words", 10.0)]
DRAINED = [("drain", 7.0, 17.0), "delete"]


@pytest.mark.parametrize("number", STATUS_OF)
def test_on_a_signal_the_front_end_drains_before_anything_is_removed(stage, number):
    assert serve_replicas(lambda address: signal.raise_signal(number)) == STATUS_OF[number]
    assert stage.done == [*STARTED, *DRAINED, "ray.shutdown"]


@pytest.mark.parametrize("number", STATUS_OF)
@pytest.mark.parametrize(
    ("when", "done"),
    [("init", STARTING[:1]), ("start", STARTING[:2]), ("run", STARTING)],
    ids=["Ray starts", "Serve starts", "replicas start"],
)
def test_a_signal_during_the_start_ends_it_without_waiting(stage, number, when, done):
    stage.when[when] = lambda: signal.raise_signal(number)
    assert serve_replicas(announce=lambda address: pytest.fail("it serves")) == STATUS_OF[number]
    assert stage.done == [*done, "ray.shutdown"]


@pytest.mark.parametrize("status", [0, 1, "no port is free"])
@pytest.mark.parametrize("when", ["init", "start", "run"])
def test_a_start_that_exits_unexpectedly_is_a_failure(stage, caplog, when, status):
    stage.when[when] = lambda: sys.exit(status)
    assert serve_replicas(announce=lambda address: pytest.fail("it serves")) == EXIT_ENDED
    assert stage.done[-1] == "ray.shutdown" and f"status {status}" in caplog.text


@pytest.mark.parametrize("when", ["drain", "delete", "shutdown"])
def test_a_second_signal_ends_at_once(stage, monkeypatch, when):
    from pensieve_jax.server.replicas import local

    class Ended(BaseException):
        pass

    def exit_at_once(status):
        raise Ended(status)

    killed = []
    monkeypatch.setattr(local, "kill_descendants", lambda: killed.append("all"))
    monkeypatch.setattr(os, "_exit", exit_at_once)
    stage.when[when] = lambda: (stage.when.clear(), signal.raise_signal(signal.SIGINT))
    with pytest.raises(Ended, match="143"):
        serve_replicas(ends)
    assert killed == ["all"]


def test_descendant_processes_are_killed_too():
    """Covers processes that this one did not start itself, and that ignore SIGTERM."""
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); "
    starts = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    kills = (
        "import subprocess, sys; from pensieve_jax.server.replicas.local import kill_descendants; "
        "one = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], stdout=subprocess.PIPE, text=True); "
        "assert one.stdout.readline() == 'here\\n'; kill_descendants(); "
        # which stays open until all descendants have ended
        "assert one.wait() == -9 and one.stdout.read() == ''"
    )
    command = [sys.executable, "-W", "ignore", "-c", kills, starts, ignores + "signal.pause()"]
    subprocess.run(command, check=True, timeout=TIMEOUT_S, cwd=ROOT)


def test_while_serving_the_log_reports_lost_and_recovered_replicas(stage, caplog, monkeypatch):
    from pensieve_jax.server.replicas import local

    run, is_served = local.serve.status, threading.Event()
    seen = iter([(1, 1), (2, 0), (2, 1), "the end", *[(2, 1)] * 1000])

    def status():
        found = run()
        if is_served.is_set() and stage.done == STARTED:
            now = next(seen)
            if now == "the end":  # earlier messages have been logged
                os.kill(os.getpid(), signal.SIGTERM)
                now = (2, 1)
            deployments = found.applications["pensieve"].deployments
            for name, num in zip(NAMES, now, strict=True):
                deployments[name].replica_states["RUNNING"] = num
        return found

    monkeypatch.setattr(local.serve, "status", status)
    assert serve_replicas(announce=lambda address: is_served.set()) == 0
    lines = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert lines == [
        "1 of 2 replicas are ready; before: 2",
        "2 of 2 replicas are ready; before: 1",
        "the front end was lost",
        "the front end is ready again",
    ]


def test_a_front_end_that_cannot_be_asked_to_drain_does_not_block_the_shutdown(stage, caplog):
    from ray.serve.exceptions import RayServeException

    stage.answers["drain"] = RayServeException("there is none")
    assert serve_replicas(ends) == 0
    assert stage.done == [*STARTED, *DRAINED, "ray.shutdown"] and "there is none" in caplog.text


def test_an_application_that_cannot_be_deleted_does_not_block_the_shutdown(stage, caplog):
    from ray.serve.exceptions import RayServeException

    def fail():
        raise RayServeException("no controller")

    stage.when["delete"] = fail
    assert serve_replicas(ends) == 0
    assert stage.done == [*STARTED, *DRAINED, "ray.shutdown"] and "no controller" in caplog.text


def test_waiting_for_a_deleted_application_is_limited(stage, monkeypatch):
    from pensieve_jax.server.replicas import local

    monkeypatch.setattr(local, "FLUSH_S", 0.0)
    stage.goes = False
    assert serve_replicas(ends) == 0
    assert stage.done[-2:] == ["delete", "ray.shutdown"]


def test_on_sighup_the_front_end_reloads_its_keys_and_keeps_serving(stage, caplog):
    stage.answers["reload_keys"] = "api_keys_file is bad"

    def announce(address):
        signal.raise_signal(signal.SIGHUP)
        stage.when["reload_keys"] = lambda: ends(address)

    assert serve_replicas(announce) == 0
    assert stage.done == [*STARTED, ("reload_keys", 10.0), *DRAINED, "ray.shutdown"]
    assert "api_keys_file is bad" in caplog.text


@pytest.mark.parametrize(
    ("answer", "words"),
    [(None, "keys reloaded"), (TimeoutError("late"), "the front end did not reload its keys: late")],
)
def test_the_log_says_whether_the_keys_were_reloaded(stage, caplog, answer, words):
    from pensieve_jax.server.replicas import local

    caplog.set_level(logging.INFO)
    stage.answers["reload_keys"] = answer
    local._reload_keys()
    assert words in caplog.text


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_if_ray_dies_the_command_reports_it_and_exits_with_a_status(stage, caplog, name):
    stage.ended = [("log_monitor", None), (name, None)]
    assert serve_replicas() == EXIT_ENDED
    assert stage.done == [*STARTED, "ray.shutdown"] and name in caplog.text


def test_the_end_of_processes_that_ray_does_not_need_is_ignored(stage):
    stage.ended = [("log_monitor", None)]
    stage.when["look"] = lambda: ends("")
    assert serve_replicas() == 0
    assert stage.done == [*STARTED, *DRAINED, "ray.shutdown"]


def test_the_installed_ray_reports_which_of_its_processes_have_ended():
    """Ray's interface for this is private."""
    from ray._private import node, ray_constants

    from pensieve_jax.server.replicas.local import NEEDED

    assert callable(node.Node.dead_processes)
    assert {ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER} == set(NEEDED)


def test_a_start_reports_what_it_waits_for_and_then_its_address(stage, caplog):
    caplog.set_level(logging.INFO)
    addresses = []
    serve_replicas(lambda address: (addresses.append(address), ends(address)))
    lines = [record.getMessage() for record in caplog.records]
    words = ["on this machine", "log in /", "Ray Serve", "starting 2", "replica 1 of 2", "replica 2 of 2"]
    words.append(f"2 of 2 replicas: {MEMORY}")
    assert [word in line for word, line in zip(words, lines, strict=False)] == [True] * len(words)
    assert addresses[0].startswith("http://127.0.0.1:")


def test_replicas_of_unequal_memory_have_a_line_each(stage, caplog):
    caplog.set_level(logging.INFO)
    stage.answers["memory_in_words"] = [MEMORY, "KV cache: 2 GiB on the CPU"]
    serve_replicas(ends)
    lines = [record.getMessage() for record in caplog.records if "KV cache" in record.getMessage()]
    assert lines == [
        "1 of 2 replicas: KV cache: 1 GiB on the CPU",
        "1 of 2 replicas: KV cache: 2 GiB on the CPU",
    ]


def test_a_front_end_that_does_not_tell_its_memory_serves(stage, caplog):
    stage.answers["memory_in_words"] = TimeoutError("late")
    assert serve_replicas(ends) == 0
    assert stage.done == [*STARTED, *DRAINED, "ray.shutdown"] and "unknown: late" in caplog.text


@pytest.mark.parametrize(
    ("when", "kind"),
    [
        *itertools.product(("init", "start", "run"), ("RaySystemError", "RayServeException", "TimeoutError")),
        *itertools.product(("init",), ("Exception", "ValueError", "RuntimeError")),
        ("run", "RuntimeError"),
    ],
)
def test_an_error_that_prevents_replicas_from_starting_is_reported_and_ray_is_stopped(stage, when, kind):
    import ray

    from pensieve_jax.server.replicas.local import ReplicasNotStartedError

    kinds = {one.__name__: one for one in (Exception, RuntimeError, TimeoutError, ValueError)}
    kinds |= {
        one.__name__: one for one in (ray.exceptions.RaySystemError, ray.serve.exceptions.RayServeException)
    }

    def fail():
        raise kinds[kind]("no more memory")

    stage.when[when] = fail
    with pytest.raises(ReplicasNotStartedError, match="no more memory"):
        serve_replicas()
    assert stage.done[-1] == "ray.shutdown"


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_an_own_bug_during_the_start_is_not_mistaken_for_rays(stage, monkeypatch, kind):
    from pensieve_jax.server.replicas import local

    def fail(*_):
        raise kind("a bug")

    monkeypatch.setattr(local, "application", fail)
    with pytest.raises(kind, match="a bug"):
        serve_replicas()
    assert stage.done == [*STARTING[:2], "ray.shutdown"]


def test_if_serve_cannot_give_a_reason_its_error_is_reported(stage):
    from ray.serve.exceptions import RayServeException

    from pensieve_jax.server.replicas.local import ReplicasNotStartedError

    def fail():
        stage.when["status"] = stage.when["run"]
        raise RayServeException("the controller has ended")

    stage.when["run"] = fail
    with pytest.raises(ReplicasNotStartedError, match="the controller has ended"):
        serve_replicas()


def test_the_trace_of_a_replicas_error_stays_in_rays_logs(stage):
    from pensieve_jax.server.replicas.local import ReplicasNotStartedError

    def fail():
        raise RuntimeError("Deploying application pensieve failed")

    stage.when["run"] = fail
    stage.messages["EngineReplica"] = (
        "It failed 6 times. Error:\n  File there, line 1\nConfigError: no model\n"
    )
    with pytest.raises(ReplicasNotStartedError) as caught:
        serve_replicas()
    assert str(caught.value).splitlines() == [
        "The replicas could not be started; their logs are in /tmp/ray/session_latest/logs.",
        "EngineReplica: It failed 6 times. Error: ConfigError: no model",
    ]


def test_an_address_in_use_is_reported_before_ray_starts(stage, monkeypatch):
    from pensieve_jax.server.replicas import local

    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = ServerSettings(port=other.getsockname()[1], is_routed=True)
        with pytest.raises(ConfigError):
            local.serve_replicas(PLAN, settings, print)
    assert stage.done == []
