"""Systems side by side, from documents of the serving benchmark."""

from __future__ import annotations

import json

import pytest

from pensieve_jax import ConfigError


def point(rate, seed, p99, **changes):
    spread = {"mean": p99 / 3, "p50": p99 / 2, "p90": p99, "p99": p99}
    found = {
        "rate": rate,
        "seed": seed,
        "void": False,
        "seconds": 10.0,
        "sent_requests_per_s": rate,
        "requests_per_s": rate - seed,
        "output_tokens_per_s": 100.0,
        "num_requests": 20,
        "num_unfinished": 0,
        "latency_at_least_s": spread,
        "first_token_s": {name: value / 10 for name, value in spread.items()},
    }
    return found | changes


def document(system, *points, device="cuda: NVIDIA H200", **changes):
    results = {
        "system": system,
        "model": "random:x",
        "dtype": "bfloat16",
        "trace": {"name": "lengths", "digest": "d"},
        "loop": "open loop",
        "settings": {"window_s": 10.0, "seed": 0},
        "points": list(points),
    }
    values = {"results": results | changes, "hardware": {"device": device}}
    return json.dumps({"benchmark": "serving_benchmark"} | values)


@pytest.fixture
def compare(launch, capsys, tmp_path):
    def compare(*documents, **flags):
        file = tmp_path / "documents.jsonl"
        file.write_text("".join(f"{one}\n" for one in documents))
        assert launch("compare_serving", shared_llm=False, documents=file, **flags) == 0
        out = capsys.readouterr().out
        return out, json.loads(out.splitlines()[-1])["results"]

    return compare


def test_seeds_become_one_row(compare, tmp_path):
    pytest.importorskip("matplotlib")
    out, results = compare(
        document("ours", point(2.0, 0, 4.0), device="gpu: NVIDIA H200"),
        document("ours", point(2.0, 1, 8.0, num_unfinished=3)),
        document("others", point(2.0, 0, 1.0, first_token_s=None, latency_at_least_s=None)),
        document("ours", point(5.0, 0, 2.0, arrivals="/data/azure.csv")),
        plot=tmp_path / "compared.png",
    )
    rows = {(row["system"], row["arrivals"], row["rate"]): row for row in results["rows"]}
    assert list(rows) == [("ours", None, 2.0), ("others", None, 2.0), ("ours", "azure.csv", 5.0)]
    both = rows["ours", None, 2.0]
    assert both["seeds"] == [0, 1] and both["num_unfinished"] == 3 and both["num_requests"] == 40
    assert both["latency_s"]["p99"] == {"median": 6.0, "min": 4.0, "max": 8.0}
    assert both["requests_per_s"] == 1.5 and both["first_token_s"]["p50"]["median"] == pytest.approx(0.3)
    assert rows["others", None, 2.0]["latency_s"] is None
    assert results["device"] == "NVIDIA H200" and "azure.csv" in out
    assert (tmp_path / "compared.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"device": "cuda: NVIDIA H100"}, "device"),
        ({"dtype": "float16"}, "dtype"),
        ({"trace": {"name": "lengths", "digest": "e"}}, "trace"),
        ({"settings": {"window_s": 20.0, "seed": 0}}, "settings"),
    ],
)
def test_what_cannot_be_compared(compare, changes, name):
    with pytest.raises(ConfigError, match=f"of the same {name} as the first"):
        compare(document("a", point(1.0, 0, 1.0)), document("b", point(1.0, 0, 1.0), **changes))


def test_files_without_a_point(compare):
    with pytest.raises(ConfigError, match="files with a load point"):
        compare(document("a"))
