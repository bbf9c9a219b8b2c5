"""A real Prometheus scrapes a real server, and every expression of the dashboard has values."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pensieve_lab.serving.served import ServedProcess
from tests.deadlines import TIMEOUT_S
from tests.launching import TINY_MODEL, load

PROMETHEUS = shutil.which("prometheus") or "/usr/bin/prometheus"
POLL_S = 0.05
# A rate needs two samples: Grafana's window would span many scrapes.
SCRAPE_S, WINDOW_S = 1, 60
SIZES = (
    *(f"--model={TINY_MODEL}", "--dtype=float32", "--gpu_pages=24", "--cpu_pages=64"),
    *("--max_num_running=8", "--max_num_batched_tokens=64", "--token_buckets=64"),
)
BODY = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 12, "ignore_eos": True}

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(not Path(PROMETHEUS).exists(), reason=f"{PROMETHEUS} is not installed"),
    pytest.mark.skipif(os.environ.get("JAX_PLATFORMS") != "cpu", reason="a server of its own, on a CPU"),
]


class Prometheus:
    """Context manager: a Prometheus that scrapes one server."""

    def __init__(self, directory: Path, target: str) -> None:
        config = {
            "global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"},
            "scrape_configs": [{"job_name": "pensieve", "static_configs": [{"targets": [target]}]}],
        }
        (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is valid YAML
        self._directory = directory
        self._start()

    def _start(self) -> None:
        directory = self._directory
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        command = [
            *(
                PROMETHEUS,
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
            ),
            *(f"--web.listen-address={self.address}", "--log.level=error"),
        ]
        self.process = subprocess.Popen(command)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return an expression's current series. Raise AssertionError with Prometheus's text if invalid."""
        query = urllib.parse.urlencode({"query": expression})
        address = f"http://{self.address}/api/v1/query?{query}"
        try:
            with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        assert found["status"] == "success", found
        return found["data"]["result"]

    def is_ready(self) -> bool:
        """Tell whether it answers: until its storage is open, it listens but answers queries with 503.

        Another program may have taken its port meanwhile; then it is started at another one.
        """
        if self.process.poll() is not None:
            self._start()
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=TIMEOUT_S):
                return True
        except OSError:  # HTTP errors are subclasses
            return False

    def __enter__(self) -> Prometheus:
        wait_for(self.is_ready)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(TIMEOUT_S)


def wait_for(is_so: Callable[[], bool], work: Callable[[], object] = lambda: None) -> None:
    """Repeat `work` until the condition holds."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s, "the condition never held"
        work()
        time.sleep(POLL_S)


@pytest.fixture(scope="module")
def server(compilation_cache: str) -> Iterator[ServedProcess]:
    with ServedProcess([*SIZES, f"--compilation_cache_dir={compilation_cache}"]) as served:
        yield served


@pytest.fixture(scope="module")
def prometheus(server: ServedProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with Prometheus(tmp_path_factory.mktemp("prometheus"), f"{server.host}:{server.port}") as prometheus:
        yield prometheus


def ask(server: ServedProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        server.address + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        raw = answer.read()
    return {} if body.get("stream") else json.loads(raw)


def expressions() -> dict[str, str]:
    """Return the expressions by panel and line, with Grafana's variables filled in."""
    panels = json.loads(load("scripts.dev.make_dashboard").DASHBOARD.read_text("utf-8"))["panels"]
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        .replace("$model_name", ".+")
        .replace("$__rate_interval", f"{WINDOW_S}s")
        for panel in panels
        for target in panel.get("targets", ())
    }


# A test server does not do this by itself: refuse for overload, or lose its KV cache.
QUIET = {
    *("Refused requests per second: {{code}}", "Rebuilt contexts: {{reason}}"),
    # These need replicas; here is one engine.
    *("Running turns: {{replica}}", "Waiting turns: {{replica}}"),
    "Replies per second by replica: {{replica}}",
    *("Tokens per second by replica: {{replica}}", "Recomputed share of history: {{replica}}"),
    "Retried turns per second: all",
}


@pytest.mark.long
def test_every_line_of_the_dashboard_has_values(server: ServedProcess, prometheus: Prometheus) -> None:
    lines = expressions()
    assert len(lines) > 30 and set(lines) >= QUIET
    ids: list[str] = []

    def use() -> None:
        """Run a turn that continues the previous one, so that all counters keep increasing."""
        previous = {"previous_response_id": ids[-1]} if len(ids) % 4 else {}
        body = {"input": "Hello there", "max_output_tokens": 8, **previous}
        ids.append(ask(server, "/v1/responses", body)["id"])
        ask(server, "/v1/chat/completions", {**BODY, "stream": True})

    missing = set(lines) - QUIET

    def all_but_quiet() -> bool:
        """Check each line once: a scrape that times out makes series vanish until the next."""
        missing.difference_update([name for name in missing if has_values(prometheus, lines[name])])
        return not missing

    try:
        wait_for(all_but_quiet, use)
    except AssertionError as error:
        raise AssertionError(f"without values: {sorted(missing)}") from error
    wait_for(lambda: sum_of(prometheus, "up") == 1)
    for name in QUIET:
        prometheus.query(lines[name])  # which runs the query


def has_values(prometheus: Prometheus, expression: str) -> bool:
    """Tell whether a series of an expression has a number; Prometheus rejects an invalid one."""
    return any(series["value"][1] != "NaN" for series in prometheus.query(expression))


@pytest.mark.long
def test_stored_values_equal_what_was_done(server: ServedProcess, prometheus: Prometheus) -> None:
    for _ in range(3):
        ask(server, "/v1/chat/completions", BODY)
    with urllib.request.urlopen(f"{server.address}/metrics", timeout=TIMEOUT_S) as answer:
        samples = [
            sample
            for family in text_string_to_metric_families(answer.read().decode())
            for sample in family.samples
        ]
    for name in (
        "vllm:request_success_total",
        "vllm:generation_tokens_total",
        "vllm:e2e_request_latency_seconds_count",
    ):
        told = sum(sample.value for sample in samples if sample.name == name)
        assert told >= 3

        def has_come(name: str = name, told: float = told) -> bool:
            return sum_of(prometheus, name) == told

        wait_for(has_come)


def sum_of(prometheus: Prometheus, expression: str) -> float:
    return sum(float(series["value"][1]) for series in prometheus.query(expression))


@pytest.mark.long
def test_a_wrong_expression_is_an_error(prometheus: Prometheus) -> None:
    with pytest.raises(AssertionError, match="parse error"):
        prometheus.query("rate(vllm:num_requests_running")
