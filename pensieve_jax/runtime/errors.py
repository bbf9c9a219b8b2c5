"""What JAX's runtime and XLA report, in a line.

Owns: telling memory that ran out from everything else, and how much of a report people are shown.
Does not know: what ran, or what else is in the device's memory.

XLA explains an allocation that failed by pages of its own buffers. A message has the first line of that, the
log has all of it, at debug level, and so has the error's cause.
"""

from __future__ import annotations

import logging
import re

from pensieve_jax.core.errors import StepFailedError

_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "CUDA_ERROR_OUT_OF_MEMORY")
_REQUEST = re.compile(r"allocate (?:request for )?(\d[\d.]*) ?([KMGT]?)(i?)(?:B|bytes)\b")
_MAX_LEN = 200
_LOWER = "cache.gpu_pages, cache.gpu_memory_fraction or scheduler.max_num_batched_tokens"
_log = logging.getLogger(__name__)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, the device's or the host's."""
    return any(mark in str(error) for mark in _OUT_OF_MEMORY)


def requested_bytes(error: Exception) -> int:
    """What could not be allocated; 0 where the report does not say."""
    found = _REQUEST.search(str(error))
    if found is None:
        return 0
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " "))


def in_a_line(error: Exception) -> str:
    """The beginning of a report; all of it goes to the log where there is more."""
    text = str(error).strip()
    first = text.partition("\n")[0].strip()
    line = first if len(first) <= _MAX_LEN else f"{first[: _MAX_LEN - 1]}…"
    if line != text:
        _log.debug("the runtime reported: %s", text)
    return line


def step_failed(what: str, error: Exception, lower: str = _LOWER) -> StepFailedError:
    """`what` happened, for the reason that the runtime gives; raise it from `error`.

    `lower` names settings that take memory.
    """
    hint = f"; lower {lower}" if is_out_of_memory(error) else ""
    return StepFailedError(f"{what}: {in_a_line(error)}{hint}")
