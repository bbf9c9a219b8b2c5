"""The output of a turn that its reader has not taken yet.

Owns: merging the output of several steps into one delta, and the number of log-probabilities in it.
Does not know: turns, engines, or who reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pensieve_jax.core.outputs import TokenLogprob
from pensieve_jax.server.async_engine import AsyncDelta, num_entries

MAX_ENTRIES: Final = 4096
"""Log-probabilities from which on a delta takes in no further step; 10 to 20 ms of encoding."""


class UnreadOutput:
    """Unread output by steps, in order.

    Attributes:
      steps: text, ids and log-probabilities of each step; an id alone stands for a list of one.
      num_entries: number of its log-probabilities, alternatives included.
    """

    __slots__ = ("_has_logprobs", "num_entries", "steps")

    def __init__(self, *, has_logprobs: bool) -> None:
        self._has_logprobs = has_logprobs
        self.steps: list[tuple[str, int | Sequence[int], Sequence[TokenLogprob] | None]] = []
        self.num_entries = 0

    def __bool__(self) -> bool:
        """Return whether there is any."""
        return bool(self.steps)

    def add(self, text: str, ids: int | Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        """Append the output of a step, which must not be empty."""
        self.steps.append((text, ids, logprobs))
        if logprobs:
            self.num_entries += num_entries(logprobs)

    def take(self) -> AsyncDelta:
        """Remove all of it, or as many steps as have `MAX_ENTRIES`, and return them as one delta."""
        steps = self.steps
        if len(steps) == 1 and not self.num_entries:  # most deltas of a client that reads
            ((text, more, _),) = steps
            steps.clear()
            one = (more,) if isinstance(more, int) else tuple(more)
            return AsyncDelta(text, one, () if self._has_logprobs else None)
        texts: list[str] = []
        ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        num_before = self.num_entries
        for text, more, scores in steps:
            if num_before - self.num_entries >= MAX_ENTRIES:
                break
            texts.append(text)
            if isinstance(more, int):
                ids.append(more)
            else:
                ids += more
            if scores:
                logprobs += scores
                self.num_entries -= num_entries(scores)
        del steps[: len(texts)]
        return AsyncDelta("".join(texts), tuple(ids), tuple(logprobs) if self._has_logprobs else None)
