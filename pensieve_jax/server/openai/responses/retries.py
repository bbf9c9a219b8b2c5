"""Repeated requests, which must not run more than once.

Owns: the running requests with an idempotency key, the responses that may be committed but undelivered, the
rules for answering a repeated request with an earlier response, and their lifetimes. It also tells readers of
the history which keys ended while they read.
Does not know: how a response runs, or how it is sent. Called by the other modules of `openai.responses`.

The openai client sends no key by default, but repeats a request whose connection was lost, with
`x-stainless-retry-count`. Such a retry gets an undelivered response to the same body, once, in two cases.
Either the response was committed after its client had left, at most 10 minutes ago. Or this server started at
most 10 minutes ago, and the response was committed in the 2 minutes before that. All other responses were
delivered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from pensieve_jax.core.errors import UnknownRecordError
from pensieve_jax.history.server_tables.changes import ResponseRecord
from pensieve_jax.server.openai.responses.run import ResponseRun
from pensieve_jax.server.turns.idempotency import check_same_body

UNDELIVERED_LIFETIME_S: Final = 600.0
BEFORE_START_S: Final = 120.0
_MAX_UNDELIVERED: Final = 10_000


class IdempotencyStore:
    """The running and undelivered responses of one server, for repeated requests.

    Used by the event loop's thread only. Nothing else runs between the last check of `by_key` or `by_body`
    and its return.
    """

    def __init__(self, history: Any, started_at_s: float, read: Callable[..., Awaitable[Any]]) -> None:
        """Create an empty store.

        Args:
          history: reader of the history.
          started_at_s: when this server started.
          read: runs a read of the history, as `BackgroundResponses.current` does.
        """
        self._history = history
        self._started_at_s = started_at_s
        self._read = read
        self._ends = CompletionWatcher[tuple[str, str]]()
        self._running: dict[tuple[str, str], ResponseRun] = {}
        self._undelivered = TtlCache[tuple[str, str], str](UNDELIVERED_LIFETIME_S, _MAX_UNDELIVERED)
        self._returned_from_before: set[tuple[str, str]] = (
            set()
        )  # already returned by `by_body`, by owner and id

    @property
    def num_running(self) -> int:
        """Number of running requests with a key."""
        return len(self._running)

    @property
    def num_undelivered(self) -> int:
        """Number of remembered responses that may be undelivered, which is limited."""
        return len(self._undelivered)

    async def by_key(
        self, owner: str, key: str, body_sha256: str, now_s: float
    ) -> ResponseRun | ResponseRecord | None:
        """Return the running or stored response of an earlier request with this key, or None.

        Raises ApiError 422 if that request had another body.
        """
        while True:
            run = self._running.get((owner, key))
            if run is not None:
                check_same_body(body_sha256, run.body_sha256)
                return run
            with self._ends.collect() as ended:
                record = await self._read(owner, self._stored_response, owner, key, body_sha256, now_s)
            if (owner, key) not in self._running and (owner, key) not in ended:
                return record

    async def by_body(self, owner: str, body_sha256: str, now_s: float) -> ResponseRecord | None:
        """Return the undelivered response for a repeated request without a key, or None.

        Each response is returned once. If it cannot be delivered, the caller must call `add_undelivered`
        again.
        """
        request = (owner, body_sha256)
        while True:
            found = self._undelivered.get(request, now_s)
            if found is None:
                last = await self._from_before(owner, body_sha256, now_s)
                if self._undelivered.get(request, now_s) is not None:
                    continue
                if last is None or (owner, last.response_id) in self._returned_from_before:
                    return None
                self._returned_from_before.add((owner, last.response_id))
                return last
            try:
                record: ResponseRecord = await self._read(owner, self._history.response, owner, found)
            except UnknownRecordError:  # deleted or not yet committed
                return None
            if self._undelivered.get(request, now_s) == found:
                self._undelivered.drop(request, found)
                return record

    def cancel_unless(self, has_owner: Callable[[str], bool]) -> None:
        """Cancel the running requests of owners that have no key any more."""
        for (owner, _), run in list(self._running.items()):
            if run.task is not None and not run.background and not has_owner(owner):
                run.task.cancel()

    def start(self, owner: str, key: str, run: ResponseRun) -> None:
        """Register a running request with a key."""
        self._running[owner, key] = run

    def end(self, owner: str, key: str) -> None:
        """Remove a request with a key that has ended; a stored response is in the history."""
        self._running.pop((owner, key), None)
        self._ends.notify((owner, key))

    def add_undelivered(self, owner: str, body_sha256: str, response_id: str, now_s: float) -> None:
        """Remember a response that may be committed, although its client left before it was sent."""
        self._undelivered.put((owner, body_sha256), response_id, now_s)

    # Private methods

    def _stored_response(self, owner: str, key: str, body_sha256: str, now_s: float) -> ResponseRecord | None:
        known = self._history.idempotent(owner, key, now_s)
        if known is None:
            return None
        check_same_body(body_sha256, known.body_sha256)
        try:
            record: ResponseRecord = self._history.response(owner, known.result_id)
        except UnknownRecordError:  # it was deleted between the two reads, and its key with it
            return None
        return record

    async def _from_before(self, owner: str, body_sha256: str, now_s: float) -> ResponseRecord | None:
        """Return the last response to a body if it was committed shortly before this server's start."""
        if now_s - self._started_at_s >= UNDELIVERED_LIFETIME_S:
            return None
        since_s = self._started_at_s - BEFORE_START_S
        last: ResponseRecord | None = await self._read(
            owner, self._history.by_body, owner, body_sha256, since_s
        )
        if last is None or last.background or last.completed_at_s is None:
            return None
        return None if last.completed_at_s >= self._started_at_s else last


