"""The attack on a server: its requests, how answers and slices are counted, and what exceeds the limits."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from pensieve_jax.device.model_runner import ModelRunner
from pensieve_jax.server.http.settings import MAX_BODY_BYTES
from pensieve_lab.hostile.answers import Answers, answer_code
from pensieve_lab.hostile.request import CHAT, COMPLETIONS
from pensieve_lab.hostile.requests import hostile_requests
from pensieve_lab.hostile.slices import LoopTimer, PartTimer, Slice, SliceLog, longest_ms, read_slices
from pensieve_lab.hostile.summary import DEVICE_PARTS, Attack, Limits, Run, problems, summary
from pensieve_lab.hostile.timed_worker import PARTS
from pensieve_lab.hostile.watching import Gaps, gaps_of

GAPS = Gaps(9, 1.0, 2.0, 3.0, 1, ())


def run(held_ms=None, codes=(), gaps=GAPS, wrong=()) -> Run:
    answers = Answers()
    answers.codes.update(codes)
    answers.wrong += wrong
    return Run(1.0, answers, gaps, held_ms or {}, 100.0)


def test_requests_are_distinct_attacks_with_harmless_controls():
    groups = hostile_requests()
    assert {"forms", "options", "tools", "messages", "bodies", "scores", "replies"} == set(groups)
    for requests in groups.values():
        names = [one.name for one in requests]
        assert len({name: None for name in names}) <= len(names)
        for one in requests:
            assert len(one.body) <= MAX_BODY_BYTES
            control = json.loads(one.control)
            known = {"model", "messages", "prompt", "max_tokens", "n", "stream"}
            assert set(control) <= known and control["max_tokens"] > 0
            assert one.control_route == (COMPLETIONS if "prompt" in control else CHAT)
        texts = [one.control for one in requests if b'"prompt": [' not in one.control]
        assert len(set(texts)) == len(texts), "the state of equal prompts would be found"


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (200, b'{"choices": []}', "200"),
        (400, b'{"error": {"code": "invalid_value"}}', "400 invalid_value"),
        (400, b'{"type": "error", "error": {"type": "invalid_request_error"}}', "400 invalid_request_error"),
        (200, b'data: {"a": 1}\n\ndata: {"error": {"code": "x"}}\n\ndata: [DONE]\n\n', "200 x"),
        (500, b"not JSON", "500"),
        (400, b'"error"', "400"),
    ],
)
def test_the_code_of_an_answer(status, body, code):
    assert answer_code(status, body) == code


def test_answers_that_are_no_typed_refusals_are_wrong():
    answers = Answers()
    for status, code in (
        (200, None),
        (400, "a"),
        (413, "b"),
        (429, "c"),
        (503, "d"),
    ):
        answers.add(status, json.dumps({} if code is None else {"error": {"code": code}}).encode())
    assert not answers.wrong
    answers.add(400, b"{}")
    answers.add(500, b'{"error": {"code": "internal_error"}}')
    answers.add(404, b'{"error": {"code": "not_found"}}')
    answers.add(200, b'data: {"error": {"code": "internal_error"}}\n')
    assert len(answers.wrong) == 4 and answers.codes.total() == 9


@pytest.mark.parametrize("may_fail", [True, False])
def test_only_named_attacks_may_end_with_a_failed_grammar(may_fail):
    answers, body = Answers(may_fail=may_fail), b'{"error": {"code": "grammar_failed"}}'
    answers.add(500, body)
    answers.add(200, b"data: " + body + b"\n")
    assert len(answers.wrong) == (0 if may_fail else 2)
    answers.add(500, b'{"error": {"code": "internal_error"}}')
    assert len(answers.wrong) == (1 if may_fail else 3)
    named = {one.name for requests in hostile_requests().values() for one in requests if one.may_fail}
    assert "64 slow grammars" in named and "64 slow rows of tools" in named
    assert all(
        re.match(r"64 slow |regex |grammar |pattern |tool, (pattern |\$ref recursion|anyOf of 200)", name)
        for name in named
    )


def test_the_parts_that_are_timed_exist():
    for kind, names in PARTS.items():
        assert all(callable(getattr(kind, name, None)) for name in names), kind
    assert {part.rpartition(".")[2] for part in DEVICE_PARTS} == set(PARTS[ModelRunner])


def test_a_part_is_timed_without_the_parts_within(tmp_path):
    times = iter([0.0, 1.0, 4.0, 5.0, 5.5, 9.0])

    class Parts:
        def outer(self):
            self.inner()
            self.inner()

        def inner(self):
            pass

    timer = PartTimer(SliceLog(tmp_path / "engine"), lambda: next(times))
    timer.time_methods(Parts, ("outer", "inner"))
    Parts().outer()
    found = [(one.part, one.seconds) for one in read_slices(tmp_path)]
    assert found == [("Parts.inner", 3.0), ("Parts.inner", 0.5), ("Parts.outer", 5.5)]


def test_short_slices_and_lines_that_are_being_written_are_left_out(tmp_path):
    log = SliceLog(tmp_path / "front")
    log.add("loop", 0.001)
    log.add("loop", 0.02)
    with (tmp_path / "front").open("a") as file:
        file.write('[1.0, "loop"')
    ((_, part, seconds),) = read_slices(tmp_path)
    assert (part, seconds) == ("loop", 0.02)


def test_the_longest_slices_of_a_span():
    slices = [
        Slice(1.0, "loop", 0.5),
        Slice(2.0, "loop", 0.1),
        Slice(3.0, "wait", 0.2),
        Slice(3.0, "loop", 0.3),
    ]
    assert longest_ms(slices, 1.5, 3.0) == {"loop": 300.0, "wait": 200.0}


def test_a_loop_that_is_held_is_noted(tmp_path, monkeypatch):
    clocks = iter([(0.0, 0.0, 0.0), (0.302, 0.2, 0.25), (0.4, 0.2, 0.25)])
    monkeypatch.setattr("pensieve_lab.hostile.slices._clocks", lambda: next(clocks))
    done = []

    class Log(SliceLog):
        def add(self, part, seconds):
            super().add(part, seconds)
            done.append(part)
            if len(done) == 2:
                loop.stop()

    loop = LoopTimer(Log(tmp_path / "front")).wrap(asyncio.new_event_loop)()
    loop.run_forever()
    loop.close()
    assert {one.part: one.seconds for one in read_slices(tmp_path)} == {"loop": 0.2, "wait": 0.25}


def test_the_summary_counts_answers_and_finds_the_longest_figures():
    control = run({"loop": 20.0})
    one = run({"loop": 30.0, "ModelRunner.fetch": 900.0}, {"200": 3, "400 invalid_value": 2})
    two = run({"wait": 60.0}, {"500 grammar_failed": 1, "503 overloaded": 1}, GAPS._replace(max_ms=40.0))
    found = summary(run(), run(), [Attack("forms", "a", control, one), Attack("forms", "b", control, two)])
    assert found["answers"] == {
        "200": 3,
        "400 invalid_value": 2,
        "500 grammar_failed": 1,
        "503 overloaded": 1,
    }
    assert (found["typed_refusals"], found["failed_turns"], found["replies"], found["wrong"]) == (3, 1, 3, 0)
    group = found["groups"]["forms"]
    assert (group["requests"], group["longest_held"], group["longest_held_of_control"]) == (7, 60.0, 20.0)
    assert (group["longest_gap"], found["longest_gap_of_controls"]) == (40.0, 3.0)
    json.dumps(found)


def test_figures_beyond_a_limit_are_problems():
    control, limits = run({"loop": 70.0}), Limits(stall_ms=100.0, held_ms=50.0)

    def of(attack: Run, after: Run | None = None) -> list[str]:
        return problems(after or run(), [Attack("forms", "a", control, attack)], limits)

    assert not of(run({"loop": 69.0, "wait": 50.0, "ModelRunner.fetch": 900.0}))
    assert not of(run(gaps=GAPS._replace(max_ms=103.0)))
    assert of(run({"loop": 71.0})) == ["forms: a: loop took 71 ms; at most 70 are allowed"]
    assert of(run({"wait": 51.0})) == ["forms: a: wait took 51 ms; at most 50 are allowed"]
    assert "a gap of 104 ms" in of(run(gaps=GAPS._replace(max_ms=104.0)))[0]
    assert "the stream failed" in of(run(gaps=GAPS._replace(failures=("x",))))[0]
    assert of(run(wrong=["500: x"])) == ["forms: a: 500: x"]
    assert "2 different replies" in of(run(), run(gaps=GAPS._replace(texts=2)))[0]


def test_the_calmest_of_several_runs_counts():
    noisy = GAPS._replace(max_ms=500.0, failures=("x",))
    first = Attack("forms", "a", run({"loop": 9.0}), run({"wait": 60.0}, gaps=noisy, wrong=["500: x"]))
    assert first.run.gaps.max_ms > first.allowed_gap_ms(100.0) == 103.0
    again = Attack("forms", "a", run(gaps=noisy), run({"wait": 5.0, "loop": 7.0}))
    for both in (first.repeated(again), again.repeated(first)):
        assert both.num_runs == 2 and both.control.gaps.max_ms == both.run.gaps.max_ms == 3.0
        assert both.run.held_ms == {"wait": 60.0, "loop": 7.0} and both.control.held_ms == {"loop": 9.0}
        assert both.run.answers.wrong[:1] == ["500: x"] and both.run.gaps.failures == ("x",)
    third = Attack("forms", "a", run(), run(gaps=noisy._replace(max_ms=104.0)))
    assert first.repeated(third).run.gaps.max_ms == 104.0
    found = summary(run(), run(), [first.repeated(again)])
    assert found["attacks"]["forms: a"]["runs"] == 2


def test_gaps_are_within_streams():
    gaps = gaps_of([[0.0, 0.1, 0.4], [9.0]])
    assert (gaps.num, round(gaps.max_ms)) == (2, 300)


@pytest.mark.long
def test_a_server_is_attacked(launch, tmp_path):
    document = tmp_path / "found.json"
    launch(
        "attack_grammars",
        shared_llm=False,
        only="options: stop",
        quiet_s=2.0,
        control_s=2.0,
        max_stall_ms=1e9,
        max_held_ms=1e9,
        json=str(document),
    )
    results = json.loads(document.read_text())["results"]
    assert results["answers"] == {"400 invalid_value": 3} and not results["problems"]
    assert results["without_attack"]["gaps"]["num"] > 0
