"""Configuration of a cellular engine.

Owns: the options, with their limits, checks and help texts.
Does not know: cells, requests, or devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from pensieve_jax.core.options import (
    TRUTH,
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
"""Numbers of consecutive tasks per program, up to `max_num_tasks`. A launch consists of such programs."""


MAX_ROWS = 2**31 - 2
"""Most rows: row numbers have 32 bits, and one row is the initial state."""


def _are_rows(value: object) -> bool:
    return is_count(value, 1) and value <= MAX_ROWS


@documented
@dataclass(frozen=True, kw_only=True)
class CellularConfig:
    """Limits of a `CellularEngine`. Batch sizes and priority are attributes of each cell."""

    num_devices: int = option(1, count(1), "Devices. Each has one worker and a copy of all weights.")
    num_rows: int | None = option(
        None,
        optional(count(1)._replace(words=f"an integer from 1 to {MAX_ROWS}", accepts=_are_rows)),
        "Rows of each kind of state on each device. A request is admitted when its peak fits: one row for "
        "a chain, one row per leaf for a tree. None means as many as fit into 1 GiB, but from 256 to 4,096.",
    )
    max_num_tasks: int = option(
        5, count(1), "Most tasks that are formed and launched together: MaxTasksToSubmit of Algorithm 1."
    )
    launches_in_flight: int | None = option(
        None,
        optional(count(1)),
        "Most incomplete launches of a device. The scheduler fills each worker up to this number. None means "
        "2 on an accelerator and 1 on a CPU.",
    )
    min_batch: int = option(
        1,
        count(1),
        "Fewest cells of a task after the first of a launch: Bsizes.Min() of Algorithm 1.",
    )
    release: str = option(
        "completion",
        one_of(RELEASES),
        "When a subgraph may begin that reads another subgraph. completion: after the other has completed, "
        "as in the thesis. submission: on the same device, as soon as the other is submitted.",
    )
    tie_break: str | None = option(
        None,
        optional(one_of(TIE_BREAKS)),
        "Which type of cell runs next if several have enough ready nodes. priority: the type of the highest "
        "priority, as in the thesis. alternate: the type that was launched the longest ago. None means "
        "alternate on one device, priority on several.",
    )
    max_skips: int | None = option(
        None,
        optional(count(1)),
        "Launches of other types after which a type with ready cells runs next, even if other types have "
        "full batches. None means no limit, as in the thesis: a type without a full batch waits while "
        "another type has one, whatever its priority.",
    )
    max_nodes: int = option(100_000, count(1), "Most cells of one request.")
    max_depth: int = option(10_000, count(1), "Longest path of one request, in cells.")
    max_num_waiting: int | None = option(
        None,
        optional(count(1)),
        "Most requests that wait for rows; with more, `submit` raises. None means no limit.",
    )

    compile_at_start: bool = option(
        False,
        TRUTH,
        "Whether the start compiles every program, so that serving compiles nothing. By default it compiles "
        "the smallest batch of each cell, and the others when they are first needed: launches then wait for "
        "each new batch size.",
    )

    def __post_init__(self) -> None:
        """Raise ConfigError for values that cannot work."""
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
            "'completion' on several devices, since submission orders launches only within one device",
        )
