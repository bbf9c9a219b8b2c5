"""Which replica a turn goes to.

Owns: three rules. Does not know: what a replica has of a conversation.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from pensieve_lab.workload.server import Server


class Router(Protocol):
    """Chooses replicas, by index."""

    def choose(self, conversation_id: str, replicas: Sequence[Server]) -> int:
        """Which of them serves the next turn of a conversation."""
        ...

    def place(self, conversation_id: str, replicas: Sequence[Server]) -> int:
        """Which of them has the state of a conversation that began before the run."""
        ...


class AffinityRouter:
    """A conversation stays where it began: with the replica where the fewest conversations had begun."""

    def __init__(self, seed: int) -> None:
        """No conversation has begun; nothing is drawn."""
        self._homes: dict[str, int] = {}
        self._num_homes: Counter[int] = Counter()

    def choose(self, conversation_id: str, replicas: Sequence[Server]) -> int:
        """See `Router`."""
        home = self._homes.get(conversation_id)
        if home is None:
            home = min(range(len(replicas)), key=self._num_homes.__getitem__)
            self._homes[conversation_id] = home
            self._num_homes[home] += 1
        return home

    place = choose


class RandomRouter:
    """Any replica, turn by turn."""

    def __init__(self, seed: int) -> None:
        """Draws are of this seed."""
        self._random = random.Random(seed)

    def choose(self, conversation_id: str, replicas: Sequence[Server]) -> int:
        """See `Router`."""
        return self._random.randrange(len(replicas))

    place = choose


class LeastLoadedRouter(RandomRouter):
    """The replica with the fewest unanswered turns, the first of them where several have as few.

    What was served before the run may be anywhere.
    """

    def choose(self, conversation_id: str, replicas: Sequence[Server]) -> int:
        """See `Router`."""
        return min(range(len(replicas)), key=lambda index: replicas[index].num_unfinished)


ROUTERS: dict[str, Callable[[int], Router]] = {
    "affinity": AffinityRouter,
    "random": RandomRouter,
    "least-loaded": LeastLoadedRouter,
}
"""By the names that people choose them by; each is made with a seed."""
