"""Counters of an engine since its start.

Owns: the counters, the histograms and the hit rates.
Does not know: metrics formats.
Called by the engine, its loop and its ledger.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, fields
from typing import Final

from pensieve_jax.core.outputs import Usage
from pensieve_jax.scheduler import SchedulerOutput

STEP_TOKENS_BOUNDS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COMMIT_S_BOUNDS: Final = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0)


def _no_counts(bounds: tuple[float, ...]) -> list[int]:
    return [0] * (len(bounds) + 1)


@dataclass(slots=True)
class EngineStats:
    """Counters since the start; the tokens of a turn, as in its `usage`, are counted when it finishes.

    `num_logits_errors` are those of the failed turns whose logits were not finite.
    `num_turns_rewritten` counts finished turns that replaced computed tokens of earlier turns.

    `num_draft_steps` steps had drafts, `num_drafts` in all: one for each request. Of their
    `num_draft_tokens`, `num_accepted_draft_tokens` became tokens of the replies.

    `history_*_tokens` count returning turns only: history tokens that were computed before, in total and
    those reused from each tier. `step_tokens_counts` and `commit_s_counts` are histograms: each element
    counts steps or commits up to one of the bounds above and over the previous bound, the last element those
    over all bounds.
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
    num_logits_errors: int = 0
    num_draft_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_turns_rewritten: int = 0
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
    step_tokens_counts: list[int] = field(default_factory=lambda: _no_counts(STEP_TOKENS_BOUNDS))
    commit_s_counts: list[int] = field(default_factory=lambda: _no_counts(COMMIT_S_BOUNDS))

    def count_step(self, num_tokens: int) -> None:
        """Count a launched step with its query tokens."""
        self.num_steps += 1
        self.num_step_tokens += num_tokens
        self.step_tokens_counts[bisect_left(STEP_TOKENS_BOUNDS, num_tokens)] += 1

    def count_drafts(self, num_drafts: int, num_tokens: int) -> None:
        """Count a launched step with drafts of `num_tokens` together."""
        self.num_draft_steps += 1
        self.num_drafts += num_drafts
        self.num_draft_tokens += num_tokens

    def count_commit(self, seconds: float) -> None:
        """Count a commit of turns to the history with its duration."""
        self.num_commits += 1
        self.commit_s += seconds
        self.commit_s_counts[bisect_left(COMMIT_S_BOUNDS, seconds)] += 1

    def count_decisions(self, output: SchedulerOutput) -> None:
        """Count a step's suspensions, drops and copies."""
        self.num_suspensions += len(output.suspended)
        self.num_dropped_chunks += len(output.drops)
        self.num_swapped_out_chunks += len(output.swap_outs)
        self.num_swapped_in_chunks += len(output.swap_ins)

    def count_turn(self, usage: Usage, *, has_history: bool) -> None:
        """Count a finished turn; `has_history` is True for a returning conversation."""
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

    def distributions(self) -> dict[str, tuple[list[int], float]]:
        """Return, for "step_tokens" and "commit_s", the histogram counts and the sum of the values."""
        return {
            "step_tokens": (list(self.step_tokens_counts), self.num_step_tokens),
            "commit_s": (list(self.commit_s_counts), self.commit_s),
        }

    def as_dict(self) -> dict[str, int | float]:
        """Return the counters by name, with each tier's hit rate: its share of returning turns' history."""
        num_tokens = max(self.history_tokens, 1)
        counters = {name: getattr(self, name) for name in _COUNTERS}
        return {
            **counters,
            "gpu_hit_rate": self.history_gpu_tokens / num_tokens,
            "cpu_hit_rate": self.history_cpu_tokens / num_tokens,
        }


_COUNTERS: Final = tuple(one.name for one in fields(EngineStats) if not one.name.endswith("_counts"))
