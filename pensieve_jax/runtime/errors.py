"""Reports of JAX's runtime and XLA, shortened to one line.

Owns: how out-of-memory errors are recognized, and how much of a report users see.
Does not know: what ran, or what else is in the device's memory.

XLA explains a failed allocation with pages about its own buffers. The message has the first line; the log
(at debug level) and the error's cause have all of it.
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
    """Return whether the device or the host ran out of memory."""
    return any(mark in str(error) for mark in _OUT_OF_MEMORY)


def requested_bytes(error: Exception) -> int:
    """Return the bytes of the failed allocation; 0 if the report does not name them."""
    found = _REQUEST.search(str(error))
    if found is None:
        return 0
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " "))


def in_a_line(error: Exception) -> str:
    """Return the first line of a report, shortened; log the whole report if it is longer."""
    text = str(error).strip()
    first = text.partition("\n")[0].strip()
    line = first if len(first) <= _MAX_LEN else f"{first[: _MAX_LEN - 1]}…"
    if line != text:
        _log.debug("the runtime reported: %s", text)
    return line


def step_failed(what: str, error: Exception, lower: str = _LOWER) -> StepFailedError:
    """Return the error "`what`: <report of the runtime>"; raise it from `error`.

    `lower` names settings that take memory. It becomes the hint if memory ran out.
    """
    hint = f"; lower {lower}" if is_out_of_memory(error) else ""
    return StepFailedError(f"{what}: {in_a_line(error)}{hint}")
