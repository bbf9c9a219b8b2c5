"""Rules that choose the replica of a turn.

Owns: three rules. Does not know: what a replica has cached of a conversation.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from pensieve_lab.workload.server import Server


class Router(Protocol):
    """Rule that chooses replicas by index."""

    def choose(self, conversation_id: str, replicas: Sequence[Server]) -> int:
        """Return the replica that serves the next turn of a conversation."""
        ...

    def place(self, conversation_id: str, replicas: Sequence[Server]) -> int:
        """Return the replica that holds the KV cache of a conversation from before the run."""
        ...


class AffinityRouter:
    """Keeps a conversation where it began: on the replica where the fewest conversations had begun."""

    def __init__(self, seed: int) -> None:
        """Start without conversations; the seed is not used."""
        self._homes: dict[str, int] = {}
        self._num_homes: Counter[int] = Counter()

    def choose(self, conversation_id: str, replicas: Sequence[Server]) -> int:
        home = self._homes.get(conversation_id)
        if home is None:
            home = min(range(len(replicas)), key=self._num_homes.__getitem__)
            self._homes[conversation_id] = home
            self._num_homes[home] += 1
        return home

    place = choose


class RandomRouter:
    """Chooses a random replica for every turn."""

    def __init__(self, seed: int) -> None:
        """Seed the random choices."""
        self._random = random.Random(seed)

    def choose(self, conversation_id: str, replicas: Sequence[Server]) -> int:
        return self._random.randrange(len(replicas))

    place = choose


class LeastLoadedRouter(RandomRouter):
    """Chooses the replica with the fewest unanswered turns, the first one among equals.

    The KV cache of a conversation from before the run is on a random replica.
    """

    def choose(self, conversation_id: str, replicas: Sequence[Server]) -> int:
        return min(range(len(replicas)), key=lambda index: replicas[index].num_unfinished)


ROUTERS: dict[str, Callable[[int], Router]] = {
    "affinity": AffinityRouter,
    "random": RandomRouter,
    "least-loaded": LeastLoadedRouter,
}
"""Rules by name, each made with a seed."""
