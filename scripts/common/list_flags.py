"""Flags that are lists of numbers.

Owns: their reading, and the error for what is none. Does not know: what is counted. Called by: benchmarks.
"""

from __future__ import annotations

from collections.abc import Sequence

from pensieve_jax import ConfigError


def numbers(flag: str, texts: Sequence[str], *, at_most: int | None = None) -> tuple[int, ...]:
    """The integers of the list `flag`; raises ConfigError for one below 1 or above `at_most`."""
    if not all(text.isdecimal() and 0 < int(text) <= (at_most or int(text)) for text in texts):
        limit = "integers of at least 1" if at_most is None else f"integers from 1 to {at_most}"
        raise ConfigError(flag, ",".join(texts), f"{limit} with commas between them")
    return tuple(map(int, texts))
