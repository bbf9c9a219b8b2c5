"""Steps told apart in a trace of a run, and their means."""

from __future__ import annotations

import pytest

from tests.launching import load

loop_profile = load("pensieve_lab.serving.loop_profile")
device_trace = load("pensieve_lab.steps.device_trace")
LAYERS, SAMPLER, GATHER, PROMPT, EMBED = 1, 2, 3, 4, 5


def trace(*runs):
    """Make kernels (name, program, microseconds) in sequence with a microsecond between them."""
    kernels, now = [], 0.0
    for name, program, duration in runs:
        kernels.append(device_trace.Kernel(name, now * 1e3, duration * 1e3, program))
        now += duration + 1
    return kernels


SMALL = (
    ("rows", EMBED, 1.0),
    ("product", LAYERS, 10.0),
    ("attention", None, 5.0),
    ("product", LAYERS, 10.0),
    ("top", SAMPLER, 2.0),
)
PROGRAMS = frozenset({EMBED, LAYERS, SAMPLER})


def test_steps_are_told_apart_and_what_runs_between_is_of_none():
    """A kernel without a program belongs to the step in which it runs; the first and last step may be cut."""
    prompt = (("product", PROMPT, 90.0), ("top", SAMPLER, 2.0))
    kernels = trace(*SMALL, *SMALL, *SMALL, ("pages", GATHER, 4.0), *SMALL, *prompt, *SMALL, *SMALL)
    steps = loop_profile.split_steps(kernels, EMBED, PROGRAMS)
    assert [[kernel.name for kernel in step.kernels] for step in steps] == [[one[0] for one in SMALL]] * 4
    assert [step.to_next_ns for step in steps] == [1e3, None, None, 1e3]
    copies = [device_trace.Activity(steps[1].start_ns + 1, steps[1].start_ns + 2)]
    found = loop_profile.figures(steps, copies)
    assert found["num_traced"] == 4 and found["span_s"] == pytest.approx(32e-6)
    assert found["idle_s"] == pytest.approx(4e-6) and found["to_next_s"] == pytest.approx(1e-6)
    assert found["kernels_s"] == pytest.approx(
        {"product": 20e-6, "attention": 5e-6, "top": 2e-6, "rows": 1e-6}
    )
    assert found["beside_copies"]["num_traced"] == 1 and found["without_copies"]["num_traced"] == 3


def test_pages_moved_between_groups_of_layers_do_not_cut_a_step():
    """One executable runs both, with a wait between; a sampler belongs to the layers before it."""
    plain = (("rows", EMBED, 1.0), ("a", LAYERS, 9.0), ("b", LAYERS, 8.0), ("top", SAMPLER, 2.0))
    moved = (*plain[:2], ("pages", GATHER, 4.0), *plain[2:])
    prompt = (("a", PROMPT, 90.0), ("top", SAMPLER, 2.0))
    kernels = trace(*plain, *moved, *prompt, *plain, *plain, *plain)
    steps = loop_profile.split_steps(kernels, EMBED, PROGRAMS)
    assert [[kernel.name for kernel in step.kernels] for step in steps] == [["rows", "a", "b", "top"]] * 3
    assert [step.to_next_ns for step in steps] == [None, 1e3, 1e3]
    assert loop_profile.figures(steps, [])["span_s"] == pytest.approx((28 + 23 + 23) / 3 * 1e-6)


def test_programs_of_a_trace_of_one_kind():
    """A trace without programs has none."""
    assert loop_profile.step_programs(trace(*SMALL, *SMALL)) == (EMBED, PROGRAMS)
    assert loop_profile.step_programs(trace(("attention", None, 5.0))) is None
    assert loop_profile.figures([], []) == {"num_traced": 0}
