"""A load point without a model: users, the clock, the window, figures, and their documents."""

from __future__ import annotations

import dataclasses
import json
import math
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from lab.tests.serving_fakes import Ticker, TickServer, session, users
from model_defs import preset
from pensieve_jax import CacheConfig, ConfigError, EngineConfig, Usage
from pensieve_jax.cache import ChunkCopy
from pensieve_jax.device.kv_storage import chunk_bytes
from pensieve_jax.engine.transfers import Ended
from pensieve_lab.common.systems import PENSIEVE, PENSIEVE_GPU, system_config
from pensieve_lab.workload import Answer, UserTurn
from tests.deadlines import TIMEOUT_S
from tests.launching import load

serving_client = load("pensieve_lab.serving.client")
serving_clock = load("pensieve_lab.serving.clock")
serving_figures = load("pensieve_lab.serving.figures")
plots = load("pensieve_lab.serving.latency_plot")
serving_report = load("pensieve_lab.serving.report")
serving_run = load("pensieve_lab.serving.run")
serving_steps = load("pensieve_lab.serving.timed_runner")
Lag, Prompts, Window = serving_client.Lag, serving_client.Prompts, serving_run.Window


def run_ticks(*sessions, window=None, **options):
    """Serve sessions in virtual time, one second per step."""
    ticker = Ticker()
    clock = serving_clock.RunClock(ticker, ticker.sleep)
    server = TickServer(ticker, clock)
    client = serving_client.InlineClient(users(*sessions, **options), Prompts(50, 0), clock)
    return serving_run.serve(server, client, clock, window or Window()), server


def test_figures_of_a_timeline_made_by_hand():
    """a: 3 tokens from 0 to 3, thinks until 5, 2 tokens until 7; b arrives in a step, at 1.5."""
    a = session("a", 0.0, (10, 3), (4, 2), think_s=[2.0])
    run, server = run_ticks(a, session("b", 1.5, (6, 4)))
    assert [(answer.turn.conversation_id, answer.end_s) for answer in run.answers] == [
        *(("a", 3.0), ("b", 6.0), ("a", 7.0)),
    ]
    found = serving_figures.figures(run, max_lag_s=1.0)
    assert found["num_requests"] == 3 and found["num_unfinished"] == 0 and found["seconds"] == 7.0
    assert found["requests_per_s"] == found["sent_requests_per_s"] == 3 / 7
    assert found["output_tokens_per_s"] == 9 / 7
    # From arrival: 3 s for 3 tokens, 4.5 s for 4, 2 s for 2.
    assert found["normalized_latency_s"]["mean"] == pytest.approx((1 + 4.5 / 4 + 1) / 3)
    assert found["normalized_latency_s"]["p50"] == 1.0
    assert found["first_token_s"]["mean"] == pytest.approx((1 + 1.5 + 1) / 3)
    assert found["output_token_s"]["mean"] == 1.0
    assert found["gpu_hit_rate"] == 1.0 and found["history_tokens"] == 13
    # b was due at 1.5, but the loop did not check for a second: handed over at 2.
    assert found["client_lag_s"] == {"p50": 0.0, "p99": pytest.approx(0.49), "max": 0.5}
    assert found["num_steps"] == 7 and found["tokens_per_step"] == 3 and found["swapped_in_bytes"] == 0
    assert found["num_suspensions"] is None and found["host_step_s"] is None
    assert found["steps"] == {"64": {"num_steps": 7, "mean_s": 1.0, "mean_tokens": 3.0}}
    assert [ids for _, ids in server.submitted] == [
        Prompts(50, 0).of_turn(turn) for turn, _ in server.submitted
    ]


def test_only_what_arrives_in_the_window_counts_and_its_last_requests_meet_the_same_load():
    every_second = [session(f"s{i}", float(i), (5, 3)) for i in range(40)]
    run, server = run_ticks(*every_second, window=Window(10.0, 20.0, drain_s=8.0))
    found = serving_figures.figures(run, max_lag_s=1.0)
    assert found["num_requests"] == 10 and found["num_unfinished"] == 0
    assert found["requests_per_s"] == 1.0 and found["seconds"] == 10.0
    assert found["num_steps"] == 10, "steps of the warm-up and of the end do not count"
    assert run.end_s == 22.0 and len(server.submitted) == 22, "it ends when the last one of the window does"


