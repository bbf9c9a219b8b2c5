"""Tables of token sources and of traffic between the tiers, for users.

Owns: the layout of the tables. Does not know: how the numbers were counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pensieve_jax import Output
from pensieve_jax.commands.report import table

# Sources of the history tokens of turns.
_HISTORY: Final = {
    "found on device": "reused_gpu_tokens",
    "on host": "swapped_in_tokens",
    "recomputed": "recomputed_tokens",
}
type Stats = Mapping[str, int | float]


def summary(outputs: Sequence[Output], num_done: int, seconds: float, before: Stats, after: Stats) -> str:
    """Format the final tables: token sources, and traffic between the tiers.

    Args:
      outputs: outputs of the turns that ran.
      num_done: turns in the history, which did not run again.
      seconds: duration of the run.
      before: the engine's counters at the start.
      after: the engine's counters at the end.
    """
    found = [sum(getattr(output.usage, name) for output in outputs) for name in _HISTORY.values()]
    num_history = sum(found)
    shares = [f"{num / num_history:.0%}" if num_history else "-" for num in found]
    num_prefilled = sum(output.usage.prefilled_tokens for output in outputs)
    num_output = sum(output.usage.output_tokens for output in outputs)
    columns = ["turns", "not run again", "history tokens", *_HISTORY]
    columns += ["new tokens", "output tokens", "output tokens/s", "compilations"]
    num_compilations = int(after["num_compilations"] - before["num_compilations"])
    row = [len(outputs), num_done, num_history, *shares, num_prefilled, num_output]
    row += [round(num_output / seconds), num_compilations]
    resumed = [
        sum(getattr(output.usage, name) for output in outputs)
        for name in ("num_suspensions", "resume_swapped_in_tokens", "resume_recomputed_tokens")
    ]
    moved = [after[name] - before[name] for name in ("swapped_out_bytes", "swapped_in_bytes")]
    dropped = int(after["num_dropped_chunks"] - before["num_dropped_chunks"])
    stalled_s = after["transfer_stall_s"] - before["transfer_stall_s"]
    memory_columns = ["suspensions", "tokens swapped in to resume", "recomputed to resume"]
    memory_columns += ["MB to host", "MB to device", "chunks dropped", "seconds stalled"]
    memory_row = [*resumed, *(num_bytes / 1e6 for num_bytes in moved), dropped, stalled_s]
    return f"{table(columns, [row])}\n\n{table(memory_columns, [memory_row])}"
