"""Comparison of systems, from documents of the serving benchmark."""

from __future__ import annotations

import json

import pytest

from pensieve_jax import ConfigError
from tests.launching import load

compared = load("pensieve_lab.serving.compared")


def point(rate, seed, p99, **changes):
    spread = {"mean": p99 / 3, "p50": p99 / 2, "p90": p99, "p99": p99}
    found = {
        "rate": rate,
        "seed": seed,
        "arrivals": None,
        "sessions_digest": f"{rate}, {seed}",
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


def document(system, *points, device="cuda: NVIDIA H200", cpu="a", command="c", lacks=(), **changes):
    results = {
        "system": system,
        "model": "random:x",
        "dtype": "bfloat16",
        "trace": {"name": "lengths", "digest": "d"},
        "loop": "open loop",
        "settings": {"window_s": 10.0, "seed": 0},
        "config": {"cache": {"gpu_pages": 8, "policy": "lru"}, "compilation_cache_dir": command},
        "kv_bytes": 4096,
        "start_up_s": 1.0,
        "points": list(points),
        "left_out": [],
    }
    values = {
        "results": {name: value for name, value in (results | changes).items() if name not in lacks},
        "hardware": {"device": device, "cpu": cpu},
        "versions": {"jax": "1"},
        "revision": "r",
        "command": command,
    }
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
        document("ours", point(2.0, 1, 8.0, num_unfinished=3), left_out=[{"rate": 9.0}]),
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
    header, _, row, *_ = out.splitlines()
    assert header.split()[:5] == ["system", "arrivals", "rate", "sent/s", "seeds"], "side by side"
    assert row.split()[:5] == ["ours", "Poisson", "2.000", "2.000", "0,1"]
    assert results["systems"]["ours"]["left_out"] == [{"rate": 9.0}] and "ours: 1 load points skipped" in out
    assert (tmp_path / "compared.png").read_bytes().startswith(b"\x89PNG")


def test_what_every_system_is_and_where_it_ran(compare, capsys, launch, tmp_path):
    """Each system has its own documents' machine, not the machine that compares."""
    (tmp_path / "others.jsonl").write_text(document("others", point(2.0, 0, 1.0), cpu="b") + "\n")
    lines = [document("ours", point(rate, 0, 1.0), command="first") for rate in (2.0, 3.0)]
    lines.append(document("ours", point(2.0, 1, 1.0), command="second"))
    (tmp_path / "ours.jsonl").write_text("\n".join(lines))
    files = [str(tmp_path / name) for name in ("ours.jsonl", "others.jsonl")]
    assert launch("compare_serving", shared_llm=False, documents=",".join(files)) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["hardware"]["device"] == "none: files read"
    systems = found["results"]["systems"]
    assert list(systems) == ["ours", "others"] and systems["ours"]["kv_bytes"] == 4096
    assert systems["ours"]["config"]["cache"] == {"gpu_pages": 8, "policy": "lru"}
    ran = systems["ours"]["documents"]
    assert [(one["command"], one["file"]) for one in ran] == [("first", files[0]), ("second", files[0])]
    (other,) = systems["others"]["documents"]
    assert other["hardware"] == {"device": "cuda: NVIDIA H200", "cpu": "b"}
    assert other["versions"] == {"jax": "1"} and other["revision"] == "r"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"device": "cuda: NVIDIA H100"}, "device"),
        ({"dtype": "float16"}, "dtype"),
        ({"trace": {"name": "lengths", "digest": "e"}}, "trace.digest"),
        ({"settings": {"window_s": 20.0, "seed": 0}}, "settings.window_s"),
        ({"kv_bytes": 8192}, "kv_bytes"),
    ],
)
def test_what_cannot_be_compared(compare, changes, name):
    with pytest.raises(ConfigError, match=rf"--documents is .*line 2.*of the same {name} as .*line 1, "):
        compare(document("a", point(1.0, 0, 1.0)), document("b", point(1.0, 0, 1.0), **changes))


