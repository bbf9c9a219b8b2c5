"""Requests that come more than once, and must not run more than once.

Owns: which request with an idempotency key runs, which responses may have been committed without arriving,
and when an earlier response is the answer to a repeated request; how long that is remembered; telling readers
of the history what has ended since they began.
Does not know: how a response runs, or how it is answered.

The openai client sends no key by itself, but repeats a request whose connection was lost, with
`x-stainless-retry-count`. Such a retry gets the response to the same body that was committed while its client
was gone, once and within ten minutes, or, as long after this server's start, one that was committed within
two minutes before it; in between, every other response was answered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from pensieve_jax.core.errors import UnknownRecordError
from pensieve_jax.history.server_tables.changes import Idempotency, ResponseRecord
from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.openai.responses.run import ResponseRun

KEY_LIFETIME_S: Final = 24 * 3600.0
UNDELIVERED_LIFETIME_S: Final = 600.0
BEFORE_START_S: Final = 120.0
MAX_KEY_CHARACTERS: Final = 255
_MAX_UNDELIVERED: Final = 10_000


class IdempotencyStore:
    """What is known of repeated requests of one server. Used by the event loop's thread only.

    Between the last look of `by_key` or `by_body`, at the history and at what is known here, and its return
    nothing happens.
    """

    def __init__(self, history: Any, started_at_s: float, read: Callable[..., Awaitable[Any]]) -> None:
        """Of a history's reader, asked by `read` as of `BackgroundResponses.current`.

        `started_at_s` is when this server started.
        """
        self._history = history
        self._started_at_s = started_at_s
        self._read = read
        self._ends = CompletionWatcher[tuple[str, str]]()
        self._running: dict[tuple[str, str], ResponseRun] = {}
        self._undelivered = TtlCache[tuple[str, str], str](UNDELIVERED_LIFETIME_S, _MAX_UNDELIVERED)
        self._given_again: set[tuple[str, str]] = set()  # of those from before the start, by owner and id

    @property
    def num_running(self) -> int:
        """Requests with a key that run."""
        return len(self._running)

    @property
    def num_undelivered(self) -> int:
        """Responses whose clients may have missed them, at most a fixed number."""
        return len(self._undelivered)

    async def by_key(
        self, owner: str, key: str, body_sha256: str, now_s: float
    ) -> ResponseRun | ResponseRecord | None:
        """What a request with this key began earlier, and is not forgotten.

        Raises ApiError 422 where that request had another body.
        """
        while True:
            run = self._running.get((owner, key))
            if run is not None:
                check_same_body(body_sha256, run.body_sha256)
                return run
            with self._ends.seen() as ended:
                record = await self._read(owner, self._kept_under, owner, key, body_sha256, now_s)
            if (owner, key) not in self._running and (owner, key) not in ended:
                return record

    async def by_body(self, owner: str, body_sha256: str, now_s: float) -> ResponseRecord | None:
        """The response that the client of a repeated request has probably never seen.

        It is given once; whoever cannot deliver it says so again (`missed`).
        """
        request = (owner, body_sha256)
        while True:
            found = self._undelivered.get(request, now_s)
            if found is None:
                last = await self._from_before(owner, body_sha256, now_s)
                if self._undelivered.get(request, now_s) is not None:
                    continue
                if last is None or (owner, last.response_id) in self._given_again:
                    return None
                self._given_again.add((owner, last.response_id))
                return last
            try:
                record: ResponseRecord = await self._read(owner, self._history.response, owner, found)
            except UnknownRecordError:  # deleted, or not there yet
                return None
            if self._undelivered.get(request, now_s) == found:
                self._undelivered.drop(request, found)
                return record

    def start(self, owner: str, key: str, run: ResponseRun) -> None:
        """A request with a key runs."""
        self._running[owner, key] = run

    def end(self, owner: str, key: str) -> None:
        """It does so no longer; what it became stands in the history, if it is stored."""
        self._running.pop((owner, key), None)
        self._ends.end((owner, key))

    def missed(self, owner: str, body_sha256: str, response_id: str, now_s: float) -> None:
        """A response was committed, but its client had left."""
        self._undelivered.put((owner, body_sha256), response_id, now_s)

    # Inside

    def _kept_under(self, owner: str, key: str, body_sha256: str, now_s: float) -> ResponseRecord | None:
        known = self._history.idempotent(owner, key, now_s)
        if known is None:
            return None
        check_same_body(body_sha256, known.body_sha256)
        record: ResponseRecord = self._history.response(owner, known.became)
        return record

    async def _from_before(self, owner: str, body_sha256: str, now_s: float) -> ResponseRecord | None:
        """The last response to a body that was committed shortly before this server's start."""
        if now_s - self._started_at_s >= UNDELIVERED_LIFETIME_S:
            return None
        since_s = self._started_at_s - BEFORE_START_S
        last: ResponseRecord | None = await self._read(
            owner, self._history.by_body, owner, body_sha256, since_s
        )
        if last is None or last.background or last.completed_at_s is None:
            return None
        return None if last.completed_at_s >= self._started_at_s else last


