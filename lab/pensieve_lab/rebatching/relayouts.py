"""Cost of changes of a ring's shape: recorded during a run, and timed alone after it.

Owns: which changes are recorded, and their seconds.
Does not know: loads, methods, or what else a run does.

During a run other launches hide a change, so it is timed alone. The old ring is filled with random numbers,
and the same change is launched and waited for. Some changes of each kind are timed; all count as their
median.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

from pensieve_jax.rebatching.device.runner import DeviceRunner
from pensieve_jax.rebatching.launches import Launch, Resize
from pensieve_jax.rebatching.ring_shapes import RingShape
from pensieve_lab.rebatching.rings import fill

UNITS = {
    "relayouts": "changes of the ring's shape, each kind timed alone after the run: count, seconds of one "
    "(median of some), and seconds of all as a share of the run; a new ring is empty",
}
_MAX_TIMED = 3  # changes timed per kind
type _Kind = tuple[RingShape | None, RingShape]


class Relayouts:
    """Recorded changes of one run, which starts without a ring."""

    def __init__(self) -> None:
        self._shape: RingShape | None = None
        self._seen: list[tuple[RingShape | None, Resize]] = []

    def see(self, launches: Sequence[Launch]) -> None:
        """Record the changes of shape among a step's launches."""
        for launch in launches:
            if isinstance(launch, Resize):
                self._seen.append((None if launch.relayout is None else self._shape, launch))
                self._shape = launch.shape

    def replay(self, runner: DeviceRunner, run_s: float) -> dict[str, Any]:
        """Time the changes again on the runner, whose contents are lost; see `UNITS`."""
        kinds: dict[_Kind, list[Resize]] = {}
        for old, launch in self._seen:
            kinds.setdefault((old, launch.shape), []).append(launch)
        rows = [_timed(runner, kind, launches) for kind, launches in kinds.items()]
        runner.reset(())
        seconds = sum(row["count"] * row["launch_s"] for row in rows)
        return {
            "count": len(self._seen),
            "seconds": seconds,
            "share_of_run": seconds / run_s,
            "kinds": rows,
        }


def _timed(runner: DeviceRunner, kind: _Kind, launches: Sequence[Resize]) -> dict[str, Any]:
    """Time some changes of one kind; an untimed first launch takes the one-off costs."""
    old, new = kind
    seconds = []
    for launch in itertools.chain(launches[:1], launches[:_MAX_TIMED]):
        if old is None:
            runner.reset(())
        else:
            fill(runner, old)
        start_s = time.perf_counter()
        runner.launch(launch)
        jax.block_until_ready(runner.ring)
        seconds.append(time.perf_counter() - start_s)
    return {
        "from": None if old is None else list(old),
        "to": list(new),
        "count": len(launches),
        "launch_s": statistics.median(seconds[1:]),
    }
