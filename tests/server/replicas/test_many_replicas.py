"""Conversations through the openai client while a replica is killed, one is added and one is drained.

Every reply has the tokens and the text of an undisturbed single engine; the history has each turn once.
Ray, Serve, Postgres and the engines are real; models are tiny and on CPUs.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import operator
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import yaml

from pensieve_jax import LLM, EngineConfig, SamplingParams
from pensieve_jax.balance import HashRing
from pensieve_jax.core.turn_node import root_of
from pensieve_jax.history.reader import HistoryReader
from pensieve_jax.server.replicas.plan import config_of
from tests.launching import ROOT
from tests.postgres_server import PostgresServer
from tests.seeds import enough

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
# Warnings of Ray in this process are not ours to fix.
pytestmark = [pytest.mark.multi, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

MODEL = "random:llama-tiny"
NUM_TOKENS = (6, 6, 24, 6, 6, 12)  # of each turn; while replicas die or leave, replies are longer
NUM_CLIENTS = 12
NUM_CONVERSATIONS = enough(40, 200)
LONG = 300
LONGER = 1500  # what an engine does not end before the client of the first token has killed it
REPLICA, FRONT = (f"ray::ServeReplica:pensieve:{name}" for name in ("EngineReplica", "Front"))


class TurnResult(NamedTuple):
    """A client's result of one turn."""

    response_id: str
    text: str
    sources: dict[str, int]


def engine(compilation_cache: str) -> dict[str, Any]:
    """Return the configuration of each replica, and of the reference engine."""
    return {
        "gpu_pages": 1024,
        "max_num_running": 8,
        "max_num_batched_tokens": 64,
        "token_buckets": [8, 64],
        "compilation_cache_dir": compilation_cache,
    }


def message(number: int, turn: int) -> str:
    return f"I am {number}, and this is message {turn}."


def sampling(number: int) -> dict[str, Any]:
    return {"temperature": 0.0} if number % 2 else {"temperature": 0.9, "seed": number}


def one_engine(config: EngineConfig, num: int) -> list[list[Any]]:
    """Return the outputs of all conversations, for each turn."""
    with LLM(MODEL, dtype="float32", config=config) as llm:
        return [
            llm.chat(
                [[{"role": "user", "content": message(number, turn)}] for number in range(num)],
                [SamplingParams(max_tokens=NUM_TOKENS[turn], **sampling(number)) for number in range(num)],
                conversation_ids=[str(number) for number in range(num)],
            )
            for turn in range(len(NUM_TOKENS))
        ]


class PatientTime:
    """The module `time`, by which Ray waits 300 s for its processes to start instead of its fixed 30 s."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() / 10


class Cluster:
    """Ray on this machine running `deploy/ray_serve.yaml` with a varying number of replicas."""

    def __init__(self, history: str, engine: dict[str, Any], port: int, replicas: int) -> None:
        from ray import serve

        from pensieve_jax.server.replicas.local import set_ray_environment

        set_ray_environment()
        # A proxy starts slowly beside engines that compile: it would be killed and restarted.
        os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "300")
        self.history, self.port = history, port
        self._file = yaml.safe_load((ROOT / "deploy" / "ray_serve.yaml").read_text("utf-8"))
        self._file |= {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": port}}
        self._app = self._file["applications"][0]
        self._app["args"] |= {"model": MODEL, "dtype": "float32", "history": history, "engine": engine}
        self._app["args"] |= {"num_gpus": 0, "num_cpus": 0, "log_format": None}
        del self._app["args"]["server"]["api_keys_file"]
        self._app["args"]["server"]["allow_no_keys"] = True  # the proxy listens on this machine only
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ray._private.node.time", PatientTime())
            ray.init(
                num_cpus=3, object_store_memory=200_000_000, include_dashboard=False, log_to_driver=False
            )
        serve.start(proxy_location="HeadOnly", http_options=self._file["http_options"])
        self.scale(replicas)

    def scale(self, replicas: int) -> None:
        """Return once exactly `replicas` replicas are ready."""
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        self._app["deployments"] = [{"name": "EngineReplica", "num_replicas": replicas}]
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(self._file))
        wait_until(lambda: serve.status().applications["pensieve"].status == "RUNNING")
        self.wait_until_ready(replicas)

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/pensieve/stats", timeout=120) as answer:
            return json.load(answer)

    def wait_until_ready(self, replicas: int = 2) -> None:
        """Return once exactly `replicas` replicas accept turns, as the front end knows."""

        def is_ready() -> bool:
            try:
                found = self.stats()["replicas"].values()
            except OSError:  # Serve's answer without a running front end, or that of no running engine
                return False
            return [one["state"] for one in found] == ["ready"] * replicas

        wait_until(is_ready)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=120
        )

    def close(self) -> None:
        from ray import serve

        serve.shutdown()
        ray.shutdown()


def wait_until(is_so: Any, timeout_s: float = 300.0) -> None:
    """Poll until another process, which sends no notification, has fulfilled a condition."""
    until_s = time.monotonic() + timeout_s
    tick = threading.Event()
    while not is_so():
        assert time.monotonic() < until_s, "the condition was not fulfilled"
        tick.wait(0.2)


def pids_of(title: str) -> list[int]:
    """Return the pids of this cluster's processes with a title."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            says = path.read_text().rstrip("\0 ").partition(".")[0]  # the activity follows after a dot
            pid = int(path.parent.name)
            if says == title and os.getpid() in ancestors_of(pid):  # skip another cluster's processes
                found.append(pid)
        except OSError:  # it has ended
            continue
    return found


