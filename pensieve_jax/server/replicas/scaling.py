"""How many replicas there are to be.

Owns: the policy: by the tokens of prompts that wait, and no fewer than what runs needs.
Does not know: Ray, which calls it with what the replicas said, delays a change and keeps it within bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

QUEUED_TOKENS: Final = "queued_tokens"
"""What each replica says of itself; see `Replica.queued_tokens`."""
_FULL: Final = 0.8
"""A share of its places in use is as many as a replica should have for long."""


class QueuedTokens:
    """A replica more for every `queued_tokens` that wait, one less while the others would not be full."""

    def __init__(self, queued_tokens: int, max_num_running: int) -> None:
        """`max_num_running` turns run on a replica."""
        self._queued_tokens = queued_tokens
        self._max_num_running = max_num_running

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """How many there are to be, and nothing to remember, as Serve asks a policy."""
        by_replica: Mapping[Any, float] = (context.aggregated_metrics or {}).get(QUEUED_TOKENS, {})
        return self.wanted(
            context.current_num_replicas, sum(by_replica.values()), context.total_num_requests
        ), {}

    def wanted(self, num_replicas: int, queued_tokens: float, num_turns: float) -> int:
        """Of so many replicas with so many tokens and turns."""
        more = num_replicas + int(queued_tokens / self._queued_tokens / max(1, num_replicas))
        if more > num_replicas:
            return more
        needed = math.ceil(num_turns / (_FULL * self._max_num_running))
        return max(1, num_replicas - 1) if needed < num_replicas else num_replicas