def test_memory_may_differ_where_it_is_said_or_not_known(compare):
    one, other = document("a", point(1.0, 0, 1.0)), document("b", point(1.0, 0, 1.0), kv_bytes=8192)
    _, results = compare(one, other, allow_different_memory="true")
    assert [system["kv_bytes"] for system in results["systems"].values()] == [4096, 8192]
    _, results = compare(one, document("b", point(1.0, 0, 1.0), kv_bytes=None))
    assert results["systems"]["b"]["kv_bytes"] is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"config": {"cache": {"gpu_pages": 8, "policy": "x"}}},
            r"the same config\.cache\.policy as .*line 1",
        ),
        ({"vllm": "0.27"}, "the same vllm as .*line 1"),
        ({"kv_bytes": 2}, "the same kv_bytes as .*line 1"),
    ],
)
def test_one_system_has_one_configuration(compare, changes, says):
    """The location of its compiled programs is not part of it."""
    first, other = document("a", point(1.0, 0, 1.0)), document("a", point(2.0, 0, 1.0), **changes)
    with pytest.raises(ConfigError, match=says):
        compare(first, other, allow_different_memory="true")
    assert compare(first, document("a", point(2.0, 0, 1.0), command="other"))


def test_a_load_of_a_system_is_there_once(compare):
    twice = document("a", point(1.0, 0, 1.0))
    with pytest.raises(
        ConfigError, match=r"once, .*; a, arrivals poisson, rate 1\.0, seed 0 is in .*line 1 as"
    ):
        compare(twice, document("b", point(1.0, 0, 1.0)), twice)


def test_arrivals_are_what_came_and_not_what_its_file_is_called(compare):
    x, y = (point(1.0, 0, 1.0, arrivals=f"/{folder}/az.csv") for folder in "xy")
    _, results = compare(document("a", x), document("b", y))
    assert [row["arrivals"] for row in results["rows"]] == ["az.csv"] * 2
    with pytest.raises(
        ConfigError, match=r"line 2.* same sessions_digest \(arrivals az\.csv, rate 1\.0, seed 0\)"
    ):
        compare(document("a", x), document("b", y | {"sessions_digest": "another"}))


@pytest.mark.parametrize("name", ["seed", "sessions_digest", "latency_at_least_s", "arrivals"])
def test_points_of_older_files(compare, name):
    older = {key: value for key, value in point(1.0, 0, 1.0).items() if key != name}
    with pytest.raises(ConfigError, match=f"line 1.*files that --output_json wrote; it has no '{name}'"):
        compare(document("a", older))


@pytest.mark.parametrize("name", ["kv_bytes", "left_out", "settings"])
def test_older_files(compare, name):
    with pytest.raises(ConfigError, match=f"line 1.*files that --output_json wrote; it has no '{name}'"):
        compare(document("a", point(1.0, 0, 1.0), lacks=[name]))


def test_files_without_a_point(compare):
    with pytest.raises(ConfigError, match="files with a load point"):
        compare(document("a"))


def rows(*names, arrivals=(None,), unfinished=0):
    spread = {part: {"median": 1.0, "min": 1.0, "max": 1.0} for part in ("p50", "p99")}
    row = {"rate": 1.0, "latency_s": spread, "first_token_s": spread, "num_unfinished": unfinished}
    return [{"system": name, "arrivals": kind, **row} for name in names for kind in arrivals]


@pytest.mark.long
def test_what_a_picture_has_no_room_for(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "compared.png"
    compared.draw(rows(*map(str, range(10)), arrivals="abcd"), "title", path)
    with pytest.raises(ConfigError, match=r"at most 4 kinds of arrivals.*found 5"):
        compared.draw(rows("a", arrivals="abcde"), "title", path)
    with pytest.raises(ConfigError, match=r"at most 10 systems.*found 11"):
        compared.draw(rows(*map(str, range(11))), "title", path)
    with pytest.raises(ConfigError, match="have no rate"):
        compared.draw([rows("a")[0] | {"rate": None}], "title", path)
    with pytest.raises(ConfigError, match="can be written"):
        compared.draw(rows("a"), "title", tmp_path / "nowhere" / "a.png")


def test_a_hollow_point_is_a_lower_bound(tmp_path, monkeypatch):
    """First tokens count only answered requests, so they are no lower bounds and their points are full."""
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    save = figure.Figure.savefig
    monkeypatch.setattr(
        figure.Figure, "savefig", lambda self, *a, **b: drawn.append(self) or save(self, *a, **b)
    )
    for unfinished in (3, 0):
        compared.draw(rows("a", unfinished=unfinished), "title", tmp_path / "compared.png")
    faces = [
        [
            next(line.get_markerfacecolor() for line in axes.lines if line.get_marker() == "o")
            for axes in one.axes
        ]
        for one in drawn
    ]
    assert faces == [["white", "white", "C0"], ["C0"] * 3]
    assert [("hollow" in one.get_suptitle()) for one in drawn] == [True, False]
    assert {axes.get_xlabel() for axes in drawn[0].axes} == {"conversations per second"}
    assert "answered" in drawn[0].axes[2].get_ylabel()
