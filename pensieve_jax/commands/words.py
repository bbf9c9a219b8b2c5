"""Common output texts of commands: counts, times, and the sources of a turn's tokens.

Owns: these texts, and the sentence about the small model.
Does not know: the commands that print them, or engines.
"""

from __future__ import annotations

from typing import Final

from pensieve_jax import Usage

SMALL_MODEL: Final = "This model is a small one, made for trying the engine: it often errs."


def format_count(number: int, noun: str) -> str:
    """Format a count, as in "1 turn" and "1,200 turns"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(seconds: float) -> str:
    """Format a duration, as in "31 ms", "2.4 s", "3 min" and "1.5 h"."""
    if seconds < 0.9995:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def device_memory(platform: str) -> str:
    """Return the usual name of device memory on a platform of `LLM.describe`."""
    return f"{platform.upper()} memory" if platform in ("gpu", "tpu") else "device memory"


def describe_usage(usage: Usage, first_token_s: float | None, memory: str) -> str:
    """Describe the sources of a turn's tokens, and the time to its first token.

    Args:
      usage: usage of the turn.
      first_token_s: seconds from sending to the first token; None omits it.
      memory: name of the device memory.
    """
    if usage.reused_gpu_tokens + usage.swapped_in_tokens + usage.recomputed_tokens:
        sources = [f"{format_count(usage.reused_gpu_tokens, 'token')} reused from {memory}"]
        if usage.swapped_in_tokens:
            sources.append(f"{usage.swapped_in_tokens:,} copied from host memory")
        sources += [f"{usage.recomputed_tokens:,} recomputed", f"{usage.prefilled_tokens:,} new"]
        parts = [", ".join(sources)]
    else:
        parts = [format_count(usage.prefilled_tokens, "new token")]
    if usage.num_suspensions:
        parts.append(f"paused {format_count(usage.num_suspensions, 'time')} for lack of memory")
    if first_token_s is not None:
        parts.append(f"first token after {duration(first_token_s)}")
    return "; ".join(parts)
