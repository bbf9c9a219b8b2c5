"""Short requests beside long ones: their arrivals, their table, and small runs of the program."""

from __future__ import annotations

import io
import json
from base64 import b64decode

import numpy as np
import pytest

from pensieve_jax import ConfigError
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


def table_of(requests: dict[str, str]) -> dict[str, np.ndarray]:
    """Return the table of a document's seed."""
    with np.load(io.BytesIO(b64decode(requests["npz_base64"]))) as file:
        return dict(file)


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
