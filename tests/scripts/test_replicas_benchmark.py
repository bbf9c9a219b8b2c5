"""What `benchmark_replicas.py` makes of turns, and which servers it starts."""

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
        return module.figures(turns)

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


def test_a_time_too_short_for_a_turn_is_told(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("benchmark_replicas")
    monkeypatch.setattr(module, "measured", lambda count: module.figures([]))
    with pytest.raises(ConfigError, match="--seconds"):
        launch("benchmark_replicas", shared_llm=False, history=URL)
