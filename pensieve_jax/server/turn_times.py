"""When what happened to a turn, as the process in front of the engine sees it.

Owns: the moments. Does not know: what is done with them, which metrics and spans are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TurnTimes:
    """Moments of one turn, by `time.perf_counter`; None is not yet.

    Attributes:
      began_s: its request came.
      accepted_s: the engine has queued it.
      first_token_s: its reply began.
      ended_s: it ended, or was given up.
    """

    began_s: float
    accepted_s: float
    first_token_s: float | None = None
    ended_s: float = 0.0
