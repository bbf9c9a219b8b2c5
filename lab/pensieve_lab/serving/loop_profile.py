"""A profile of a run's steps, kernel by kernel, and of the same steps alone.

Owns: which kernels of a trace belong to steps of the most frequent bucket, how steps are told apart, and
repeating the same plans back to back. Repeated plans run alone, on pages of random numbers.
Does not know: how a run continues, or how a trace is read (`steps.device_trace`).

A trace gives each kernel the number of its executable. A step begins with the executable that embeds its
tokens, which differs between buckets, and ends with the last, the sampler. The executable of the layers may
run several times in between.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pensieve_jax.device.row_steps import RowSteps
from pensieve_jax.scheduler import StepPlan
from pensieve_lab.serving.engine_server import EngineServer
from pensieve_lab.steps.device_trace import Activity, Kernel, seconds_by_kernel, summary, trace_activity

UNITS = {
    "profile": "traced steps of the most frequent bucket, launched after the run: seconds per step, in the "
    "loop and alone; span_s: from a step's first kernel to its last; idle_s: part of it without one of its "
    "kernels, so pages moved between its groups of layers count as idle; to_next_s: from there to the next "
    "step's first kernel, if that step follows at once; query_tokens, kv_tokens: means; beside_copies: steps "
    "of the loop that overlap with a copy between memories",
}


class TracedStep(NamedTuple):
    """Step of a trace: its kernels, and the device's wait for the next step, if that followed at once."""

    kernels: list[Kernel]
    to_next_ns: float | None

    @property
    def start_ns(self) -> float:
        """Start of its first kernel."""
        return self.kernels[0].start_ns

    @property
    def end_ns(self) -> float:
        """Latest end of its kernels."""
        return max(kernel.start_ns + kernel.duration_ns for kernel in self.kernels)


def profile_loop(server: EngineServer, go_on: Callable[[], bool], num_steps: int) -> dict[str, Any]:
    """Trace `num_steps` more steps of a run, give up the run, and trace those of the commonest bucket alone.

    Latencies of requests that were unanswered before are meaningless afterwards.

    Args:
      server: server of the run.
      go_on: continues the run by a step or a wait; returns False when the run is over.
      num_steps: number of steps, of any bucket.
    """
    plans: list[StepPlan] = []

    def some_steps() -> None:
        while len(plans) < num_steps and go_on():
            pass

    with server.recording(plans):
        in_loop = trace_activity(some_steps)
    runner, config, vocab_size = server.give_up()
    found: dict[str, Any] = {"num_steps": len(plans)}
    if not plans:
        return found
    (bucket, _), *_ = Counter(plan.layout.num_tokens for plan in plans).most_common(1)
    common = [plan for plan in plans if plan.layout.num_tokens == bucket]
    found |= {"num_bucket_steps": len(common), "bucket": bucket}
    rows = RowSteps(config, runner, vocab_size, num_sequences=1)
    rows.fill()
    launches = [rows.whole(plan) for plan in common]

    def alone() -> None:
        handles = [launch.launch() for launch in launches]
        for launch, handle in zip(launches, handles, strict=True):
            launch.wait(handle)

    alone()  # warm-up: the first launch has one-off costs
    by_itself = trace_activity(alone)
    found |= {
        "query_tokens": sum(int(plan.cu_q_lens[-1]) for plan in common) / len(common),
        "kv_tokens": sum(int(plan.kv_lens.sum()) for plan in common) / len(common),
    }
    programs = step_programs(by_itself.kernels)
    if programs is not None:
        found |= {
            "alone": figures(split_steps(by_itself.kernels, *programs), by_itself.copies),
            "loop": figures(split_steps(in_loop.kernels, *programs), in_loop.copies),
        }
    return found


def step_programs(kernels: Sequence[Kernel]) -> tuple[int, frozenset[int]] | None:
    """Return the executable that ran first, and all that ran, in a trace of equal steps; None if none ran."""
    ran = [kernel.program for kernel in kernels if kernel.program is not None]
    return (ran[0], frozenset(ran)) if ran else None


def split_steps(kernels: Sequence[Kernel], first: int, programs: frozenset[int]) -> list[TracedStep]:
    """Return the whole steps of a trace that begin with the executable `first`.

    Args:
      kernels: kernels sorted by start; the first and the last step may be cut off and are left out.
      first: executable that begins a step.
      programs: executables of a step, which ends when all have run; other kernels between them are ignored. A
        kernel without a program belongs to the previous kernel's program.
    """
    runs: list[list[int]] = []
    missing: set[int] = set()  # executables that the step has not run yet
    is_open = False
    last_program: int | None = None  # latest in the trace
    own_program: int | None = None  # latest of the step
    for index, kernel in enumerate(kernels):
        program = last_program if kernel.program is None else kernel.program
        is_new = program != own_program or program != last_program
        if is_new and is_open and not missing:
            is_open = False
        if program == first and not is_open:
            runs.append([])
            missing, is_open = set(programs), True
        if is_open and program in programs:
            runs[-1].append(index)
            missing.discard(program)
            own_program = program
        last_program = program
    steps = []
    for run, following in itertools.pairwise(runs):
        step = TracedStep([kernels[index] for index in run], None)
        if following[0] == run[-1] + 1:
            step = step._replace(to_next_ns=kernels[following[0]].start_ns - step.end_ns)
        steps.append(step)
    return steps[1:]


def figures(steps: Sequence[TracedStep], copies: Sequence[Activity]) -> dict[str, Any]:
    """Return means over all steps, and separately over steps with and without copies; see `UNITS`."""
    if not steps:
        return {"num_traced": 0}
    is_beside = [any(_overlap(step, copy) > 0 for copy in copies) for step in steps]
    beside = [step for step, yes in zip(steps, is_beside, strict=True) if yes]
    apart = [step for step, yes in zip(steps, is_beside, strict=True) if not yes]
    found = _means(steps)
    if beside and apart:
        found |= {"beside_copies": _means(beside), "without_copies": _means(apart)}
    return found


def _means(steps: Sequence[TracedStep]) -> dict[str, Any]:
    parts = [summary(step.kernels, 1) for step in steps]
    kernels = [kernel for step in steps for kernel in step.kernels]
    gaps = [step.to_next_ns for step in steps if step.to_next_ns is not None]
    return {
        "num_traced": len(steps),
        "span_s": sum(part["span_s"] for part in parts) / len(steps),
        "idle_s": sum(part["idle_s"] for part in parts) / len(steps),
        "to_next_s": sum(gaps) / len(gaps) * 1e-9 if gaps else None,
        "num_kernels": len(kernels) / len(steps),
        "kernels_s": seconds_by_kernel(kernels, len(steps)),
    }


def _overlap(step: TracedStep, copy: Activity) -> float:
    start_ns, end_ns = copy
    return min(step.end_ns, end_ns) - max(step.start_ns, start_ns)