def idempotency_key(headers: Mapping[str, str]) -> str | None:
    """The key of a request; raises ApiError 400 for one that is too long."""
    key = headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= MAX_KEY_CHARACTERS:
        sentence = f"Idempotency-Key has {len(key)} characters, but must have 1 to {MAX_KEY_CHARACTERS}."
        raise ApiError(400, "invalid_value", sentence, param="Idempotency-Key")
    return key


def is_retry(headers: Mapping[str, str]) -> bool:
    """Whether the openai client says that it sends this once more."""
    count = headers.get("x-stainless-retry-count", "0")
    return count.isascii() and count.isdecimal() and count.strip("0") != ""


def kept_key(key: str | None, body_sha256: str, now_s: float) -> Idempotency | None:
    """What is committed of a request's key."""
    if key is None:
        return None
    return Idempotency(key=key, body_sha256=body_sha256, expires_at_s=now_s + KEY_LIFETIME_S)


def check_same_body(body_sha256: str, earlier: str) -> None:
    """Raise ApiError 422 for another body than the earlier one with this key: a key stands for one."""
    if body_sha256 != earlier:
        sentence = "This Idempotency-Key was sent with another body; take a new key for a new request."
        raise ApiError(422, "idempotency_key_reused", sentence, param="Idempotency-Key")


class TtlCache[K: Hashable, V]:
    """Values by key, in the order in which they were put. Used by the event loop's thread only."""

    def __init__(self, lifetime_s: float, most: int) -> None:
        """Nothing yet; at most `most` values, each for `lifetime_s` seconds."""
        self._lifetime_s = lifetime_s
        self._most = most
        self._found: OrderedDict[K, tuple[V, float]] = OrderedDict()

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._found)

    def put(self, key: K, value: V, now_s: float) -> None:
        """Remember a value from now on, in place of an earlier one of its key."""
        self._found[key] = (value, now_s)
        self._found.move_to_end(key)
        forgotten_s = now_s - self._lifetime_s
        while len(self._found) > self._most or next(iter(self._found.values()))[1] <= forgotten_s:
            self._found.popitem(last=False)

    def get(self, key: K, now_s: float) -> V | None:
        """The value of a key; None where there is none, or its time is over."""
        value, put_s = self._found.get(key, (None, 0.0))
        return value if put_s > now_s - self._lifetime_s else None

    def drop(self, key: K, value: V) -> None:
        """Forget a key, if it has this value."""
        if key in self._found and self._found[key][0] == value:
            del self._found[key]


class CompletionWatcher[K: Hashable]:
    """Of one server. Used by the event loop's thread only."""

    def __init__(self) -> None:
        self._readers: dict[int, set[K]] = {}

    @contextmanager
    def seen(self) -> Iterator[set[K]]:
        """What ends from now on, as long as the block lasts."""
        ended = set[K]()
        self._readers[id(ended)] = ended
        try:
            yield ended
        finally:
            del self._readers[id(ended)]

    def end(self, key: K) -> None:
        """Tell every open block of `seen` that `key` has ended."""
        for ended in self._readers.values():
            ended.add(key)