def test_what_the_drain_is_too_short_for_is_unfinished():
    late = [session("long", 14.0, (5, 100)), session("short", 14.0, (5, 2))]
    run, _ = run_ticks(*late, window=Window(10.0, 20.0, drain_s=7.0))
    found = serving_figures.figures(run, max_lag_s=1.0)
    assert run.end_s == 27.0
    assert (found["num_requests"], found["num_unfinished"], found["sent_requests_per_s"]) == (1, 1, 0.2)
    assert found["latency_s"]["mean"] == 2.0, "of the one that was answered"
    assert found["latency_at_least_s"]["mean"] == (2.0 + 13.0) / 2, "the other came at 14"


def test_an_empty_window():
    run, _ = run_ticks(session("a", 0.0, (5, 2)), window=Window(10.0, 20.0, drain_s=5.0))
    found = serving_figures.figures(run, max_lag_s=1.0)
    assert found["normalized_latency_s"] is None and found["client_lag_s"] is None and not found["void"]
    assert found["requests_per_s"] == 0 and "-" in serving_report.tables("x", [{"rate": None, **found}])


def test_which_steps_the_time_went_to():
    """Steps of a second each take all the time in which there is work."""
    run, _ = run_ticks(session("a", 14.0, (5, 4)), window=Window(10.0, 20.0, drain_s=5.0))
    found = serving_figures.figures(run, max_lag_s=1.0)
    text = serving_report.tables("x", [{"rate": 2.0, **found}])
    rows = [line.split() for line in text.split("\n\n")[-1].splitlines()]
    assert rows[0] == ["system", "rate", "bucket", "steps", "ms/step", "tokens/step", "%", "of", "time"]
    assert rows[2:] == [
        ["x", "2", "64", "4", "1000.00", "3.0", "40.0"],
        ["x", "2", "none", "-", "-", "-", "60.0"],
    ]
    unknown = serving_report.tables("x", [{"rate": 2.0, **found, "steps": {}}])
    assert "bucket" not in unknown, "of other servers"


def test_sessions_that_outgrow_the_context_are_counted():
    run, _ = run_ticks(session("a", 0.0, (5, 2), (5, 2), think_s=[0.0]), max_context_tokens=12)
    assert run.num_refused == 1 and len(run.answers) == 1


def test_a_run_is_void_if_users_were_late():
    lags = [Lag(float(i), 0.001) for i in range(98)] + [Lag(98.0, 0.02), Lag(99.0, 0.02), Lag(200.0, 9.0)]
    values = {"answers": [], "unfinished": [], "num_refused": 0, "counters": {}, "steps": {}, "end_s": 1.0}
    run = serving_run.Run(window=Window(0.0, 100.0, 0.0), lags=lags, **values)
    assert serving_figures.figures(run, max_lag_s=0.010)["void"]
    assert not serving_figures.figures(run, max_lag_s=0.021)["void"]


def test_the_digest_of_sessions():
    """It covers arrivals, lengths and think times, but not the last bits of a time."""
    first = [session("a", 1.5, (10, 3), (4, 2), think_s=[2.0]), session("b", 2.0, (6, 4))]
    same = [session("a", 1.5 + 1e-12, (10, 3), (4, 2), think_s=[2.0]), session("b", 2, (6, 4))]
    others = (
        [session("a", 1.6, (10, 3), (4, 2), think_s=[2.0]), first[1]],
        [session("a", 1.5, (10, 3), (4, 2), think_s=[3.0]), first[1]],
        [session("a", 1.5, (10, 3), (4, 1), think_s=[2.0]), first[1]],
        [session("a", 1.5, (11, 3), (4, 2), think_s=[2.0]), first[1]],
        [session("c", 1.5, (10, 3), (4, 2), think_s=[2.0]), first[1]],
        [dataclasses.replace(first[0], first_turn=1), first[1]],
        first[:1],
    )
    digest = load("pensieve_lab.serving.load_points").sessions_digest
    assert digest(first) == digest(same) and len({digest(who) for who in (first, *others)}) == 8