def is_retry(headers: Mapping[str, str]) -> bool:
    """Return whether the openai client marks this request as a retry."""
    count = headers.get("x-stainless-retry-count", "0")
    return count.isascii() and count.isdecimal() and count.strip("0") != ""


class TtlCache[K: Hashable, V]:
    """A cache that forgets values after a lifetime. Used by the event loop's thread only."""

    def __init__(self, lifetime_s: float, most: int) -> None:
        """Hold at most `most` values, each for `lifetime_s` seconds."""
        self._lifetime_s = lifetime_s
        self._most = most
        self._found: OrderedDict[K, tuple[V, float]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of values held."""
        return len(self._found)

    def put(self, key: K, value: V, now_s: float) -> None:
        """Store a value and restart its lifetime, replacing an earlier value of the key."""
        self._found[key] = (value, now_s)
        self._found.move_to_end(key)
        forgotten_s = now_s - self._lifetime_s
        while len(self._found) > self._most or next(iter(self._found.values()))[1] <= forgotten_s:
            self._found.popitem(last=False)

    def get(self, key: K, now_s: float) -> V | None:
        """Return the value of a key, or None if it is missing or expired."""
        value, put_s = self._found.get(key, (None, 0.0))
        return value if put_s > now_s - self._lifetime_s else None

    def drop(self, key: K, value: V) -> None:
        """Remove a key if it has this value."""
        if key in self._found and self._found[key][0] == value:
            del self._found[key]


class CompletionWatcher[K: Hashable]:
    """A registry of reads in progress, which learn the keys that end meanwhile.

    Used by the event loop's thread only.
    """

    def __init__(self) -> None:
        self._open: list[set[K]] = []  # one per open block of `collect`

    @contextmanager
    def collect(self) -> Iterator[set[K]]:
        """Yield a set that collects the keys that end during the block."""
        ended = set[K]()
        self._open.append(ended)
        try:
            yield ended
        finally:
            # `remove` would find the first equal set instead, such as another empty one.
            self._open = [other for other in self._open if other is not ended]

    def notify(self, key: K) -> None:
        """Add `key` to the set of every open block of `collect`."""
        for ended in self._open:
            ended.add(key)
