"""The interface that a run of a workload needs from a server.

Owns: the `Server` protocol, and the histories that a server gets before a run. Engines, other servers and
simulated replicas implement the protocol; a new engine enters a benchmark by doing so.
Does not know: who sends turns (`client`), or what is made of the answers (`figures`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from pensieve_jax.core.clock import Clock
from pensieve_lab.workload.step_totals import Steps
from pensieve_lab.workload.turns import Answer, UserTurn


class History(NamedTuple):
    """Conversation from before the run.

    Attributes:
      conversation_id: id of the conversation.
      num_tokens: length of the conversation.
      last_active_s: end of its last answer, at most 0.
      token_ids: its ids; empty for simulated servers.
    """

    conversation_id: str
    num_tokens: int
    last_active_s: float
    token_ids: Sequence[int] = ()


class Server(Protocol):
    """Server of turns, driven from one thread.

    Attributes:
      clock: clock of arrivals and ends of answers.
    """

    @property
    def clock(self) -> Clock:
        """Clock of arrivals and ends of answers; implementations may narrow the type."""
        ...

    @property
    def has_unfinished(self) -> bool:
        """Whether there is work for `step`."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Number of submitted turns without an answer."""
        ...

    def remember(self, histories: Iterable[History]) -> None:
        """Take over these conversations, in the order of their ends, before the run."""
        ...

    def submit(self, turn: UserTurn) -> None:
        """Queue a turn of a conversation without a running turn."""
        ...

    def step(self, until_s: float) -> list[Answer]:
        """Do a step, or several while the clock is before `until_s`; return the answers.

        Raises PensieveError for a failed turn.
        """
        ...

    def counters(self) -> Mapping[str, float]:
        """Return the known counters, which only grow, named as in `Engine.stats`."""
        ...

    def steps(self) -> Steps:
        """Return the steps so far by bucket; empty if unknown."""
        ...
