"""Savings of a KV cache on a user's trace: from the file to the table, the picture and the document."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from absl import flags

from pensieve_jax import ConfigError
from pensieve_jax.config import NUM_BUCKETS_GPU
from pensieve_lab.workload import ConversationTrace, Trace, TraceError, TurnTrace
from tests.launching import load

QUIET = {"progress": "false", "tries": 0}  # most tests need no loads within a target


def mooncake_lines(num_sessions=30, seed=0):
    """Make sessions of three turns a few seconds apart, as published: without a session column."""
    rng = np.random.default_rng(seed)
    requests = []
    for session in range(num_sessions):
        time_ms, num_tokens, own = int(rng.integers(0, 60_000)), 0, [0]
        for _ in range(3):
            num_tokens += int(rng.integers(1100, 1600))
            own += [1000 * (session + 1) + len(own) + i for i in range(-(-num_tokens // 512) - len(own))]
            requests.append(
                {"timestamp": time_ms, "input_length": num_tokens, "output_length": 20, "hash_ids": list(own)}
            )
            del own[num_tokens // 512 :]
            num_tokens += 20
            time_ms += int(rng.integers(5000, 20_000))
    return sorted(requests, key=lambda request: request["timestamp"])


@pytest.fixture
def mooncake(tmp_path):
    path = tmp_path / "conversation_trace.jsonl"
    path.write_text("".join(json.dumps(request) + "\n" for request in mooncake_lines()))
    return path


@pytest.fixture
def simulate_serving(launch, capsys):
    """Run it; returns what it printed and its document."""

    def simulate_serving(**flags):
        assert launch("simulate_serving", shared_llm=False, **QUIET | flags) == 0
        out = capsys.readouterr().out
        return out, json.loads(out.splitlines()[-1])

    return simulate_serving


def test_a_file_alone_is_enough(simulate_serving, mooncake, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "savings.png"
    out, document = simulate_serving(trace=mooncake, plot=plot)
    assert "read as mooncake: 30 conversations, 90 turns" in out
    assert "they begin as recorded; pauses are recorded" in out
    assert "keeping state saves" in out
    assert plot.read_bytes().startswith(b"\x89PNG") and 10_000 < plot.stat().st_size < 150_000
    results = document["results"]
    stateless, device, *both = results["systems"]
    assert (stateless["system"], device["system"]) == ("stateless", "pensieve-gpu")
    assert [one["cpu_bytes"] // one["gpu_bytes"] for one in both] == [1, 2, 4]
    assert stateless["saved_prefill_share"] == stateless["saved_gpu_s"] == 0
    saved = [one["saved_prefill_share"] for one in (stateless, device, *both)]
    assert saved == sorted(saved) and saved[-1] > 0.3
    for one in results["systems"]:
        assert one["num_requests"] == 90 and one["num_unfinished"] == 0
        assert (
            one["computed_tokens"]
            == one["prefilled_tokens"] + one["recomputed_tokens"] + one["wasted_tokens"]
        )
        assert (
            one["computed_tokens"]
            + round((one["gpu_hit_rate"] + one["cpu_hit_rate"]) * one["history_tokens"])
            - one["wasted_tokens"]
            == stateless["computed_tokens"] - stateless["wasted_tokens"]
        )
    assert results["part"]["share"] == 1 and results["part"]["rate_per_s"] is None
    assert set(one for one in both[0]) >= {"normalized_latency_s", "first_token_s", "device_busy_s"}
    assert {"computed_tokens", "saved_gpu_s"} <= document["units"].keys()


def test_a_part_without_the_longest_conversation_has_memory_for_it(simulate_serving, mooncake):
    """A context may be as long as the trace's longest; an eighth of a small part's KV cache did not hold
    one."""
    lines = [json.loads(line) for line in mooncake.read_text().splitlines()]
    first = min(lines, key=lambda line: line["input_length"])
    long = first | {"input_length": 60_000, "hash_ids": list(range(10**6, 10**6 + 118))}
    mooncake.write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines, long | {"timestamp": 60_000_000}])
    )
    out, document = simulate_serving(trace=mooncake, share=0.1)
    systems = document["results"]["systems"]
    assert {one["num_unfinished"] for one in systems} == {0}
    assert "served: 9.68% of them: 3 conversations, 9 turns" in out, "the long one is not among them"


@pytest.mark.long
def test_a_recording_may_begin_at_any_time(simulate_serving, mooncake):
    """For the end of a recording, the time before it counted as idle, and loads were light."""
    _, whole = simulate_serving(trace=mooncake, share=1.0)
    lines = [json.loads(line) for line in mooncake.read_text().splitlines()]
    late = [line | {"timestamp": line["timestamp"] + 100_000_000} for line in lines]
    mooncake.write_text("".join(json.dumps(line) + "\n" for line in late))
    _, shifted = simulate_serving(trace=mooncake, share=1.0)
    busy = [found["results"]["systems"][0]["device_busy"] for found in (whole, shifted)]
    assert busy[1] == pytest.approx(busy[0], rel=0.02)


@pytest.mark.parametrize("num_tokens", [2, 33, 100])
def test_memory_is_chosen_for_short_conversations(simulate_serving, tmp_path, num_tokens):
    """1.25 contexts of 100 tokens are three whole pages of 32, one too few, so nothing was served."""
    path = tmp_path / "short.csv"
    path.write_text(f"prompt_tokens,output_tokens,time_s\n{num_tokens - 1},1,0\n1,1,1\n")
    _, document = simulate_serving(trace=path)
    assert {one["num_requests"] for one in document["results"]["systems"]} == {2}


def test_how_much_of_the_trace_is_served_is_said_in_words(simulate_serving, mooncake, monkeypatch):
    """A share of 1.0 was printed as "served: 1 of them"."""
    titles = []
    monkeypatch.setattr(load("simulate_serving"), "draw_savings", lambda _, title, path: titles.append(title))
    pytest.importorskip("matplotlib")
    plot = mooncake.with_name("x.png")
    out, _ = simulate_serving(trace=mooncake, plot=plot)
    assert "\nserved: all 30 conversations, 90 turns, which come to " in out
    out, _ = simulate_serving(trace=mooncake, plot=plot, share=0.1)
    assert "\nserved: 10% of them: 3 conversations, 9 turns, which come to " in out
    whole, part = titles
    assert whole.startswith("all of conversation_trace.jsonl on NVIDIA H200")
    assert part.startswith("10% of conversation_trace.jsonl on NVIDIA H200")


@pytest.mark.parametrize(
    ("slowest_s", "label", "ticks"),
    [
        (0.05, "ms/token, arrival to last token", [0, 10, 20, 30, 40, 50]),
        (0.5, "ms/token, arrival to last token (log)", [10, 20, 50, 100, 200, 500]),
    ],
)
def test_an_axis_is_linear_unless_it_spans_much(tmp_path, monkeypatch, slowest_s, label, ticks):
    """It was always logarithmic, with a single label for similar latencies. Legends stay inside the
    figure."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn = []
    real = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *a, **k: drawn.append(figure) or real(figure, *a, **k)
    )
    load("pensieve_lab.simulation.picture").draw_savings(
        served(busy=0.5, p99_s=slowest_s), "title", tmp_path / "x.png"
    )
    latency, history = drawn[0].axes[1:]
    assert latency.get_xlabel() == label
    low, high = latency.get_xlim()
    shown = [t.get_text() for t in latency.get_xticklabels() if low <= t.get_position()[0] <= high]
    assert [float(text) for text in shown if text] == ticks
    width = drawn[0].bbox.width
    assert history.get_legend().get_window_extent().x1 < 0.99 * width


