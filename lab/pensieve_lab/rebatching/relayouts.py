"""What the changes of a ring's shape took in a run: noted while it runs, and done again alone behind it.

Owns: which changes are noted, and their seconds.
Does not know: loads, methods, or what else a run does.

In a run a change is hidden among other launches, so it is timed alone: the ring of before is filled with
random numbers, and the same change is launched and waited for. Of many alike some are timed, and each counts
as their median.
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
    "relayouts": "changes of the ring's shape, each kind timed alone behind the run: how many there were, "
    "seconds of one (median of some), and seconds of all of them over those of the run; a new ring is empty",
}
_MOST_TIMED = 3  # of a kind
type _Kind = tuple[RingShape | None, RingShape]


class Relayouts:
    """Of one run, from a ring that is not there yet."""

    def __init__(self) -> None:
        """None so far."""
        self._shape: RingShape | None = None
        self._seen: list[tuple[RingShape | None, Resize]] = []

    def see(self, launches: Sequence[Launch]) -> None:
        """Note those among a step's launches."""
        for launch in launches:
            if isinstance(launch, Resize):
                self._seen.append((None if launch.relayout is None else self._shape, launch))
                self._shape = launch.shape

    def replay(self, runner: DeviceRunner, run_s: float) -> dict[str, Any]:
        """Do them again on the runner, which loses what it holds; see `UNITS`."""
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
    """Some of one kind; the first is done once before, so that nobody pays for what is only done once."""
    old, new = kind
    seconds = []
    for launch in itertools.chain(launches[:1], launches[:_MOST_TIMED]):
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
