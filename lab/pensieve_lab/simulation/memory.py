"""Memory sizes to simulate a trace with, from one that keeps almost nothing to one that keeps everything.

Owns: the choice of sizes, and how they are printed.
Does not know: engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pensieve_lab.workload import Session

GPU_BYTES = 40_000_000_000
"""Device memory for the KV cache, as in the paper: the most that is chosen."""
_GPU_SHARE = 1 / 8  # of the KV cache of all conversations
_MIN_CONTEXTS = 1.25  # of the longest context, which a sampled part may not contain
_MIN_PAGES = 2  # the minimum of any engine
_HOST_TIMES_GPU = (1, 2, 4)


class Memory(NamedTuple):
    """Device and host memory for the KV cache, in bytes."""

    gpu_bytes: int
    cpu_bytes: int

    def __str__(self) -> str:
        host = f" + {gigabytes(self.cpu_bytes)} host" if self.cpu_bytes else ""
        return f"{gigabytes(self.gpu_bytes)} device{host}"


def gigabytes(num_bytes: float) -> str:
    """Format a size in GB, with two significant digits below 10 GB."""
    size = num_bytes / 1e9
    return f"{size:,.0f} GB" if size >= 10 else f"{size:.2g} GB"


def state_tokens(sessions: Sequence[Session]) -> int:
    """Return the tokens of all finished conversations."""
    return sum(session.conversation.num_tokens for session in sessions)


def device_bytes(
    sessions: Sequence[Session], token_bytes: int, max_context_tokens: int, page_tokens: int
) -> int:
    """Choose the device memory for the KV cache of a trace.

    It is the smaller of the paper's 40 GB and an eighth of the trace's KV cache, but at least 1.25 of the
    longest context. A context occupies whole pages of `page_tokens`, so a short one needs more than its
    share.
    """
    num_pages = max(-(-max_context_tokens // page_tokens), _MIN_PAGES)
    least = max(_MIN_CONTEXTS * max_context_tokens, num_pages * page_tokens)
    enough = _GPU_SHARE * state_tokens(sessions)
    return _rounded(max(least * token_bytes, min(enough * token_bytes, GPU_BYTES)))


def host_bytes(gpu_bytes: int) -> list[int]:
    """Return the host memory sizes to try: multiples of the device memory."""
    return [times * gpu_bytes for times in _HOST_TIMES_GPU]


def _rounded(num_bytes: float) -> int:
    """Round up to two significant digits."""
    magnitude = 10 ** max(len(str(int(num_bytes))) - 2, 0)
    return -(-int(num_bytes) // magnitude) * magnitude