def served(*, busy, p99_s=0.02):
    """Make a stateless system, and one that reuses three quarters of history with either of two memories."""
    savings, memory = load("pensieve_lab.simulation.savings"), load("pensieve_lab.simulation.memory")
    latency = {"mean": 0.01, "p50": 0.009, "p90": 0.011, "p99": p99_s}
    figures = {"normalized_latency_s": latency, "device_busy": busy, "num_requests": 9}
    figures |= {"wasted_tokens": 0, "gpu_hit_rate": 0.0, "cpu_hit_rate": 0.0}
    figures |= {"prefilled_tokens": 1000, "recomputed_tokens": 3000, "device_busy_s": 100.0}
    kept = figures | {"recomputed_tokens": 0, "gpu_hit_rate": 0.75, "cpu_hit_rate": 0.25}
    found = [("stateless", 0, figures)]
    found += [("pensieve", cpu, kept | {"device_busy_s": s}) for cpu, s in ((2, 60.5), (4, 60.0))]
    return [
        savings.SystemResult(name=name, memory=memory.Memory(10**9, cpu * 10**9), figures=each)
        for name, cpu, each in found
    ]


def test_the_advice_says_why_that_memory_and_what_latencies_are_worth():
    savings = load("pensieve_lab.simulation.savings")
    told = savings.answer(served(busy=0.5))
    assert told.startswith("1 GB device + 2 GB host is the smallest memory that saves nearly as much")
    assert "keeping state saves 75% of the prefilled tokens and 40% of the GPU's time (40 s)" in told
    idle, busy = (savings.load(served(busy=share)[0]) for share in (0.02, 0.6))
    assert "one GPU busy for 2% of the time: latencies say little at this load" in idle
    assert "one GPU busy for 60% of the time" in busy and "latencies" not in busy


