"""What a cellular engine is told before it starts.

Owns: the limits, their checks and their help.
Does not know: cells, requests, or devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from pensieve_jax.core.options import (
    check_options,
    count,
    documented,
    is_count,
    one_of,
    option,
    optional,
    require,
)

RELEASES = ("completion", "submission")
TIE_BREAKS = ("priority", "alternate")
TASKS_PER_PROGRAM = (1, 2, 5, 10, 20)
"""How many tasks a program runs, one after the other, up to `max_num_tasks`; launches are made of these."""


MAX_ROWS = 2**31 - 2
"""Their numbers are 32 bits wide, and one is the initial state's."""


def _are_rows(value: object) -> bool:
    return is_count(value, 1) and value <= MAX_ROWS


@documented
@dataclass(frozen=True, kw_only=True)
class CellularConfig:
    """Limits of a `CellularEngine`; those of one cell, its batch sizes and its priority, are the cell's."""

    num_devices: int = option(1, count(1), "Devices, each with one worker and all weights.")
    num_rows: int | None = option(
        None,
        optional(count(1)._replace(words=f"an integer from 1 to {MAX_ROWS}", accepts=_are_rows)),
        "Rows of state on each device, for every kind of state. A request is admitted when its peak fits: "
        "one row for a chain, as many as leaves for a tree. None is as many as fit 1 GiB, but from 256 to "
        "4,096.",
    )
    max_num_tasks: int = option(
        5, count(1), "Tasks that are formed and launched together: MaxTasksToSubmit of Algorithm 1."
    )
    launches_in_flight: int | None = option(
        None,
        optional(count(1)),
        "Launches of a device that are not known to be complete; a worker with fewer is given more. None is "
        "2 on an accelerator and 1 on a CPU.",
    )
    min_batch: int = option(
        1, count(1), "No launch goes on with a task of fewer cells: Bsizes.Min() of Algorithm 1."
    )
    release: str = option(
        "completion",
        one_of(RELEASES),
        "When a part of a graph may begin whose inputs another part computes: once those have been seen to "
        "complete, as in the thesis, or on the same device as soon as they are submitted.",
    )
    tie_break: str | None = option(
        None,
        optional(one_of(TIE_BREAKS)),
        "Which type of cell is next where several have enough: the one of the highest priority, as in the "
        "thesis, or the one that was launched the longest ago. None is alternate on one device, priority on "
        "several.",
    )
    max_skips: int | None = option(
        None,
        optional(count(1)),
        "Launches of other types while one has ready cells, after which that is next, whatever batches are "
        "full. None is no limit, as in the thesis: below a full batch it waits for as long as another has "
        "one, whatever its priority.",
    )
    max_nodes: int = option(100_000, count(1), "Cells of one request.")
    max_depth: int = option(10_000, count(1), "Cells of one request that follow one another.")
    max_num_waiting: int | None = option(
        None, optional(count(1)), "Requests that wait for rows; with more, `submit` raises. None is no limit."
    )

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        check_options(self, "")
        require(
            self.max_depth <= self.max_nodes,
            "max_depth",
            self.max_depth,
            f"at most max_nodes ({self.max_nodes})",
        )
        require(
            self.release == "completion" or self.num_devices == 1,
            "release",
            self.release,
            "'completion' on several devices, where nothing else says what has run elsewhere",
        )
