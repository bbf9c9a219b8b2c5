"""Counters of an engine, since its start."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pensieve_jax.core.outputs import Usage
from pensieve_jax.scheduler import SchedulerOutput


@dataclass(slots=True)
class EngineStats:
    """What was done so far; tokens are counted when their turn ends well, as in its `usage`.

    `history_*_tokens` are of returning turns alone: all that had KV state once, and what each tier had of it.
    """

    num_steps: int = 0
    num_step_tokens: int = 0
    num_suspensions: int = 0
    num_dropped_chunks: int = 0
    num_swapped_out_chunks: int = 0
    num_swapped_in_chunks: int = 0
    num_turns_finished: int = 0
    num_turns_cancelled: int = 0
    num_turns_failed: int = 0
    prompt_tokens: int = 0
    reused_gpu_tokens: int = 0
    swapped_in_tokens: int = 0
    recomputed_tokens: int = 0
    prefilled_tokens: int = 0
    output_tokens: int = 0
    resume_recomputed_tokens: int = 0
    resume_swapped_in_tokens: int = 0
    history_tokens: int = 0
    history_gpu_tokens: int = 0
    history_cpu_tokens: int = 0
    num_commits: int = 0
    commit_s: float = 0.0

    def count_step(self, num_tokens: int) -> None:
        """A step of so many query tokens was launched."""
        self.num_steps += 1
        self.num_step_tokens += num_tokens

    def count_commit(self, seconds: float) -> None:
        """The turns that ended in a step were written to the history."""
        self.num_commits += 1
        self.commit_s += seconds

    def count_decisions(self, output: SchedulerOutput) -> None:
        """What a step decides besides what it computes."""
        self.num_suspensions += len(output.suspended)
        self.num_dropped_chunks += len(output.drops)
        self.num_swapped_out_chunks += len(output.swap_outs)
        self.num_swapped_in_chunks += len(output.swap_ins)

    def count_turn(self, usage: Usage, *, has_history: bool) -> None:
        """A turn ended and was committed; `has_history` if its conversation had returned."""
        if has_history:
            found = usage.reused_gpu_tokens, usage.swapped_in_tokens
            self.history_tokens += sum(found) + usage.recomputed_tokens
            self.history_gpu_tokens += found[0]
            self.history_cpu_tokens += found[1]
        self.num_turns_finished += 1
        self.prompt_tokens += usage.prompt_tokens
        self.reused_gpu_tokens += usage.reused_gpu_tokens
        self.swapped_in_tokens += usage.swapped_in_tokens
        self.recomputed_tokens += usage.recomputed_tokens
        self.prefilled_tokens += usage.prefilled_tokens
        self.output_tokens += usage.output_tokens
        self.resume_recomputed_tokens += usage.resume_recomputed_tokens
        self.resume_swapped_in_tokens += usage.resume_swapped_in_tokens

    def as_dict(self) -> dict[str, int | float]:
        """By name, with the hit rate of each tier: its share of the history of turns that returned."""
        num_tokens = max(self.history_tokens, 1)
        return {
            **asdict(self),
            "gpu_hit_rate": self.history_gpu_tokens / num_tokens,
            "cpu_hit_rate": self.history_cpu_tokens / num_tokens,
        }
