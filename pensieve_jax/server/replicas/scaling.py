"""Autoscaling policy for the number of replicas.

Owns: the policy, which scales up by waiting prompt tokens and keeps enough replicas for the running turns.
Does not know: Ray, which calls the policy with the replicas' metrics, delays changes, and applies the limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

QUEUED_TOKENS: Final = "queued_tokens"
"""Name of the metric that each replica reports; see `Replica.queued_tokens`."""
_FULL: Final = 0.8
"""Highest share of a replica's `max_num_running` that should be in use for long."""


class QueuedTokens:
    """Policy that adds n replicas if n times `queued_tokens` prompt tokens wait per replica.

    Otherwise it removes one replica if the others could run all turns without being full.
    """

    def __init__(self, queued_tokens: int, max_num_running: int) -> None:
        """Create the policy for replicas that run at most `max_num_running` turns."""
        self._queued_tokens = queued_tokens
        self._max_num_running = max_num_running

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas and an empty policy state, as Serve requires."""
        by_replica: Mapping[Any, float] = (context.aggregated_metrics or {}).get(QUEUED_TOKENS, {})
        return self.wanted(
            context.current_num_replicas, sum(by_replica.values()), context.total_num_requests
        ), {}

    def wanted(self, num_replicas: int, queued_tokens: float, num_turns: float) -> int:
        """Return the wanted number of replicas.

        Args:
          num_replicas: the current number.
          queued_tokens: waiting prompt tokens on all replicas.
          num_turns: turns on all replicas.
        """
        more = num_replicas + int(queued_tokens / self._queued_tokens / max(1, num_replicas))
        if more > num_replicas:
            return more
        needed = math.ceil(num_turns / (_FULL * self._max_num_running))
        return max(1, num_replicas - 1) if needed < num_replicas else num_replicas