def test_the_engines_own_default_gives_a_system_its_host_memory():
    """Without a size, or with a share, the machine decides how much; only none at all is refused."""
    for given in ({}, {"cpu_memory_fraction": 0.5}, {"gpu_pages": 8, "cpu_pages": 4}):
        config = EngineConfig(cache=CacheConfig(**given))
        assert system_config(PENSIEVE, config) is config
        assert not system_config(PENSIEVE_GPU, config).asks_for_host_tier
    for none in ({"cpu_pages": 0}, {"cpu_bytes": 0}, {"gpu_pages": 8}):
        with pytest.raises(ConfigError, match="above 0 for pensieve"):
            system_config(PENSIEVE, EngineConfig(cache=CacheConfig(**none)))


def test_bytes_of_kv_state_that_a_system_was_given():
    """As in its configuration, or in the flags; other servers' 8-bit pages have no scales."""
    model = preset("llama-tiny")
    bytes_of = load("pensieve_lab.serving.kv_memory").kv_bytes
    cache = CacheConfig(gpu_pages=10, kv_dtype="int8")
    plain = 10 * chunk_bytes(model, 32, jnp.dtype("float32"))

    def given(described, *, cache=cache, is_ours=False):
        return bytes_of(described, model, "float32", cache, is_ours=is_ours)

    assert given({"options": {}}) == plain / 4 < given({}, is_ours=True) < plain
    assert given({"options": {}}, cache=CacheConfig(gpu_pages=10)) == plain
    own = {"config": {"cache": dataclasses.asdict(CacheConfig(gpu_pages=20))}}
    assert given(own, is_ours=True) == 2 * plain
    assert given({"config": {"kv_bytes": 7, "tensor_parallel_size": 2}}) == 14
    assert given({}, cache=CacheConfig(gpu_memory_fraction=0.5)) is None


class LastPrompt:
    """Prompts that signal when the `count`-th was asked for."""

    def __init__(self, count: int) -> None:
        self.num_left, self.asked = count, threading.Event()

    def of_turn(self, turn: UserTurn) -> list[int]:
        self.num_left -= 1
        if not self.num_left:
            self.asked.set()
        return [1] * turn.prompt_tokens


def test_users_never_wait_for_the_server():
    """While the server's thread is blocked, as in a long step, four turns fall due and are handed over."""
    prompts, clock = LastPrompt(4), serving_clock.RunClock()
    due = [session(f"s{i}", 0.01 * i, (3, 2)) for i in range(4)]
    client = serving_client.ThreadedClient(users(*due), prompts, clock)
    clock.start()
    with client:
        assert prompts.asked.wait(timeout=TIMEOUT_S), "users waited"
        sent = client.take()
        while len(sent) < 4:  # the last one is on its way
            client.wait(math.inf)
            sent += client.take()
        assert [turn.conversation_id for turn in sent] == ["s0", "s1", "s2", "s3"]
        assert not client.done
        for turn in sent:
            client.answer(Answer(turn, 0, 0.1, 0.1, Usage(3, 0, 0, 0, 3, 2)))
        while not client.done:
            client.wait(math.inf)
            client.take()
    assert [lag.due_s for lag in client.lags] == [0.0, 0.01, 0.02, 0.03]
    assert all(lag.lag_s >= 0 for lag in client.lags)


def test_users_in_a_thread_think_and_stop():
    clock = serving_clock.RunClock()
    talk = session("a", 0.0, (3, 2), (3, 2), (3, 2), think_s=[0.0, 1e6])
    client = serving_client.ThreadedClient(users(talk), Prompts(50, 0), clock)
    clock.start()
    with client:
        for _ in range(2):
            sent = client.take()
            while not sent:
                client.wait(clock.now() + 30)
                sent = client.take()
            end_s = clock.now()
            client.answer(Answer(sent[0], 0, end_s, end_s, Usage(3, 0, 0, 0, 3, 2)))
        client.wait(clock.now())  # already past: returns at once
        assert not client.done, "the third turn is a million seconds away"
    assert len(client.lags) == 2


def test_an_error_of_a_user_ends_the_run():
    class Broken:
        def of_turn(self, turn):
            raise ConfigError("prompt", turn.conversation_id, "possible")

    clock = serving_clock.RunClock()
    client = serving_client.ThreadedClient(users(session("a", 0.0, (3, 2))), Broken(), clock)
    server = TickServer(Ticker(), clock)
    with pytest.raises(ConfigError, match="prompt is 'a'"):
        serving_run.serve(server, client, clock, Window())


