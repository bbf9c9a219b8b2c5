"""Flags that are lists of numbers.

Owns: their parsing and the error for invalid lists.
Does not know: what is counted.
Called by programs.
"""

from __future__ import annotations

from collections.abc import Sequence

from pensieve_jax import ConfigError


def numbers(flag: str, texts: Sequence[str], *, at_most: int | None = None) -> tuple[int, ...]:
    """Return the integers of the list `flag`; raises ConfigError for one below 1 or above `at_most`."""
    if not all(text.isdecimal() and 0 < int(text) <= (at_most or int(text)) for text in texts):
        limit = "integers of at least 1" if at_most is None else f"integers from 1 to {at_most}"
        raise ConfigError(flag, ",".join(texts), f"{limit} with commas between them")
    return tuple(map(int, texts))


def seeds(flag: str, texts: Sequence[str]) -> tuple[int, ...]:
    """Return the seeds of the list `flag`.

    Raises ConfigError for an empty list, a duplicate, or a value that numpy rejects as a seed.
    """
    are_numbers = all(text.isascii() and text.isdigit() for text in texts)
    if not texts or not are_numbers or len(set(map(int, texts))) < len(texts):
        raise ConfigError(flag, ",".join(texts), "numbers from 0 on, each once, with commas between them")
    return tuple(map(int, texts))
