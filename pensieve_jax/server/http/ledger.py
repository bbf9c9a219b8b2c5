"""What the requests of each owner hold at the moment, and how much they may hold.

Owns: the resources, their default budgets, and what every open ticket holds of them.
Does not know: which work causes which cost, or in which order work runs. Called by `server.http.app`, which
opens a ticket for each request, and by the handlers, which charge it.

A ticket exists from a request's head to the end of its answer. Work is charged before it begins, by an upper
bound of its cost, so what is refused has cost nothing. What a ticket holds is released when it closes,
whatever became of the request. Without API keys all clients are one owner, which may use the whole budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Final, Literal, Self, get_args

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.server.http.errors import ApiError, overloaded, rate_limited

type Resource = Literal[
    "body_bytes",
    "json_values",
    "encoded_characters",
    "answer_bytes",
    "written_rows",
    "jobs",
    "streams",
    "maps",
]
RESOURCES: Final[tuple[Resource, ...]] = get_args(Resource.__value__)
NUM_LONGEST_BODIES: Final = 32
"""Number of bodies of maximum size that fit into the default budget."""
_RETRY_S: Final = 1
_RETRY_MAP_S: Final = 30  # a map is watched for minutes


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of a resource may be held at a time.

    Attributes:
      total: by all owners together.
      of_key: by one key; without keys there is one owner, which may hold `total`.
      what: the resource in words, for errors and the flag's help.
    """

    total: int
    of_key: int
    what: str


DEFAULTS: Final[Mapping[Resource, Budget]] = {
    "body_bytes": Budget(320 * 2**20, 64 * 2**20, "bytes of request bodies"),
    "json_values": Budget(4_000_000, 1_000_000, "values in JSON bodies"),
    "encoded_characters": Budget(64 * 2**20, 32 * 2**20, "characters of text to encode"),
    "answer_bytes": Budget(256 * 2**20, 64 * 2**20, "bytes of answers that clients have not read"),
    "written_rows": Budget(65_536, 16_384, "rows of the history to write"),
    "jobs": Budget(512, 64, "jobs that run or wait on threads"),
    "streams": Budget(4096, 1024, "open streams"),
    "maps": Budget(64, 8, "streams of the cache map"),
}
"""Budgets by resource. A turn has its own limits, which follow the engine; see `server.http.admission`."""


class Ticket:
    """What one request holds; a context manager that releases it.

    Attributes:
      owner: the owner of the request's key; "" without keys.
    """

    __slots__ = ("_held", "_ledger", "_on_close", "owner")

    def __init__(self, ledger: Ledger, owner: str) -> None:
        self.owner = owner
        self._ledger = ledger
        self._held: dict[Resource, int] = {}
        self._on_close: list[Callable[[], None]] = []

    def charge(self, resource: Resource, amount: int) -> None:
        """Hold more of a resource until the ticket closes.

        Raises ApiError 413 for an amount that no request may hold, and 429 if the owner, or all owners
        together, hold too much at the moment. Nothing is then charged.
        """
        self._ledger._add(self.owner, resource, amount)
        self._held[resource] = self._held.get(resource, 0) + amount

    def on_close(self, release: Callable[[], None]) -> None:
        """Call `release` when the ticket closes, for something that is not counted."""
        self._on_close.append(release)

    def close(self) -> None:
        """Release everything; further calls do nothing."""
        held, self._held = self._held, {}
        for resource, amount in held.items():
            self._ledger._subtract(self.owner, resource, amount)
        releases, self._on_close = self._on_close, []
        for release in releases:
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Ledger:
    """The ledger of one server. Used by the event loop's thread only.

    Attributes:
      budgets: the budget of each resource.
    """

    def __init__(self, budgets: Mapping[Resource, Budget] = DEFAULTS, *, has_keys: bool) -> None:
        """`has_keys` says whether the owners are those of API keys."""
        self.budgets = budgets
        self._has_keys = has_keys
        self._held: dict[Resource, Counter[str]] = {name: Counter() for name in budgets}  # without zeros

    def ticket(self, owner: str) -> Ticket:
        """Open a ticket for one request of an owner."""
        return Ticket(self, owner)

    def held(self, resource: Resource, owner: str | None = None) -> int:
        """Return how much of a resource an owner holds, or all owners."""
        held = self._held[resource]
        return held.total() if owner is None else held[owner]

    def usage(self) -> dict[str, tuple[int, int]]:
        """Return what all owners hold of each resource, and its budget."""
        return {name: (self.held(name), budget.total) for name, budget in self.budgets.items()}

    def limit(self, resource: Resource) -> int:
        """Return how much of a resource one request may hold at most."""
        budget = self.budgets[resource]
        return min(budget.total, budget.of_key) if self._has_keys else budget.total

    # Called by tickets

    def _add(self, owner: str, resource: Resource, amount: int) -> None:
        assert amount >= 0, f"{amount} of {resource}"
        most, budget = self.limit(resource), self.budgets[resource]
        if amount > most:
            sentence = f"The request needs {amount} {budget.what}; it must need at most {most}."
            raise ApiError(413, "request_too_large", sentence)
        held = self._held[resource]
        retry_s = _RETRY_MAP_S if resource == "maps" else _RETRY_S
        if held[owner] + amount > most:
            whose = "A key" if self._has_keys else "All clients together"
            sentence = f"{whose} may have {most} {budget.what} at a time; wait for another request to end."
            raise rate_limited(sentence, retry_s)
        if held.total() + amount > budget.total:
            raise overloaded(f"The server holds too many {budget.what}; try again later.", retry_s)
        if amount:
            held[owner] += amount

    def _subtract(self, owner: str, resource: Resource, amount: int) -> None:
        held = self._held[resource]
        held[owner] -= amount
        if not held[owner]:
            del held[owner]


def budgets_of(
    total: Mapping[str, int], of_key: Mapping[str, int], *, max_body_bytes: int
) -> dict[Resource, Budget]:
    """Return the budgets of a server.

    Args:
      total, of_key: the budgets that differ from the defaults, by resource.
      max_body_bytes: limit of a body; by default 32 of them fit into the budget, and 6 of a key.

    Raises ConfigError for an unknown resource, or a number below 1.
    """
    found = dict(DEFAULTS)
    longest = NUM_LONGEST_BODIES * max_body_bytes
    found["body_bytes"] = replace(found["body_bytes"], total=longest, of_key=longest // 5)
    for name, amount in _checked("budgets", total):
        found[name] = replace(found[name], total=amount)
    for name, amount in _checked("key_budgets", of_key):
        found[name] = replace(found[name], of_key=amount)
    return found


def _checked(field: str, given: Mapping[str, int]) -> Iterator[tuple[Resource, int]]:
    for name, amount in given.items():
        resource = next((one for one in RESOURCES if one == name), None)
        if resource is None:
            raise ConfigError(field, name, f"one of {', '.join(RESOURCES)}")
        if amount < 1:
            raise ConfigError(f"{field}.{name}", amount, "at least 1")
        yield resource, amount
