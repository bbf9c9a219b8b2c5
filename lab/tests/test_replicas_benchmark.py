"""The figures that `benchmark_replicas.py` computes from turns, and the servers that it starts."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest

from pensieve_jax import ConfigError
from tests.launching import Launch, load

URL = "postgresql://me@database/kept"


def test_systems_take_turns_on_the_same_flags(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load("benchmark_replicas")
    started: list[list[str]] = []
    clients: list[int] = []

    @contextlib.contextmanager
    def served(flags):
        started.append(flags)
        yield SimpleNamespace(host="h", port=1)

    async def fake_load(host, port, num_clients):
        clients.append(num_clients)
        turns = [module.Turn(0.0, 0.1, 0.1 + 0.01 * 31)] * num_clients
        return module.figures(turns, 0.0, 2.0)

    monkeypatch.setattr(module, "ServedProcess", served)
    monkeypatch.setattr(module, "load", fake_load)
    flags = {"history": URL, "replicas": "1,2", "num_rounds": 2, "num_clients": 4, "seconds": 2}
    assert launch("benchmark_replicas", shared_llm=False, clients_per_replica=True, **flags) == 0
    assert clients == [4, 4, 8] * 2
    assert started[0][0] == f"--history={URL}" and "--replicas=2" not in started[0]
    assert started[2] == [*started[0], "--replicas=2"] and started[1] == [*started[0], "--replicas=1"]
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["rounds"][0]
    one = found["2 behind Ray"]
    assert one["first_token_ms"]["p50"] == pytest.approx(100)
    assert one["per_token_ms"] == pytest.approx(10)
    assert one["tokens_per_s"] == 8 * 32 / 2 and found["single"]["num_turns"] == 4


def test_what_begins_before_the_time_or_ends_behind_it_counts_by_its_share(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load("benchmark_replicas")
    turns = [
        module.Turn(9.0, 10.0, 12.0),
        module.Turn(10.5, 10.5, 11.5),
        module.Turn(11.0, 11.2, 13.2),
        module.Turn(5.0, 6.0, 7.0),
        module.Turn(20.0, 21.0, 22.0),
    ]
    monkeypatch.setattr(module, "measured", lambda count: module.figures(turns, 10.0, 12.0))
    assert launch("benchmark_replicas", shared_llm=False, history=URL, replicas="1", reply_tokens=11) == 0
    one = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["rounds"][0]["single"]
    assert one["num_turns"] == 2  # whose latencies are told
    assert one["first_token_ms"]["p50"] == pytest.approx(500)
    assert one["per_token_ms"] == pytest.approx(150)
    assert one["turns_per_s"] == pytest.approx((2 / 3 + 1 + 1 / 2.2) / 2)
    assert one["tokens_per_s"] == pytest.approx((1 + 1 + 0.4) * 11 / 2)


def test_a_time_too_short_for_a_turn_is_told(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("benchmark_replicas")
    monkeypatch.setattr(module, "measured", lambda count: module.figures([], 0.0, 2.0))
    with pytest.raises(ConfigError, match="--seconds"):
        launch("benchmark_replicas", shared_llm=False, history=URL)