def test_prompts_are_the_same_for_every_system():
    turn = UserTurn("a", 1, 0.0, 10, 30, 5, False)
    assert Prompts(500, 1, 2).of_turn(turn) == Prompts(500, 1, 2).of_turn(turn)
    others = (
        Prompts(500, 1, 3).of_turn(turn),
        Prompts(500, 1, 2).of_turn(UserTurn("a", 2, 0.0, 10, 30, 5, False)),
    )
    assert Prompts(500, 1, 2).of_turn(turn) not in others
    assert len(Prompts(500, 1).of_history("a", 77)) == 77
    assert min(Prompts(5, 1).of_history("a", 77)) == 3


def test_the_clock_stands_in_the_past_until_the_run_begins():
    ticker = Ticker()
    clock = serving_clock.RunClock(ticker, ticker.sleep)
    assert clock.now() < -1e6
    clock.go_to(-5.0)
    clock.go_to(-7.0)
    assert clock.now() == -5.0
    clock.start()
    ticker.now_s += 2.0
    clock.sleep_until(3.5)
    clock.sleep_until(1.0)
    assert clock.now() == 3.5 and clock.at(ticker.now_s) == 3.5


class ScriptedRunner:
    """Runner whose dispatches take 1 s, and whose steps end 10 s after they could begin."""

    transfers, num_compilations = None, 5

    def __init__(self, ticker: Ticker) -> None:
        self.ticker, self.end_s = ticker, 0.0
        self.layouts = {16: None, 64: None}

    def launch(self, plan):
        self.end_s = max(self.end_s, self.ticker.now_s) + 10.0
        self.ticker.now_s += 1.0
        return self.end_s

    def choose(self, handle, words):
        assert words is None

    def fetch(self, handle):
        self.ticker.now_s = max(self.ticker.now_s, handle)
        return "ids"


def started(runner, plan):
    """Launch a step and its choice."""
    handle = runner.launch(plan)
    runner.choose(handle, None)
    return handle


class Plan:
    def __init__(self, bucket: int, num_tokens: int) -> None:
        self.layout = type("Layout", (), {"num_tokens": bucket})
        self.num_rows = [1]
        self.cu_q_lens = [0, num_tokens]


class ScriptedTransfers:
    """Transfers whose calls take a second; copies are complete when asked for."""

    def __init__(self, ticker: Ticker) -> None:
        self.ticker, self.ids = ticker, []

    def swap_out(self, copies) -> None:
        self.ticker.now_s += 1.0
        self.ids += [copy.copy_id for copy in copies]

    swap_in = swap_out

    def expedite(self, copy_ids) -> None:
        self.ticker.now_s += 1.0
        self.ids = [copy_id for copy_id in self.ids if copy_id not in copy_ids]

    def completed(self):
        self.ticker.now_s += 1.0
        done, self.ids = self.ids, []
        return Ended(done)

    def wait(self) -> None:
        self.ticker.now_s += 5.0

    def stats(self):
        return {"swapped_out_bytes": 7}


def test_when_steps_begin_and_end():
    ticker = Ticker()
    runner = serving_steps.TimedRunner(ScriptedRunner(ticker), ticker)
    first = started(runner, Plan(64, 40))  # at 100, ends at 110
    second = started(runner, Plan(16, 2))  # at 101, ends at 120
    assert runner.fetch(first) == "ids" and ticker.now_s == 110
    ticker.now_s += 2.0  # the host schedules
    third = started(runner, Plan(16, 4))  # done at 113, ends at 130
    runner.fetch(second)
    runner.fetch(third)
    ticker.now_s += 500.0  # no turn is running
    runner.fetch(started(runner, Plan(16, 2)))
    assert runner.totals[64] == (1, 10.0, 40) and runner.totals[16] == (3, 30.0, 8)
    assert (runner.host_s, runner.num_host_steps) == (3.0, 1), "idle time is not the host's"
    assert runner.dispatch_s == 4.0
    assert runner.device_wait_s == 8 + 7 + 10 + 9
    assert runner.num_compilations == 5