def test_tokens_that_save_no_time_are_not_called_lost_histories():
    """All short histories may be reused while steps take as long as without; that was reported as nothing."""
    savings = load("pensieve_lab.simulation.savings")
    stateless, *kept = served(busy=0.5)
    kept = [dataclasses.replace(one, figures={**one.figures, "device_busy_s": 100.1}) for one in kept]
    told = savings.answer([stateless, *kept])
    assert told.startswith("State saves none of the GPU's time here")
    assert told.endswith("With 1 GB device + 2 GB host it saves 75% of the prefilled tokens.")
    lost = [dataclasses.replace(one, figures={**stateless.figures, "device_busy_s": 100.1}) for one in kept]
    assert savings.answer([stateless, *lost]).startswith("State saves nothing here: no turn has a history")


def test_the_first_lines_say_what_is_saved():
    savings, memory = load("pensieve_lab.simulation.savings"), load("pensieve_lab.simulation.memory")
    systems = served(busy=0.5)
    first = {"first_token_s": {"mean": 0.2, "p90": 0.3}}
    systems = [dataclasses.replace(one, figures={**one.figures, **first}) for one in systems]
    whole = memory.Memory(40 * 10**9, 80 * 10**9)
    loads = [
        savings.AtTarget("stateless", whole, 1.0, 4.0, 5.0),
        savings.AtTarget("pensieve-gpu", whole, 1.2, 5.0, 6.1),
        savings.AtTarget("pensieve", whole, 1.5, 6.0, None),
    ]
    assert savings.headline(systems, loads, "100 ms/token on average").splitlines() == [
        "What would keeping the KV cache save you, with 1 GB device + 2 GB host?",
        "  GPU time: 39.5 of 100 s (40%) for these 9 requests",
        "  prefill: 75% of the prefilled tokens",
        "  time to first token: 200 ms on average instead of 200",
        "  requests: with 40 GB device + 80 GB host, one GPU answers 6 a second instead of 4 (1.50 times) "
        "within 100 ms/token on average",
    ]
    assert len(savings.headline(systems, [], "").splitlines()) == 4, "no load was tried"
    rows = [row.split("  ") for row in savings.request_table(loads).splitlines()[2:]]
    assert [[cell.strip() for cell in row if cell] for row in rows] == [
        ["none", "4", "5", "1.00", "250"],
        ["40 GB device + 80 GB host", "5", "6.1", "1.25", "200"],
        ["40 GB device + 80 GB host", "6", "-", "1.50", "167"],
    ]
    rows = savings.memory_table(systems).splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["none", "1", "1"]
    assert "75%" in rows[1] and "40%" in rows[1]


@pytest.mark.parametrize("limit", [0.03, 0.9, 7.3, 200.0])
def test_the_greatest_rate_is_found_from_either_side(limit):
    capacity = load("pensieve_lab.simulation.capacity")

    def figures_at(rate_per_s):
        mean = {"mean": 0.05 if rate_per_s <= limit else 0.5}
        return {"normalized_latency_s": mean, "first_token_s": mean, "rate": rate_per_s}

    found = capacity.greatest_rate(figures_at, capacity.Target(100.0), 1.0, 14, 4.0)
    assert found.missed is not None
    assert 0.97 * limit < found.rate_per_s <= limit < found.missed["rate"] < 1.03 * limit
    assert found.figures["rate"] == found.rate_per_s
    assert capacity.greatest_rate(figures_at, capacity.Target(1.0), 1.0, 6, 4.0) is None
    always = capacity.greatest_rate(figures_at, capacity.Target(1e9), 1.0, 6, 4.0)
    assert always.missed is None and always.rate_per_s == 4.0**12