def ancestors_of(pid: int) -> Iterator[int]:
    """Yield its parent, and that one's parent, up to the first process."""
    while pid > 1:
        # The name is in parentheses, and may contain anything.
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, path.read_text().split())
    return found


class Clients:
    """Clients that run `num` conversations, turn after turn, through the openai client."""

    def __init__(self, client: openai.OpenAI, num: int) -> None:
        self.num = num
        self.results: list[list[TurnResult]] = [[] for _ in range(num)]
        self._client = client
        self._pool = concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS)

    def turn(self, turn: int, event: Any = None) -> None:
        """Run a turn of every conversation; `event` happens once a quarter of them has ended."""
        asked = [self._pool.submit(self._ask, number, turn) for number in range(self.num)]
        for done, one in enumerate(concurrent.futures.as_completed(asked), start=1):
            one.result()
            if done == max(1, self.num // 4) and event is not None:
                event()

    def close(self) -> None:
        self._pool.shutdown()
        self._client.close()

    def _ask(self, number: int, turn: int) -> None:
        before = self.results[number]
        options: dict[str, Any] = {
            "input": message(number, turn),
            "max_output_tokens": NUM_TOKENS[turn],
            "temperature": sampling(number)["temperature"],
            "extra_body": {name: value for name, value in sampling(number).items() if name == "seed"},
        }
        if before:
            options["previous_response_id"] = before[-1].response_id
        if number % 3:
            response = self._client.responses.create(**options)
        else:
            deltas = []
            for event in self._client.responses.create(**options, stream=True):
                if event.type == "response.output_text.delta":
                    deltas.append(event.delta)
            response = event.response
            assert "".join(deltas) == response.output_text
        sources = response.usage.to_dict()["pensieve"]
        before.append(TurnResult(response.id, response.output_text, sources))

    def moved(self, turn: int) -> int:
        """Return the number of conversations whose KV cache was not, or not all, where their turn ran."""
        return sum(results[turn].sources["recomputed_tokens"] > 0 for results in self.results)


@pytest.fixture(scope="module")
def expected(compilation_cache: str) -> list[list[Any]]:
    """Return one engine's replies. It runs before the replicas start, so they find its steps compiled."""
    return one_engine(config_of(engine(compilation_cache)), NUM_CONVERSATIONS)


@pytest.fixture(scope="module")
def cluster(postgres: PostgresServer, compilation_cache: str, expected: object) -> Iterator[Cluster]:
    found = None
    try:
        found = Cluster(postgres.url(), engine(compilation_cache), free_port(), replicas=2)
        yield found
    finally:
        if found is not None:
            found.close()
        elif ray.is_initialized():
            ray.shutdown()


@pytest.mark.parametrize("num", [NUM_CONVERSATIONS])
def test_replies_are_one_engines_whatever_happens_to_replicas(num, expected, cluster, record_property):
    began_s = time.monotonic()
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(f"{time.monotonic() - began_s:.0f} s: {text}")

    clients = Clients(cluster.client(), num)
    clients.turn(0)
    clients.turn(1)
    note(f"2 replicas, nothing happens: {clients.moved(1)} of {num} turns compute their history again")
    assert clients.moved(1) <= num / 8  # none, but Serve passes a replica that does not answer in time

    before = cluster.stats()["replicas"].keys()
    victim = pids_of(REPLICA)[0]
    clients.turn(2, event=lambda: os.kill(victim, signal.SIGKILL))
    again = cluster.stats()["num_turns_run_again"]
    note(f"one is killed -9 after a quarter of the turns: {clients.moved(2)}, and {again} were run again")

    wait_until(lambda: (now := cluster.stats()["replicas"].keys()) != before and len(now) == 2)
    clients.turn(3)
    note(f"another one is in its place: {clients.moved(3)}")

    owners = owners_of(cluster, clients)
    cluster.scale(3)
    num_new = sum(map(operator.ne, owners, owners_of(cluster, clients)))
    clients.turn(4)
    note(f"a third is there: {clients.moved(4)}, and it owns {num_new}")
    assert abs(clients.moved(4) - num_new) <= num / 8

    drained = threading.Thread(target=cluster.scale, args=(2,))
    clients.turn(5, event=drained.start)
    drained.join()
    again = cluster.stats()["num_turns_run_again"] - again
    note(f"one is drained after a quarter of the turns: {clients.moved(5)}, and {again} were run again")
    clients.close()

    check(clients, expected, cluster.history)
    note("all replies are one engine's, and each is there once")
    record_property("note", f"{num} conversations on replicas: " + "; ".join(notes))


def owners_of(cluster: Cluster, clients: Clients) -> list[str]:
    """Return the replica to which each conversation's root belongs, by the ring of the present ones."""
    from pensieve_jax.server.replicas.ray_replicas import router_hash

    ring = HashRing(cluster.stats()["replicas"], hash_key=router_hash)
    roots = (root_of(results[0].response_id.removeprefix("resp_")) for results in clients.results)
    return [ring.owner(root) for root in roots]


def check(clients: Clients, expected: list[list[Any]], history: str) -> None:
    """Check tokens and text of every turn, and that the history has each turn once."""
    from pensieve_jax.history.opening import open_for_reading

    fingerprint = fingerprint_of(history)
    with HistoryReader(history, fingerprint=fingerprint) as reader:
        for number, results in enumerate(clients.results):
            path = reader.turn_path("", results[-1].response_id.removeprefix("resp_"))
            assert [f"resp_{view.turn_id}" for view in path] == [one.response_id for one in results]
            for turn, (view, one) in enumerate(zip(path, results, strict=True)):
                output = expected[turn][number]
                assert view.output_token_ids == output.token_ids, (number, turn)
                assert one.text == output.text == view.output_text, (number, turn)
    reading = open_for_reading(history, fingerprint)
    (count,) = reading.run(lambda connection: connection.execute("SELECT count(*) FROM turns").fetchone())
    reading.close()
    assert count == sum(map(len, clients.results)), "the first test on its history"


def fingerprint_of(history: str) -> str:
    """Return the fingerprint that the engines gave their history."""
    import psycopg

    from pensieve_jax.history.postgres_location import parse

    where = parse(history)
    with psycopg.connect(where.url) as connection:
        query = f"SELECT value FROM {where.namespace}.meta WHERE key = 'fingerprint'"
        (value,) = connection.execute(query.encode()).fetchone()
        return value


def long_reply(client: openai.OpenAI, num_tokens: int = LONG, **options: Any) -> Any:
    """Return a stored reply that takes a while."""
    extra = {"min_tokens": num_tokens, "store": True}
    return client.completions.create(
        model=MODEL, prompt="Tell me all.", max_tokens=num_tokens, seed=5, extra_body=extra, **options
    )


def test_a_client_that_leaves_ends_its_turn(cluster):
    num_before = cluster.stats()["num_turns_cancelled"]

    def has_cancelled() -> bool:
        """Leave, and see what became of the turn; it may have ended before that was noticed."""
        with cluster.client() as client:
            stream = long_reply(client, LONGER, stream=True)
            next(iter(stream))
            stream.close()
        wait_until(lambda: not (stats := cluster.stats())["num_running"] and not stats["num_waiting"])
        return cluster.stats()["num_turns_cancelled"] > num_before

    assert any(has_cancelled() for _ in range(5))


def test_a_reply_goes_on_when_its_engine_dies_and_the_replica_starts_another(cluster):
    """Both engines are killed. A reply that had ended would be read from the history instead of run again."""
    cluster.wait_until_ready()
    engines = [one for replica in pids_of(REPLICA) for one in children_of(replica)]
    assert len(engines) == 2
    with cluster.client() as client:
        undisturbed = long_reply(client, LONGER).choices[0].text
        again = cluster.stats()["num_turns_run_again"]
        texts: list[str] = []
        for chunk in long_reply(client, LONGER, stream=True):
            if not texts:
                for one in engines:
                    os.kill(one, signal.SIGKILL)
            texts += [choice.text for choice in chunk.choices]
    assert "".join(texts) == undisturbed
    cluster.wait_until_ready()
    assert cluster.stats()["num_turns_run_again"] == again + 1


def test_a_background_response_survives_the_front_end(cluster):
    cluster.wait_until_ready()
    with cluster.client() as client:
        queued = client.responses.create(
            input="Tell me all.", background=True, max_output_tokens=LONG, extra_body={"seed": 5}
        )
        (front,) = pids_of(FRONT)
        os.kill(front, signal.SIGKILL)
        wait_until(lambda: pids_of(FRONT) not in ([], [front]))
        cluster.wait_until_ready()
        wait_until(lambda: client.responses.retrieve(queued.id).status in ("completed", "incomplete"))


def command(history: str, compilation_cache: str) -> list[str]:
    return [
        *(sys.executable, str(ROOT / "scripts" / "serve.py"), f"--model={MODEL}", "--dtype=float32"),
        *(f"--history={history}", "--port=0", "--replicas=2"),
        # The same configuration as `engine`, whose programs are in the cache.
        *(
            "--gpu_pages=1024",
            "--cpu_pages=0",
            "--max_num_running=8",
            "--max_num_batched_tokens=64",
            "--token_buckets=8,64",
            f"--compilation_cache_dir={compilation_cache}",
        ),
    ]


@contextlib.contextmanager
def running(arguments: list[str], stderr: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield the command's process; if a test fails, end it and show what it wrote to `stderr`."""
    with (
        stderr.open("w", encoding="utf-8") as written,
        subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=written, text=True) as process,
    ):
        try:
            yield process
        except BaseException:
            process.kill()  # leaving the block would wait for it
            print(stderr.read_text(encoding="utf-8")[-20_000:])
            raise


def test_the_command_serves_from_replicas_and_ends_on_a_signal(postgres, compilation_cache, tmp_path):
    with running(command(postgres.url(), compilation_cache), tmp_path / "stderr") as process:
        assert process.stdout is not None
        found = re.fullmatch(rf"serving {MODEL} at (http://\S+)\n", process.stdout.readline())
        assert found, "it did not start"
        with openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0, timeout=120) as client:
            one = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi!"}], max_completion_tokens=4
            )
            assert one.usage.completion_tokens == 4
            listed = client.models.with_raw_response.list(extra_headers={"x-request-id": "mine-1"})
            assert listed.headers.get_list("x-request-id") == ["mine-1"]
            process.send_signal(signal.SIGHUP)  # this must not end it
            stream = long_reply(client, stream=True)
            next(iter(stream))
            process.send_signal(signal.SIGTERM)
            chunks = list(stream)
            assert chunks[-1].choices[0].finish_reason == "length"
        assert process.wait(120) == 0
        assert process.stdout.read() == ""


def test_a_signal_during_the_start_ends_the_command(postgres, compilation_cache):
    arguments = command(postgres.url(), compilation_cache)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any("starting 2 replicas" in line for line in lines), "it did not begin"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
        assert (process.returncode, output) == (0, "")
