"""A progress bar over the time of a run, virtual or real, that shows figures of the latest answers.

Owns: which figures it shows, and over how many answers.
Does not know: which system answers.
Called by programs.
"""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Self

from tqdm import tqdm

from pensieve_lab.workload import Answer

_NUM_LATEST = 500
_REFRESH_EVERY = 50


class LiveFigures:
    """Progress bar that sees every answer while it is entered.

    Attributes:
      num_answers: seen so far.
    """

    def __init__(
        self, title: str, end_s: float | None, *, shown: bool, refresh_every: int = _REFRESH_EVERY
    ) -> None:
        """Show progress up to `end_s`, if known, every `refresh_every` answers; only if `shown`."""
        layout = "{desc}: {n:.0f}/{total_fmt} s [{elapsed}]{postfix}"
        self._bar = tqdm(desc=title, total=end_s, disable=not shown, leave=False, bar_format=layout)
        self._latest: deque[Answer] = deque(maxlen=_NUM_LATEST)
        self._refresh_every = refresh_every
        self.num_answers = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def see(self, answer: Answer) -> None:
        """Add an answer, and refresh the bar when it is due."""
        self.num_answers += 1
        self._latest.append(answer)
        if not self._bar.disable and self.num_answers % self._refresh_every == 0:
            self._bar.n = max(answer.end_s, self._bar.n)  # replicas answer in no strict order
            self._bar.set_postfix_str(self._text())

    def _text(self) -> str:
        latest = self._latest
        span_s = latest[-1].end_s - latest[0].end_s
        rate = f"{(len(latest) - 1) / span_s:.1f} requests/s, " if span_s > 0 else ""
        latency_s = sum((a.end_s - a.turn.arrival_s) / a.usage.output_tokens for a in latest) / len(latest)
        history = sum(a.turn.num_history_tokens for a in latest)
        found = sum(a.usage.reused_gpu_tokens + a.usage.swapped_in_tokens for a in latest)
        hits = f", {found / history:.0%} cache hit rate" if history else ""
        return f"{rate}{1e3 * latency_s:.1f} ms/token{hits}"