def test_latencies_that_grow_with_the_rate_are_followed_to_the_target():
    """Twice halving a factor of four leaves 19% on either side."""
    capacity = load("pensieve_lab.simulation.capacity")

    def figures_at(rate_per_s):
        mean = {"mean": 0.01 * rate_per_s**1.5}
        return {"normalized_latency_s": mean, "first_token_s": mean}

    found = capacity.greatest_rate(figures_at, capacity.Target(100.0), 1.0, 2, 4.0)
    assert found.rate_per_s == pytest.approx(10 ** (2 / 3), rel=0.02)


@pytest.mark.parametrize(
    ("latency_s", "first_s", "level_ms", "first_ms", "holds"),
    [
        (0.1, 0.2, 100, None, True),
        (0.11, 0.2, 100, None, False),
        (0.1, 0.2, 100, 200, True),
        (0.1, 0.21, 100, 200, False),
    ],
)
def test_a_target_limits_both_latencies(latency_s, first_s, level_ms, first_ms, holds):
    target = load("pensieve_lab.simulation.capacity").Target(level_ms, first_ms)
    figures = {"normalized_latency_s": {"mean": latency_s}, "first_token_s": {"mean": first_s}}
    assert (target.used(figures) <= 1) is holds
    assert target.used({"normalized_latency_s": None, "first_token_s": None}) == math.inf


@pytest.mark.parametrize("time_scale", [1.0, 0.5])
def test_a_rate_without_arrivals_follows_from_gpu_seconds(time_scale):
    """All conversations of a short trace began within 0.2 s, since any rate was in time."""
    capacity, part = load("pensieve_lab.simulation.capacity"), load("pensieve_lab.simulation.part")
    turns = (TurnTrace(10, 10), TurnTrace(10, 10))
    trace = Trace("made", tuple(ConversationTrace(str(i), turns) for i in range(50)))
    sampler = part.Sampler(trace=trace, time_scale=time_scale, seed=0)
    rate = capacity.usual_rate(sampler, 1.0, lambda sessions: 2.0 * len(sessions))
    assert rate == pytest.approx(0.7 * 0.5 * time_scale)
    found = part.fitting_part(sampler, 2000, 0.3, lambda sessions: 0.01, rate)
    assert found.rate_per_s == rate and found.in_time is True
    at = capacity.load_at(sampler, found, 2.0)
    assert at.warm_up_s == at.window_s and at.sessions[-1].arrival_s < 2 * at.window_s
    assert len(at.sessions) == pytest.approx(2.0 * 2 * at.window_s, rel=0.2)


@pytest.mark.long
def test_requests_within_a_target_are_measured(simulate_serving, mooncake):
    out, document = simulate_serving(trace=mooncake, gpu_bytes="2GB", cpu_bytes="4GB", level_ms=40, tries=1)
    loads = document["results"]["at_target"]
    assert [one["system"] for one in loads] == ["stateless", "pensieve-gpu", "pensieve"]
    assert all(one["missed_requests_per_s"] > 0 for one in loads)
    assert "within 40 ms/token on average, one GPU answers:\nmemory for the KV cache" in out
    assert all(one["gpu_bytes"] == 2 * 10**9 and one["requests_per_s"] > 0 for one in loads)
    assert "one GPU answers" in out.splitlines()[4] and "within 40 ms/token on average" in out


def test_memory_share_and_rate_can_be_given(simulate_serving, mooncake):
    flags = {"gpu_bytes": "2GB", "cpu_bytes": "1GB,4GB", "share": 0.5, "rate": 2.0, "seed": 3}
    out, document = simulate_serving(trace=mooncake, **flags)
    results = document["results"]
    assert [(one["gpu_bytes"], one["cpu_bytes"]) for one in results["systems"]] == [
        *2 * [(2 * 10**9, 0)],
        (2 * 10**9, 10**9),
        (2 * 10**9, 4 * 10**9),
    ]
    assert "15 conversations, 45 turns" in out and "at random, 2 a second" in out


def test_a_trace_without_times_gets_a_rate_that_fits(simulate_serving, tmp_path):
    chat = [{"from": "human", "value": "word " * 40}, {"from": "gpt", "value": "word " * 30}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"id": str(i), "conversations": chat * 3} for i in range(20)]))
    out, document = simulate_serving(trace=path, max_turns=30)
    assert "read as sharegpt: 20 conversations, 60 turns" in out
    assert "for up to 70% of the GPU without state (--rate): all within " in out
    assert "at random" in out and "else drawn, 60 s on average" in out
    part = document["results"]["part"]
    assert (part["num_sessions"], part["has_pauses"]) == (10, False) and part["rate_per_s"] > 0