def test_which_part_of_the_host_a_second_belongs_to(tmp_path):
    """A step in flight, then one with copies, and another after an idle hour, which belongs to no part."""
    ticker = Ticker()
    scripted = ScriptedRunner(ticker)
    scripted.transfers = ScriptedTransfers(ticker)
    runner = serving_steps.TimedRunner(scripted, ticker)
    transfers, parts = runner.transfers, runner.parts
    handle = started(runner, Plan(64, 40))
    for copies in ([ChunkCopy(1, 0, 0)], []):
        parts.lap("users" if runner.in_flight else "idle")
        assert not transfers.completed().arrived
        ticker.now_s += 3.0  # the scheduler
        transfers.swap_out(copies)
        transfers.swap_in([ChunkCopy(2, 1, 1), ChunkCopy(3, 2, 2)] if copies else [])
        transfers.expedite([3] if copies else [])
        ticker.now_s += 0.5  # the plan
        parts.work["submitted"] += 1
        following = started(runner, Plan(16, 1))
        runner.fetch(handle)
        handle = following
        ticker.now_s += 0.25  # ids to turns
        parts.lap("finish")
        if copies:
            assert list(transfers.completed().arrived) == [1, 2]
            ticker.now_s += 0.75  # users
    runner.fetch(handle)
    ticker.now_s += 3600.0
    parts.lap("idle")
    started(runner, Plan(16, 1))
    counters = parts.counters()
    # Only the second step followed one whose ids had come; its host's work began with those.
    expected = {"finish": 0.25, "users": 0.75, "complete": 2.0, "schedule": 3.0, "copies": 3.0, "plan": 0.5}
    assert {part: counters[f"host_{part}_s"] for part in expected} == expected
    assert counters["host_dispatch_s"] == 1.0 and counters["host_steps_of_32_ms"] == 1
    assert runner.host_s == sum(parts.seconds.values()) and runner.num_host_steps == 1
    found = transfers.stats()
    assert (found["num_timed_swap_outs"], found["num_timed_swap_ins"], found["swapped_out_bytes"]) == (
        1,
        2,
        7,
    )
    assert found["swap_in_s"] > found["swap_out_s"] / 2 > 0
    parts.save(tmp_path / "steps.npz")
    with np.load(tmp_path / "steps.npz") as file:
        columns, steps = list(file["columns"]), file["steps"]
    assert steps.shape == (4, len(columns))
    row = dict(zip(columns, steps[1], strict=True))
    assert (row["chunks_out"], row["chunks_in"], row["expedited"], row["bucket"]) == (1, 2, 1, 16)
    assert row["single_rows"] == row["rows"] == row["submitted"] == 1 and steps[0][columns.index("rows")] == 1
    assert dict(zip(columns, steps[3], strict=True))["idle_s"] == 3600.0
    figures = serving_figures._host_parts_s({"num_host_steps": 2, **counters})
    assert figures["schedule"] == 1.5 and serving_figures._host_parts_s({}) is None


def test_copies_of_a_reset_runner_are_not_counted():
    ticker = Ticker()
    timed = serving_steps.TimedTransfers(
        ScriptedTransfers(ticker), load("pensieve_lab.serving.host_parts").HostParts(ticker), ticker
    )
    timed.swap_in([ChunkCopy(1, 0, 0)])
    timed.forget()
    timed.swap_out([ChunkCopy(2, 0, 0)])
    assert not timed._asked_in_s and list(timed._asked_out_s) == [2]


def point(rate, latency_s, *, void=False):
    spread = {"mean": latency_s, "p90": 2 * latency_s}
    return {"rate": rate, "requests_per_s": rate, "normalized_latency_s": spread, "void": void}


def read_curves(*paths):
    return serving_report.read_curves([serving_report.Named("--curves", None, paths)])


def write(path, system, *points, benchmark="serving_benchmark", **results):
    named = {"model": "a", "trace": {"name": "talk"}, **results}
    document = {"benchmark": benchmark, "results": {"system": system, "points": points, **named}}
    serving_report.append_line(path, json.dumps(document))


def test_curves_of_several_files(tmp_path):
    """Points are ordered by load, so a curve turns back where a system serves less than before."""
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    write(one, "pensieve", point(4.0, 0.02) | {"rate": 9.0})
    write(one, "pensieve", point(2.0, 0.01), point(9.0, 0.5, void=True))
    write(other, "stateless", point(2.0, 0.03))
    write(other, "pensieve", point(4.5, 0.015))
    title, curves = read_curves(one, other)
    assert title == "a, talk"
    assert {name: [p.requests_per_s for p in found] for name, found in curves.items()} == {
        "pensieve": [2.0, 4.5, 4.0],
        "stateless": [2.0],
    }
    assert curves["stateless"][0] == (2.0, 0.03, 0.06)


