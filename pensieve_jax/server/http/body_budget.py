"""How much of bodies the server holds at a time, and what those are told that would make it more.

Owns: the bytes of bodies from their first part until their requests are answered, in all and by key.
Does not know: what bodies mean, or how they are read.

Places for turns bound what the engine has; this bounds what is read, decoded and tokenized before that.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Final, Self

from pensieve_jax.server.http.errors import overloaded, rate_limited
from pensieve_jax.server.http.settings import ServerSettings

NUM_LONGEST: Final = 32
"""So many bodies of the longest kind fit."""
KEYS_PART: Final = 4
"""One key may have one part in so many."""


class BodyBudget:
    """The budget of one server. Used by the event loop's thread only."""

    def __init__(self, settings: ServerSettings) -> None:
        self._most = NUM_LONGEST * settings.max_body_bytes
        self._has_keys = settings.api_keys_file is not None  # without keys, nobody's part is another's loss
        self._by_owner: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Held now."""
        return self._by_owner.total()

    def take(self, owner: str, num_bytes: int) -> None:
        """Hold more for an owner; raises ApiError 429 past the key's part, 503 past the whole."""
        most = self._most // KEYS_PART
        if self._has_keys and self._by_owner[owner] + num_bytes > most:
            raise rate_limited(f"A key may have {most} bytes of bodies at a time; wait for an answer.", 1)
        if self.num_bytes + num_bytes > self._most:
            raise overloaded("Too many long bodies are being read; try again later.", 1)
        self._by_owner[owner] += num_bytes

    def give_back(self, owner: str, num_bytes: int) -> None:
        """What was taken."""
        self._by_owner[owner] -= num_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner]


class HeldBody:
    """What one request holds; a context manager that gives it back."""

    def __init__(self, budget: BodyBudget, owner: str) -> None:
        self._budget = budget
        self._owner = owner
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """As `BodyBudget.take`."""
        self._budget.take(self._owner, num_bytes)
        self._num_bytes += num_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.give_back(self._owner, self._num_bytes)
