"""Who watches an engine: one function that is told every step's decisions.

Owns: what an observer is. Does not know: who observes, or why.
Metrics, timelines and tests are observers.
"""

from __future__ import annotations

from collections.abc import Callable

from pensieve_jax.scheduler import SchedulerOutput

type Observe = Callable[[SchedulerOutput], None]
"""Called with what a step does, before it is done: grants, who joined and who was suspended, copies between
the tiers, and every chunk that was dropped, with its reason and worth. It must not call the engine. What it
raises leaves a step half done: `Engine.step` raises it (a PensieveError as the cause of a RuntimeError), and
the engine starts over with the next call, as after an interrupt."""


def unobserved(output: SchedulerOutput) -> None:
    """An observer that looks away."""
