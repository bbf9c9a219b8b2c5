"""What the device does in steps of a run, kernel by kernel, and in the same steps alone.

Owns: which of a trace's kernels are of steps of the smallest bucket, how steps are told apart, and the same
plans launched again in a row, on pages of random numbers, with nothing beside them.
Does not know: how a run goes on, or how a trace is read (`steps.device_trace`).
Called by: benchmark_serving.

An executable's kernels carry its number in the trace. A step is the executable of the model's layers, which
has most of the kernels that such a step has alone, and that of the sampler behind it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from steps.device_trace import Activity, Kernel, seconds_by_kernel, summary, trace_activity
from steps.row_steps import RowSteps

from pensieve_jax.scheduler import StepPlan
from serving.engine_server import EngineServer

UNITS = {
    "profile": "steps of the smallest bucket that were launched behind the run, traced: seconds a step, in "
    "the loop and alone; span_s: from a step's first kernel to its last; idle_s: of it, without a kernel; "
    "to_next_s: from there to the next step's first, where that follows at once; query_tokens, kv_tokens: "
    "means; beside_copies: of the loop's steps, those that a copy between memories lay beside",
}


class TracedStep(NamedTuple):
    """A step of a trace: its kernels, and how long the device then waited for the next, if that followed."""

    kernels: list[Kernel]
    to_next_ns: float | None

    @property
    def start_ns(self) -> float:
        """Of its first kernel."""
        return self.kernels[0].start_ns

    @property
    def end_ns(self) -> float:
        """Of the last that ended."""
        return max(kernel.start_ns + kernel.duration_ns for kernel in self.kernels)


def profile_loop(server: EngineServer, go_on: Callable[[], bool], num_steps: int) -> dict[str, Any]:
    """Traces `num_steps` more steps of a run, gives the run up, and traces its small steps alone.

    Latencies of requests that were not answered before mean nothing afterwards.

    Args:
      server: whose engine it is.
      go_on: lets the run go on by a step, or by whatever waits for one; False when it is over.
      num_steps: of any size.
    """
    plans: list[StepPlan] = []

    def some_steps() -> None:
        while len(plans) < num_steps and go_on():
            pass

    with server.recording(plans):
        in_loop = trace_activity(some_steps)
    runner, config, vocab_size = server.give_up()
    smallest = min(runner.layouts)
    small = [plan for plan in plans if plan.layout.num_tokens == smallest]
    found: dict[str, Any] = {"num_steps": len(plans), "num_small_steps": len(small), "bucket": smallest}
    if not small:
        return found
    rows = RowSteps(config, runner, vocab_size, num_sequences=1)
    rows.fill()
    launches = [rows.whole(plan) for plan in small]

    def alone() -> None:
        handles = [launch.launch() for launch in launches]
        for launch, handle in zip(launches, handles, strict=True):
            launch.wait(handle)

    alone()  # what a first launch takes is nobody's
    by_itself = trace_activity(alone)
    found |= {
        "query_tokens": sum(int(plan.cu_q_lens[-1]) for plan in small) / len(small),
        "kv_tokens": sum(int(plan.kv_lens.sum()) for plan in small) / len(small),
    }
    programs = step_programs(by_itself.kernels)
    if programs is not None:
        found |= {
            "alone": figures(split_steps(by_itself.kernels, *programs), by_itself.copies),
            "loop": figures(split_steps(in_loop.kernels, *programs), in_loop.copies),
        }
    return found


def step_programs(kernels: Sequence[Kernel]) -> tuple[int, frozenset[int]] | None:
    """The executable with most kernels, and all that ran, of a trace of steps of one kind; None without."""
    counts = Counter(kernel.program for kernel in kernels if kernel.program is not None)
    return (counts.most_common(1)[0][0], frozenset(counts)) if counts else None


def split_steps(kernels: Sequence[Kernel], layers: int, programs: frozenset[int]) -> list[TracedStep]:
    """The steps of a trace whose layers are the executable `layers`, whole ones only.

    Args:
      kernels: by their starts; the first and the last step may have been cut and are left out.
      layers: the executable of a step's layers.
      programs: those of a step; what runs between is not of it, and a sampler is of the layers before it.
    """
    runs: list[list[int]] = []
    is_open = False
    last_program: int | None = None
    for index, kernel in enumerate(kernels):
        if kernel.program == layers and (last_program != layers or not is_open):
            runs.append([])
            is_open = True
        elif kernel.program is not None and kernel.program not in programs:
            is_open = False
        if is_open:
            runs[-1].append(index)
        last_program = kernel.program or last_program
    steps = []
    for run, following in itertools.pairwise(runs):
        step = TracedStep([kernels[index] for index in run], None)
        if following[0] == run[-1] + 1:
            step = step._replace(to_next_ns=kernels[following[0]].start_ns - step.end_ns)
        steps.append(step)
    return steps[1:]


def figures(steps: Sequence[TracedStep], copies: Sequence[Activity]) -> dict[str, Any]:
    """Means over steps, of all and of those beside copies; see UNITS."""
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