def test_the_part_is_the_largest_that_is_answered_in_time():
    part = load("pensieve_lab.simulation.part")
    turns = (TurnTrace(10, 10), TurnTrace(10, 10, gap_s=5.0))
    trace = Trace("made", tuple(ConversationTrace(str(i), turns, float(i)) for i in range(1000)))
    sampler = part.Sampler(trace=trace, time_scale=1.0, seed=0)

    def latency_s(sessions):
        return len(sessions) / 1000

    found = part.fitting_part(sampler, 2000, 0.3, latency_s)
    assert 0.6 * 300 <= len(found.sessions) <= 300 and found.in_time is True
    never = part.fitting_part(sampler, 2000, 0.3, lambda sessions: 0.4)
    assert never.in_time is False and len(never.sessions) < 10, "the least that was tried"
    assert sampler.part(0.5, None).in_time is None, "no request was made"
    assert part.fitting_part(sampler, 200, 0.3, latency_s).share == 0.1, "no more turns than were asked for"
    smaller, larger = (
        {session.conversation.conversation_id for session in sampler.part(share, None).sessions}
        for share in (0.1, 0.2)
    )
    assert smaller < larger, "parts lie within one another"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"trace": "/nowhere"}, "--trace is '/nowhere', but must be a file that can be read"),
        ({"share": 0}, "--share is 0"),
        ({"share": 1.5}, "--share is 1.5"),
        ({"time_scale": 0}, "--time_scale is 0"),
        ({"level_ms": 0}, "--level_ms is 0"),
        ({"first_token_ms": 0}, "--first_token_ms is 0"),
        ({"max_turns": 0}, "--max_turns is 0"),
        ({"gpu_bytes": "much"}, "--gpu_bytes is 'much'"),
        ({"cpu_bytes": "1GB,x"}, "--cpu_bytes is 'x'"),
        ({"max_context_tokens": 100}, "--max_context_tokens is 100"),
        ({"plot": "/nowhere/a.png"}, "a directory that exists"),
    ],
)
def test_refuses(launch, mooncake, flags, says):
    with pytest.raises(ConfigError, match=says):
        launch("simulate_serving", shared_llm=False, **QUIET | {"trace": mooncake} | flags)


@pytest.mark.parametrize("script", ["simulate", "simulate_serving"])
def test_a_seed_below_0_is_refused_by_name(launch, mooncake, script):
    """It was a traceback of numpy."""
    with pytest.raises(flags.IllegalFlagValueError, match=r"--seed=-1: -1 is not a non-negative integer"):
        launch(script, shared_llm=False, trace=mooncake, seed=-1)


def test_says_that_nothing_was_answered_in_time(simulate_serving, mooncake):
    out, document = simulate_serving(trace=mooncake, level_ms=0.001)
    assert "the stateless system answers no tried part within 0.001 ms/token" in out
    assert document["results"]["part"]["in_time"] is False


def test_steps_are_of_the_sizes_of_an_engine_on_a_gpu(simulate_serving, mooncake, monkeypatch):
    module, seen = load("simulate_serving"), []

    def simulate(scenario, *args, **kwargs):
        seen.append(scenario.config.scheduler)
        return real(scenario, *args, **kwargs)

    real = module.simulate
    monkeypatch.setattr(module, "simulate", simulate)
    simulate_serving(trace=mooncake, share=0.1)
    assert {one.bucket_limit for one in seen} == {NUM_BUCKETS_GPU}


def test_a_bad_line_is_named(launch, mooncake):
    lines = mooncake.read_text().splitlines()
    lines[6] = lines[6].replace('"output_length": 20', '"output_length": "many"')
    mooncake.write_text("\n".join(lines))
    with pytest.raises(
        TraceError, match=r"conversation_trace\.jsonl, line 7: output_length is 'many', but must"
    ):
        launch("simulate_serving", shared_llm=False, trace=mooncake, **QUIET)


def test_shows_progress(launch, mooncake, capsys):
    assert launch("simulate_serving", shared_llm=False, trace=mooncake, progress="true") == 0
    shown = capsys.readouterr().err
    assert "finding a load" in shown and "pensieve (5 of 5)" in shown
