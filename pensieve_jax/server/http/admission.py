"""Admission control: how many turns and body bytes the server accepts at a time.

Owns: tickets for turns in the engine and in the queue before it, and each key's share of them. It also counts
the bytes of bodies from their first part until their requests are answered, in total and by key, and
estimates Retry-After.
Does not know: what bodies mean or how they are read, the engine beyond its state and size, HTTP beyond the
errors 429 and 503. Called by `server.turns.run`, the request handlers and the application.

The engine gets as many turns as it can run, and a few more so that none of its slots stays empty. The other
turns wait here, first come first served, because waiting here can be cancelled. Retry-After is the expected
time for the tokens of all admitted and waiting turns at the recent token rate: the prompt tokens, and replies
as long as recent ones.

Tickets limit the load of the engine. The body budget limits what is read, decoded and tokenized before a turn
has a ticket.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final, Self

from pensieve_jax.server.async_engine import EngineService
from pensieve_jax.server.http.errors import ApiError, overloaded, rate_limited
from pensieve_jax.server.http.settings import ServerSettings

MAX_RETRY_AFTER_S: Final = 30
_RATE_WINDOW_S: Final = 30.0
_NUM_RECENT_REPLIES: Final = 64
_STATES: Final = {
    "starting": "The engine is starting; try again soon.",
    "draining": "The server is shutting down and accepts no new turns.",
    "dead": "The engine stopped; it restarts, or the server shuts down.",
}
MAX_SIZE_BODIES: Final = 32
"""Number of bodies of maximum size that fit into the budget."""
KEY_SHARE_DIVISOR: Final = 4
"""A key may use at most 1 / KEY_SHARE_DIVISOR of the budget."""


class TokenRate:
    """Tokens per second over the last 30 seconds."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        """`now_s` is a clock in seconds."""
        self._now_s = now_s
        self._began_s = now_s()
        self._counts: deque[tuple[float, int]] = deque()
        self._total = 0

    def add(self, num_tokens: int) -> None:
        """Count tokens that were computed or sampled just now."""
        self._counts.append((self._now_s(), num_tokens))
        self._total += num_tokens
        self._forget()

    def per_second(self) -> float:
        """Return the rate, or 0 while no tokens were counted."""
        self._forget()
        span_s = min(_RATE_WINDOW_S, self._now_s() - self._began_s)
        return self._total / span_s if span_s > 0 else 0.0

    def _forget(self) -> None:
        oldest_s = self._now_s() - _RATE_WINDOW_S
        while self._counts and self._counts[0][0] < oldest_s:
            self._total -= self._counts.popleft()[1]


class Ticket:
    """Permission for one request's turns, from `TurnAdmission.enter` until `leave`; a context manager."""

    def __init__(
        self,
        admission: TurnAdmission,
        owner: str,
        num_turns: int,
        num_tokens: int,
        max_tokens: int | None,
        entered_s: float,
    ) -> None:
        self.owner = owner
        self.num_turns = num_turns
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        self.entered_s = entered_s
        self._admission = admission
        self._left = False

    def num_expected_tokens(self, reply_len: float) -> float:
        """Estimate the tokens of prompts and replies, for replies of `reply_len` tokens or their limit."""
        if self.max_tokens is not None:
            reply_len = min(reply_len, self.max_tokens)
        return self.num_tokens + self.num_turns * reply_len

    def leave(self, num_done_tokens: int = 0, reply_lens: Iterable[int] = ()) -> None:
        """Return the ticket; further calls do nothing.

        Args:
          num_done_tokens: tokens that its turns computed and sampled.
          reply_lens: lengths of its finished replies in tokens.
        """
        if not self._left:
            self._left = True
            self._admission._leave(self, num_done_tokens, reply_lens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


class TurnAdmission:
    """The tickets of one server. Used by the event loop's thread only."""

    def __init__(self, engine: EngineService, settings: ServerSettings, now_s: Callable[[], float]) -> None:
        """`now_s` is a clock in seconds."""
        self._engine = engine
        self._settings = settings
        self.rate = TokenRate(now_s)
        self._now_s = now_s
        self._reply_lens: deque[int] = deque(maxlen=_NUM_RECENT_REPLIES)
        self._num_in_engine = 0
        self._num_waiting = 0
        self._tickets: dict[Ticket, None] = {}  # issued or waited for, by arrival
        self._has_keys = settings.api_keys_file is not None  # without keys all clients are one owner
        self._in_flight: dict[str, int] = {}
        self._queue: dict[asyncio.Future[None], Ticket] = {}  # by arrival

    @property
    def num_in_engine(self) -> int:
        """Number of turns in the engine."""
        return self._num_in_engine

    @property
    def num_owners(self) -> int:
        """Number of owners with turns in flight."""
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Number of turns in the queue."""
        return self._num_waiting

    def in_flight(self, owner: str) -> int:
        """Return the number of turns of a key, waiting or running."""
        return self._in_flight.get(owner, 0)

    def check_ready(self) -> None:
        """Raise ApiError 503 unless the engine accepts turns."""
        state = self._engine.state
        if state != "ready":
            raise overloaded(_STATES[state], self.retry_after_s())

    async def enter(
        self, owner: str, num_turns: int = 1, num_tokens: int = 0, max_tokens: int | None = None
    ) -> Ticket:
        """Return a ticket for turns that are submitted together, waiting up to `queue_timeout_s` for it.

        Args:
          owner: the key owner of the turns.
          num_turns: number of turns.
          num_tokens: estimated number of prompt tokens, all turns together.
          max_tokens: limit of each reply; None if the client gave no limit.

        Raises ApiError 400 for more turns than fit at all, 429 if the key has too many, and 503 if the queue
        is full, the wait takes too long, or the engine accepts no turns.
        """
        ticket = self.enter_now(owner, num_turns, num_tokens, max_tokens)
        if ticket is None:
            ticket = Ticket(self, owner, num_turns, num_tokens, max_tokens, self._now_s())
            self._count(ticket, 1)
            await self._wait(ticket)
        return ticket

    def enter_now(
        self, owner: str, num_turns: int = 1, num_tokens: int = 0, max_tokens: int | None = None
    ) -> Ticket | None:
        """Return a ticket as `enter` does, or None if the turns would have to wait."""
        self.check_ready()
        self._check_possible(num_turns)
        most = self._settings.max_in_flight_per_key
        if self._has_keys and self.in_flight(owner) + num_turns > most:
            sentence = f"A key may have {most} turns at a time; wait for one of them."
            raise rate_limited(sentence, self.retry_after_s())
        if not self._queue and self._has_room(num_turns):
            ticket = Ticket(self, owner, num_turns, num_tokens, max_tokens, self._now_s())
            self._num_in_engine += num_turns
            self._count(ticket, 1)
            return ticket
        max_waiting = self._settings.queue_per_running * self._engine.info.max_num_running
        # A request that exceeds the limit by itself is accepted if the queue is empty.
        if self._num_waiting and self._num_waiting + num_turns > max_waiting:
            raise self._overloaded("The queue is full; try again later.")
        return None

    def retry_after_s(self) -> int:
        """Return the expected seconds, 1 to 30, until the turns that are running or waiting are done."""
        if not self._tickets:
            return 1
        rate = self.rate.per_second()
        if rate > 0:
            reply_len = sum(self._reply_lens) / max(1, len(self._reply_lens))
            expected_s = sum(ticket.num_expected_tokens(reply_len) for ticket in self._tickets) / rate
        else:  # no recent tokens: assume that the oldest turn needs as long again as it has taken
            expected_s = self._now_s() - next(iter(self._tickets)).entered_s
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(expected_s)))

    # Private methods

    def _overloaded(self, sentence: str) -> ApiError:
        return overloaded(sentence, self.retry_after_s())

    def _check_possible(self, num_turns: int) -> None:
        """Raise ApiError 400 for a request that can never fit; it would block the queue forever."""
        most = self._max_in_engine()
        if self._has_keys:
            most = min(most, self._settings.max_in_flight_per_key)
        if num_turns > most:
            sentence = f"The request asks for {num_turns} turns, but must ask for at most {most}."
            raise ApiError(400, "invalid_value", sentence)

    def _max_in_engine(self) -> int:
        """Return the turn limit. A few turns wait in the engine, so that the next step fills a free slot."""
        most = self._engine.info.max_num_running
        return most + max(8, most // 4)

    def _has_room(self, num_turns: int) -> bool:
        return self._num_in_engine + num_turns <= self._max_in_engine()

    def _count(self, ticket: Ticket, sign: int) -> None:
        left = self.in_flight(ticket.owner) + sign * ticket.num_turns
        if sign > 0:
            self._tickets[ticket] = None
        else:
            del self._tickets[ticket]
        if left:
            self._in_flight[ticket.owner] = left
        else:
            del self._in_flight[ticket.owner]

    async def _wait(self, ticket: Ticket) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue[turn] = ticket
        self._num_waiting += ticket.num_turns
        try:
            async with asyncio.timeout(self._settings.queue_timeout_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # the ticket was issued at the same moment
                ticket.leave()
            else:
                self._remove_waiting(turn)
                self._admit_waiting()
            if isinstance(error, TimeoutError):
                waited = f"{self._settings.queue_timeout_s:g}"
                raise self._overloaded(
                    f"The request waited {waited} s in the queue; try again later."
                ) from None
            raise
        try:
            self.check_ready()  # the engine may have stopped meanwhile
        except ApiError:
            ticket.leave()
            raise

    def _leave(self, ticket: Ticket, num_done_tokens: int, reply_lens: Iterable[int]) -> None:
        self._num_in_engine -= ticket.num_turns
        self._count(ticket, -1)
        self._reply_lens.extend(reply_lens)
        if num_done_tokens:
            self.rate.add(num_done_tokens)
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        for turn, ticket in list(self._queue.items()):
            if turn.cancelled():  # cancelled, but `_wait` has not run yet
                self._remove_waiting(turn)
                continue
            if not self._has_room(ticket.num_turns):
                return
            del self._queue[turn]
            self._num_waiting -= ticket.num_turns
            self._num_in_engine += ticket.num_turns
            turn.set_result(None)

    def _remove_waiting(self, turn: asyncio.Future[None]) -> None:
        """Remove an entry whose request no longer waits from the queue."""
        ticket = self._queue.pop(turn, None)
        if ticket is not None:
            self._num_waiting -= ticket.num_turns
            self._count(ticket, -1)


class BodyBudget:
    """The byte budget for bodies of one server. Used by the event loop's thread only."""

    def __init__(self, settings: ServerSettings) -> None:
        self._max_num_bytes = MAX_SIZE_BODIES * settings.max_body_bytes
        self._has_keys = settings.api_keys_file is not None  # without keys all clients are one owner
        self._by_owner: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Number of bytes that all owners hold now."""
        return self._by_owner.total()

    def take(self, owner: str, num_bytes: int) -> None:
        """Reserve bytes for an owner; raise ApiError 429 beyond the key's share, 503 beyond the total."""
        most = self._max_num_bytes // KEY_SHARE_DIVISOR
        if self._has_keys and self._by_owner[owner] + num_bytes > most:
            raise rate_limited(f"A key may have {most} bytes of bodies at a time; wait for a response.", 1)
        if self.num_bytes + num_bytes > self._max_num_bytes:
            raise overloaded("Too many long bodies are being read; try again later.", 1)
        self._by_owner[owner] += num_bytes

    def give_back(self, owner: str, num_bytes: int) -> None:
        """Release bytes that `take` has counted for an owner."""
        self._by_owner[owner] -= num_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner]


class HeldBody:
    """The bytes that one request holds; a context manager that releases them."""

    def __init__(self, budget: BodyBudget, owner: str) -> None:
        self._budget = budget
        self._owner = owner
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Reserve more bytes for this request; raise the errors of `BodyBudget.take`."""
        self._budget.take(self._owner, num_bytes)
        self._num_bytes += num_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.give_back(self._owner, self._num_bytes)