def test_curves_of_first_tokens(tmp_path):
    """A document without first tokens is refused, with its line."""
    path = tmp_path / "points.json"
    first_token_s = {"mean": 0.5, "p90": 4.0}
    write(path, "pensieve", point(4.0, 0.02) | {"first_token_s": first_token_s})
    latency = plots.LATENCIES["first_token"]
    named = [serving_report.Named("--curves", None, (path,))]
    assert serving_report.read_curves(named, latency).by_name == {"pensieve": [(4.0, 0.5, 4.0)]}
    write(path, "pensieve", point(5.0, 0.02))
    with pytest.raises(ConfigError, match=r"points\.json, line 2.*it has no 'first_token_s'"):
        serving_report.read_curves(named, latency)


def test_a_logarithmic_axis_shows_all_points(tmp_path):
    pytest.importorskip("matplotlib")
    view = plots.View(latency=plots.LATENCIES["first_token"])
    curves = {str(number): [serving_report.Point(1.0, 0.01, 9.0 + number)] for number in range(8)}
    assert plots._top_ms(curves, view) == pytest.approx(1.1 * 16_000)
    serving_report.draw(curves, "a", tmp_path / "a.png", view)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_curves_by_names_of_their_own(tmp_path):
    """Two configurations of one system are two curves; the path of a model's files does not matter."""
    one, other, paged = (tmp_path / name for name in ("one.json", "other.json", "fp8.json"))
    write(one, "vllm", point(2.0, 0.01), options={"model": "/tmp/a"})
    write(other, "vllm", point(4.0, 0.03), options={"model": "/tmp/b"})
    write(paged, "vllm", point(2.0, 0.005), options={"model": "/tmp/a", "kv": "fp8"})
    named = [serving_report.named_curve(text) for text in (f"a = b={one},{other}", f"fp8={paged}")]
    _, curves = serving_report.read_curves(named)
    assert {name: len(points) for name, points in curves.items()} == {"a = b": 2, "fp8": 1}
    assert serving_report.at_level(curves, 0.02) == {"a = b": pytest.approx(3.0), "fp8": None}
    with pytest.raises(ConfigError, match=r"--curve is .*fp8\.json, line 1.* of another options"):
        serving_report.read_curves([serving_report.named_curve(f"all={one},{paged}")])
    write(ours := tmp_path / "ours.json", "pensieve", point(2.0, 0.01), options={"model": "/tmp/a"})
    with pytest.raises(ConfigError, match="of another system"):
        serving_report.read_curves([serving_report.named_curve(f"all={one},{ours}")])


@pytest.mark.parametrize("text", ["a.json", "=a.json", "a="])
def test_curves_that_have_no_name_or_no_files(text):
    with pytest.raises(ConfigError, match="--curve is"):
        serving_report.named_curve(text)


