"""Memory to try a trace with: between sizes at which everything is lost and at which everything stays.

Owns: the choice of sizes, and how they read.
Does not know: engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pensieve_lab.workload import Session

_GPU_BYTES = 40_000_000_000  # for KV state, as in the paper; a trace may need less
_GPU_SHARE = 1 / 8  # of the state of all conversations
_LEAST_CONTEXTS = 1.25  # of the longest, which a part of the trace need not hold
_LEAST_PAGES = 2  # of any engine
_HOST_TIMES_GPU = (1, 2, 4)


class Memory(NamedTuple):
    """For KV state, in bytes."""

    gpu_bytes: int
    cpu_bytes: int

    def __str__(self) -> str:
        """As in tables."""
        host = f" + {gigabytes(self.cpu_bytes)} host" if self.cpu_bytes else ""
        return f"{gigabytes(self.gpu_bytes)} device{host}"


def gigabytes(num_bytes: float) -> str:
    """With two digits where they are few."""
    size = num_bytes / 1e9
    return f"{size:,.0f} GB" if size >= 10 else f"{size:.2g} GB"


def state_tokens(sessions: Sequence[Session]) -> int:
    """Of all conversations, when everything has been said."""
    return sum(session.conversation.num_tokens for session in sessions)


def device_bytes(
    sessions: Sequence[Session], token_bytes: int, max_context_tokens: int, page_tokens: int
) -> int:
    """What the paper's machine has, or an eighth of all state if that is less, for a context at least.

    A context takes whole pages of `page_tokens`, which of a short one are more than its share.
    """
    num_pages = max(-(-max_context_tokens // page_tokens), _LEAST_PAGES)
    least = max(_LEAST_CONTEXTS * max_context_tokens, num_pages * page_tokens)
    enough = _GPU_SHARE * state_tokens(sessions)
    return _rounded(max(least * token_bytes, min(enough * token_bytes, _GPU_BYTES)))


def host_bytes(gpu_bytes: int) -> list[int]:
    """As much as the device has, and multiples."""
    return [times * gpu_bytes for times in _HOST_TIMES_GPU]


def _rounded(num_bytes: float) -> int:
    """Up, to two digits."""
    magnitude = 10 ** max(len(str(int(num_bytes))) - 2, 0)
    return -(-int(num_bytes) // magnitude) * magnitude
