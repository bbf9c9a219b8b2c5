"""Short requests beside long ones: their arrivals, their table, and small runs of the program."""

from __future__ import annotations

import io
import json
from base64 import b64decode

import numpy as np
import pytest

from pensieve_jax import CacheConfig, ConfigError, EngineConfig, SchedulerConfig
from pensieve_jax.scheduler import Scheduler
from pensieve_lab.experiments.machines import find_profile
from pensieve_lab.head_of_line.load import (
    COLUMNS,
    KINDS,
    LONG,
    SHORT,
    Kind,
    Sent,
    Served,
    as_table,
    draw,
    summary,
)
from pensieve_lab.head_of_line.serve import serve_simulated
from tests.engine.mutations import later_arrivals_keep_their_pages
from tests.launching import ROOT

DOCUMENTS = sorted((ROOT / "lab" / "results").glob("*_head_of_line_*.json"))
LOAD = {SHORT: Kind(4.0, 20, 8), LONG: Kind(0.5, 400, 40)}


def test_a_seed_gives_the_same_arrivals_and_a_longer_run_more_of_them():
    sent = draw(LOAD, 3, 20.0)
    assert sent == draw(LOAD, 3, 20.0) != draw(LOAD, 4, 20.0)
    longer = draw(LOAD, 3, 40.0)
    assert [one for one in longer if one.arrival_s < 20.0] == sent and len(longer) > len(sent)
    assert [one.arrival_s for one in sent] == sorted(one.arrival_s for one in sent)
    long_run = draw(LOAD, 0, 1000.0)
    for kind, (rate_per_s, prompt_tokens, output_tokens) in LOAD.items():
        of_kind = [one for one in long_run if one.kind == kind]
        assert 0.8 < len(of_kind) / (1000 * rate_per_s) < 1.2
        for name, mean in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
            lengths = [getattr(one, name) for one in of_kind]
            assert 0.75 * mean - 1 <= min(lengths) <= max(lengths) <= 1.25 * mean
        assert max(one.prompt_tokens + one.output_tokens for one in of_kind) <= LOAD[kind].max_tokens


def test_the_summary_is_that_of_the_table():
    served = [Served(Sent(SHORT, 1.0, 5, 2), 1.0 + 0.1 * n, 2.0 + n, n) for n in range(1, 5)]
    served.append(Served(Sent(LONG, 0.5, 50, 20), 2.5, 4.5, -1))
    table = as_table(served)
    assert tuple(table) == COLUMNS and table["is_long"].tolist() == [1, 0, 0, 0, 0]
    found = summary([table, table])
    assert found[SHORT]["num_requests"] == 8 and found[SHORT]["num_suspensions"] == 20
    assert found[SHORT]["first_token_s"]["max"] == pytest.approx(0.4, abs=1e-5)
    assert found[SHORT]["latency_s"]["p50"] == pytest.approx(3.5)
    assert found[LONG]["num_suspensions"] is None and found[LONG]["latency_s"]["mean"] == 4.0
    assert summary([as_table([])])[LONG]["latency_s"] is None


def test_a_small_simulation_is_reported_with_every_request(launch, capsys, tmp_path):
    path = tmp_path / "found.json"
    options = {"seeds": "1", "held_out_seeds": "2,3", "duration_s": "20", "json": path, "progress": "false"}
    assert launch("measure_head_of_line", shared_llm=False, **options) == 0
    document = json.loads(path.read_text(encoding="utf-8"))
    assert "held_out_seeds" in capsys.readouterr().out
    groups = document["results"]["groups"]
    assert [[one["seed"] for one in group["by_seed"]] for group in groups.values()] == [[1], [2, 3]]
    for group in groups.values():
        tables = [table_of(one["requests"]) for one in group["by_seed"]]
        assert summary(tables) == {kind: group[kind] for kind in KINDS}
        assert group[SHORT]["num_requests"] > 20 * len(tables)


def first_token_s_of_a_long_one(num_short: int) -> float:
    """Simulate two long requests beside short ones; the second long one waits for the first."""
    sent = [Sent(LONG, 0.0, 1500, 100), Sent(LONG, 0.01, 2500, 20)]
    sent += [Sent(SHORT, 0.02 * number, 100, 60) for number in range(1, num_short + 1)]
    config = EngineConfig(
        cache=CacheConfig(gpu_pages=100),
        scheduler=SchedulerConfig(max_num_running=64, max_num_batched_tokens=512),
    )
    served = serve_simulated(sent, config, find_profile("h200_llama2-13b-gqa10"), 3000)
    assert len(served) == len(sent), "a request starves"
    (second,) = (one for one in served if one.sent.prompt_tokens == 2500)
    return second.first_token_s


def test_no_long_request_starves_beside_a_stream_that_would_fill_all_pages(monkeypatch):
    """Short ones make its steps longer; without giving way, they would keep it out until they end."""
    alone_s, beside_s = (first_token_s_of_a_long_one(num_short) for num_short in (0, 400))
    assert beside_s < 1.5 * alone_s < 0.3 * (0.02 * 400)
    later_arrivals_keep_their_pages(monkeypatch)
    monkeypatch.setattr(Scheduler, "_check_liveness", lambda *_: None)
    assert first_token_s_of_a_long_one(0) == alone_s
    assert first_token_s_of_a_long_one(400) > 0.02 * 400


def table_of(requests: dict[str, str]) -> dict[str, np.ndarray]:
    """Return the table of a document's seed."""
    with np.load(io.BytesIO(b64decode(requests["npz_base64"]))) as file:
        return dict(file)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_committed_summaries_are_those_of_the_requests(path):
    groups = json.loads(path.read_text(encoding="utf-8"))["results"]["groups"]
    for group in groups.values():
        tables = [table_of(one["requests"]) for one in group["by_seed"]]
        for table, one in zip(tables, group["by_seed"], strict=True):
            assert summary([table]) == {kind: one[kind] for kind in KINDS}
        assert summary(tables) == {kind: group[kind] for kind in KINDS}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"seeds": "0,x"}, "--seeds"),
        ({"seeds": "-1"}, "--seeds"),
        ({"seeds": ""}, "--seeds"),
        ({"duration_s": "0"}, "--duration_s"),
        ({"gpu_pages": "100"}, "--gpu_pages"),
    ],
)
def test_wrong_flags_are_refused(launch, options, field):
    with pytest.raises(ConfigError, match=field):
        launch("measure_head_of_line", shared_llm=False, **options)
