"""What a run of a workload asks of whatever serves it.

Owns: the `Server` protocol, and what a server may be told before a run. Engines, other servers and simulated
replicas implement it; a second engine enters a benchmark by doing so.
Does not know: who sends turns (`client`), or what is made of the answers (`figures`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from pensieve_jax.core.clock import Clock
from pensieve_lab.workload.step_totals import Steps
from pensieve_lab.workload.turns import Answer, UserTurn


class History(NamedTuple):
    """What was said in a conversation before the run.

    Attributes:
      conversation_id: whose.
      num_tokens: of it.
      last_active_s: when its last answer ended, at most 0.
      token_ids: what was said; empty for servers that take time only.
    """

    conversation_id: str
    num_tokens: int
    last_active_s: float
    token_ids: Sequence[int] = ()


class Server(Protocol):
    """Serves turns, driven from one thread.

    Attributes:
      clock: the time that turns arrive and answers end by.
    """

    @property
    def clock(self) -> Clock:
        """See the attributes; implementations may give one of their own kind."""
        ...

    @property
    def has_unfinished(self) -> bool:
        """There is something to step for."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Turns that were submitted and not answered."""
        ...

    def remember(self, histories: Iterable[History]) -> None:
        """Have had these conversations, in the order of their ends; before the run."""
        ...

    def submit(self, turn: UserTurn) -> None:
        """Queue a turn of a conversation that none is running of."""
        ...

    def step(self, until_s: float) -> list[Answer]:
        """Go on for a step, or for several while the clock is before `until_s`; returns what was answered.

        Raises PensieveError for a turn that failed.
        """
        ...

    def counters(self) -> Mapping[str, float]:
        """Numbers that only grow, as of `Engine.stats`; whatever is known."""
        ...

    def steps(self) -> Steps:
        """Steps so far by bucket; empty where that is not known."""
        ...
