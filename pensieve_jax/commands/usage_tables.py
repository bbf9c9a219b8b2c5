"""Where tokens came from and what moved between the tiers, for people.

Owns: the tables that say it. Does not know: how the figures came about. Called by: `generate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pensieve_jax import Output
from pensieve_jax.commands.report import table

type Stats = Mapping[str, int | float]


def summary(outputs: Sequence[Output], num_resumed: int, seconds: float, before: Stats, after: Stats) -> str:
    """The tables at the end: where tokens came from, and what moved, by counters before and after."""
    names = ("reused_gpu_tokens", "swapped_in_tokens", "recomputed_tokens", "prefilled_tokens")
    totals = {name: sum(getattr(output.usage, name) for output in outputs) for name in names}
    num_output = sum(output.usage.output_tokens for output in outputs)
    columns = ["turns", "from history", "reused", "swapped in", "recomputed", "prefilled", "output"]
    columns += ["output tokens/s", "compilations"]
    num_compilations = int(after["num_compilations"] - before["num_compilations"])
    row = [len(outputs), num_resumed, *totals.values(), num_output, num_output / seconds, num_compilations]
    resumed = [
        sum(getattr(output.usage, name) for output in outputs)
        for name in ("num_suspensions", "resume_swapped_in_tokens", "resume_recomputed_tokens")
    ]
    moved = [after[name] - before[name] for name in ("swapped_out_bytes", "swapped_in_bytes")]
    dropped = int(after["num_dropped_chunks"] - before["num_dropped_chunks"])
    stalled_s = after["transfer_stall_s"] - before["transfer_stall_s"]
    memory_columns = ["suspensions", "swapped in to resume", "recomputed to resume"]
    memory_columns += ["MB out", "MB in", "chunks dropped", "stalled s"]
    memory_row = [*resumed, *(num_bytes / 1e6 for num_bytes in moved), dropped, stalled_s]
    return f"{table(columns, [row])}\n\n{table(memory_columns, [memory_row])}"