def test_a_picture_says_what_it_cuts_off(tmp_path):
    pytest.importorskip("matplotlib")
    cut_off = plots._cut_off
    curves = {"a": [serving_report.Point(1.0, 0.01, 0.02), serving_report.Point(2.0, 0.03, 0.05)]}
    assert cut_off(curves, 40.0) == "cut off above 40 ms: means 0, 90th percentiles 1"
    assert cut_off(curves, 60.0) is None
    view = plots.View(level_s=0.02, top_s=0.04)
    serving_report.draw(curves, "a", tmp_path / "a.png", view)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["{", "[]", '{"benchmark": "simulation"}', '{"benchmark": 1, "results": 2}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="line 1"):
        read_curves(path)


@pytest.mark.parametrize(
    ("system", "change", "says"),
    [
        ("stateless", {"trace": {"digest": "b"}}, r"line 2.* measured as .*line 1.* of another trace\.$"),
        ("stateless", {"model": "b", "settings": {"think": 60}}, r"of another model, settings\.$"),
        ("pensieve", {"config": {"gpu_pages": 9}}, r"of another config\.$"),
    ],
)
def test_points_that_cannot_be_compared_are_not_drawn_together(tmp_path, system, change, says):
    path, alike = tmp_path / "points.json", {"model": "a", "trace": {"digest": "a"}, "settings": {}}
    write(path, "pensieve", point(2.0, 0.01), **alike, config={"gpu_pages": 8})
    write(path, system, point(2.0, 0.01), **alike | change)
    with pytest.raises(ConfigError, match=says):
        read_curves(path)


def test_how_devices_sum_and_where_programs_are_kept_is_no_difference_of_one_device(tmp_path):
    alone, many = tmp_path / "alone.json", tmp_path / "many.json"
    for path, size in ((alone, 1), (many, 2)):
        for rate, how in ((2.0, "xla"), (3.0, "auto")):
            runner = {"tensor_parallel_size": size, "all_reduce": how, "compilation_cache_dir": how}
            write(path, "pensieve", point(rate, 0.01), config={"runner": runner})
    assert len(read_curves(alone).by_name["pensieve"]) == 2
    with pytest.raises(ConfigError, match="of another config"):
        read_curves(many)


def test_points_may_have_been_looked_at_for_longer(tmp_path):
    path = tmp_path / "points.json"
    first = {"think": 20, "warm_up_s": 60.0, "window_s": 150.0, "drain_s": 60.0}
    write(path, "pensieve", point(2.0, 0.01), settings=first)
    for name in ("warm_up_s", "window_s", "drain_s"):
        write(path, "pensieve", point(3.0, 0.01), settings=first | {name: 30.0})
    assert len(read_curves(path).by_name["pensieve"]) == 4
    write(path, "pensieve", point(3.0, 0.01), settings=first | {"window_s": 30.0, "think": 60})
    with pytest.raises(ConfigError, match="of another settings"):
        read_curves(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 1}, "of one load, seed 0, arrivals poisson as .*line 1: .*found seed 1, arrivals poisson"),
        ({"arrivals": "/x/az.csv"}, "one of --seeds, one of --arrivals; found seed 0, arrivals /x/az.csv"),
        ({"rate": 2.0, "sessions_digest": "b"}, "of one load, sessions_digest a .* found sessions_digest b"),
    ],
)
def test_points_of_several_seeds_or_arrivals_are_no_curve(tmp_path, changes, says):
    """In one document or in several, including an older one whose seed is among its settings."""
    first = point(2.0, 0.01) | {"seed": 0, "arrivals": None, "sessions_digest": "a"}
    other = point(3.0, 0.02) | {"seed": 0, "arrivals": None, "sessions_digest": "c"}
    settings = {"seed": 0, "window_s": 9.0}
    write(one := tmp_path / "one.json", "pensieve", first, other | changes, settings=settings)
    write(two := tmp_path / "two.json", "pensieve", first, settings=settings)
    write(two, "stateless", other | changes, settings=settings)
    for path in (one, two):
        with pytest.raises(ConfigError, match=says):
            read_curves(path)
    write(older := tmp_path / "older.json", "pensieve", point(4.0, 0.03), settings=settings)
    write(older, "pensieve", first, other, settings=settings)
    write(older, "pensieve", (other | changes) | {"void": True}, settings=settings)
    longer = first | {"sessions_digest": "of a longer window"}
    write(older, "pensieve", longer, settings=settings | {"window_s": 20.0})
    assert len(read_curves(older).by_name["pensieve"]) == 4


def test_documents_that_say_not_what_they_are_of(tmp_path):
    path, empty = tmp_path / "points.json", tmp_path / "empty.json"
    empty.write_text("")
    write(path, "pensieve", point(2.0, 0.01))
    assert read_curves(empty, path).title == "a, talk"
    write(nameless := tmp_path / "nameless.json", "pensieve", point(2.0, 0.01), trace=None)
    with pytest.raises(ConfigError, match=r"nameless\.json, line 1"):
        read_curves(nameless)


def test_files_without_a_point(tmp_path):
    path = tmp_path / "void.json"
    write(path, "pensieve", point(2.0, 0.01, void=True))
    with pytest.raises(ConfigError, match="not void"):
        read_curves(path)
    with pytest.raises(ConfigError, match="can be read"):
        read_curves(tmp_path / "nowhere.json")
    for name in ("append_line", "draw"):
        arguments = {
            "append_line": (tmp_path, "x"),
            "draw": ({"a": []}, "title", tmp_path / "nowhere" / "a.png"),
        }[name]
        with pytest.raises(ConfigError, match="can be written"):
            getattr(serving_report, name)(*arguments)
