"""Admission control: how many turns the server accepts at a time, and in which order.

Owns: permits for turns in the engine and in the queue before it, each key's share of them, and the estimate
of Retry-After.
Does not know: what was charged before a turn has a permit (`server.http.ledger`), the engine beyond its state
and size, HTTP beyond the errors 429 and 503. Called by `server.turns.run` and the request handlers.

The engine gets as many turns as it can run, and a few more so that none of its slots stays empty. The other
turns wait here, because waiting here can be cancelled. The keys that wait are served in turn, by the tokens
of their turns. Each key has a queue of its own, so one key's queue is never full with turns of others.
While several keys are active, some slots of the engine are left for keys that have no turn in it. Such a
turn then starts with the next step, instead of after a reply to another key.
Retry-After is the expected time for the tokens of all admitted and waiting turns at the recent token rate:
the prompt tokens, and replies as long as recent ones.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final, Self

from pensieve_jax.server.async_engine import EngineService
from pensieve_jax.server.fair_queue import FairQueue
from pensieve_jax.server.http.errors import ApiError, overloaded, rate_limited
from pensieve_jax.server.http.settings import ServerSettings

MAX_RETRY_AFTER_S: Final = 30
_RATE_WINDOW_S: Final = 30.0
_NUM_RECENT_REPLIES: Final = 64
_ACTIVE_S: Final = 60.0  # a key is active for so long after its last turn
_SLOTS_PER_FREE: Final = 16  # slots per slot that is left for keys without turns in the engine
_MIN_SLOTS: Final = 16  # engines with fewer slots leave none
_STATES: Final = {
    "starting": "The engine is starting; try again soon.",
    "draining": "The server is shutting down and accepts no new turns.",
    "dead": "The engine stopped; it restarts, or the server shuts down.",
}


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


class TurnPermit:
    """Permission for one request's turns, from `TurnAdmission.enter` until `leave`; a context manager.

    Attributes:
      owner: the key owner of the turns.
      num_turns: number of turns.
      num_tokens: estimated number of prompt tokens.
      max_tokens: limit of each reply; None if the client gave no limit.
      entered_s: when the request came.
      cost: tokens that its owner was charged in the queue; None if it did not wait.
    """

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
        self.cost: float | None = None
        self._admission = admission
        self._left = False

    def num_expected_tokens(self, reply_len: float) -> float:
        """Estimate the tokens of prompts and replies, for replies of `reply_len` tokens or their limit."""
        if self.max_tokens is not None:
            reply_len = min(reply_len, self.max_tokens)
        return self.num_tokens + self.num_turns * reply_len

    def leave(self, num_done_tokens: int = 0, reply_lens: Iterable[int] = ()) -> None:
        """Return the permit; further calls do nothing.

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
    """The permits of one server. Used by the event loop's thread only."""

    def __init__(self, engine: EngineService, settings: ServerSettings, now_s: Callable[[], float]) -> None:
        """`now_s` is a clock in seconds."""
        self._engine = engine
        self._settings = settings
        self.rate = TokenRate(now_s)
        self._now_s = now_s
        self._reply_lens: deque[int] = deque(maxlen=_NUM_RECENT_REPLIES)
        self._num_in_engine = 0
        self._num_in_engine_of: Counter[str] = Counter()  # by owner, without zeros
        self._active_until_s: dict[str, float] = {}  # by owner, by time
        self._num_waiting_of: Counter[str] = Counter()  # by owner, without zeros
        self._permits: dict[TurnPermit, None] = {}  # issued or waited for, by arrival
        self._has_keys = settings.api_keys_file is not None  # without keys all clients are one owner
        self._in_flight: dict[str, int] = {}
        self._queue = FairQueue[asyncio.Future[None]]()
        self._waiting: dict[asyncio.Future[None], TurnPermit] = {}  # the permits of the queue's entries

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
        return self._num_waiting_of.total()

    def in_flight(self, owner: str) -> int:
        """Return the number of turns of a key, waiting or running."""
        return self._in_flight.get(owner, 0)

    def has_share(self, owner: str, num_turns: int = 1) -> bool:
        """Return whether a key may have `num_turns` more now. Without keys, any number."""
        return not self._has_keys or self.in_flight(owner) + num_turns <= self._settings.max_in_flight_per_key

    def check_ready(self) -> None:
        """Raise ApiError 503 unless the engine accepts turns."""
        state = self._engine.state
        if state != "ready":
            raise overloaded(_STATES[state], self.retry_after_s())

    async def enter(
        self, owner: str, num_turns: int = 1, num_tokens: int = 0, max_tokens: int | None = None
    ) -> TurnPermit:
        """Return a permit for turns that are submitted together, waiting up to `queue_timeout_s` for it.

        Args:
          owner: the key owner of the turns.
          num_turns: number of turns.
          num_tokens: estimated number of prompt tokens, all turns together.
          max_tokens: limit of each reply; None if the client gave no limit.

        Raises ApiError 400 for more turns than fit at all, 429 if the key has too many, and 503 if the key's
        queue is full, the wait takes too long, or the engine accepts no turns.
        """
        permit = self.enter_now(owner, num_turns, num_tokens, max_tokens)
        if permit is None:
            permit = TurnPermit(self, owner, num_turns, num_tokens, max_tokens, self._now_s())
            self._count(permit, 1)
            await self._wait(permit)
        return permit

    def enter_now(
        self, owner: str, num_turns: int = 1, num_tokens: int = 0, max_tokens: int | None = None
    ) -> TurnPermit | None:
        """Return a permit as `enter` does, or None if the turns would have to wait."""
        self.check_ready()
        self._check_possible(num_turns)
        if not self.has_share(owner, num_turns):
            most = self._settings.max_in_flight_per_key
            sentence = f"A key may have {most} turns at a time; wait for one of them."
            raise rate_limited(sentence, self.retry_after_s())
        self._note_active(owner)
        passes = self._has_none if self._leaves_slots and self._has_none(owner) else None
        if self._queue.first(passes) is None and self._has_room(owner, num_turns):
            permit = TurnPermit(self, owner, num_turns, num_tokens, max_tokens, self._now_s())
            self._count_in_engine(permit, 1)
            self._count(permit, 1)
            return permit
        max_waiting = self._settings.queue_per_running * self._engine.info.max_num_running
        # A request that exceeds the limit by itself is accepted if the queue is empty.
        num_waiting = self._num_waiting_of[owner]
        if num_waiting and num_waiting + num_turns > max_waiting:
            raise self._overloaded("The queue is full; try again later.")
        return None

    def retry_after_s(self) -> int:
        """Return the expected seconds, 1 to 30, until the turns that are running or waiting are done."""
        if not self._permits:
            return 1
        rate = self.rate.per_second()
        if rate > 0:
            expected_s = sum(self._num_expected_tokens(permit) for permit in self._permits) / rate
        else:  # no recent tokens: assume that the oldest turn needs as long again as it has taken
            expected_s = self._now_s() - next(iter(self._permits)).entered_s
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(expected_s)))

    # Private methods

    def _num_expected_tokens(self, permit: TurnPermit) -> float:
        reply_len = sum(self._reply_lens) / max(1, len(self._reply_lens))
        return permit.num_expected_tokens(reply_len)

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

    def _has_room(self, owner: str, num_turns: int) -> bool:
        return self._num_in_engine + num_turns <= self._max_for(owner)

    def _max_for(self, owner: str) -> int:
        """Return how many turns may be in the engine after one of this owner comes in."""
        if not self._leaves_slots or self._has_none(owner):
            return self._max_in_engine()
        num_slots = self._engine.info.max_num_running
        return num_slots - max(1, num_slots // _SLOTS_PER_FREE)

    @property
    def _leaves_slots(self) -> bool:
        """Whether slots are left for owners without turns in the engine."""
        return len(self._active_until_s) > 1 and self._engine.info.max_num_running >= _MIN_SLOTS

    def _has_none(self, owner: str) -> bool:
        return not self._num_in_engine_of[owner]

    def _note_active(self, owner: str) -> None:
        now_s = self._now_s()
        self._active_until_s.pop(owner, None)
        self._active_until_s[owner] = now_s + _ACTIVE_S
        while self._active_until_s[oldest := next(iter(self._active_until_s))] <= now_s:
            del self._active_until_s[oldest]

    def _count_in_engine(self, permit: TurnPermit, sign: int) -> None:
        self._num_in_engine += sign * permit.num_turns
        self._num_in_engine_of[permit.owner] += sign * permit.num_turns
        if not self._num_in_engine_of[permit.owner]:
            del self._num_in_engine_of[permit.owner]

    def _count(self, permit: TurnPermit, sign: int) -> None:
        left = self.in_flight(permit.owner) + sign * permit.num_turns
        if sign > 0:
            self._permits[permit] = None
        else:
            del self._permits[permit]
        if left:
            self._in_flight[permit.owner] = left
        else:
            del self._in_flight[permit.owner]

    async def _wait(self, permit: TurnPermit) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        permit.cost = self._num_expected_tokens(permit)
        self._queue.add(permit.owner, turn, permit.cost)
        self._waiting[turn] = permit
        self._count_waiting(permit, 1)
        try:
            async with asyncio.timeout(self._settings.queue_timeout_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # the permit was issued at the same moment
                permit.leave()
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
            permit.leave()
            raise

    def _leave(self, permit: TurnPermit, num_done_tokens: int, reply_lens: Iterable[int]) -> None:
        self._count_in_engine(permit, -1)
        self._count(permit, -1)
        self._note_active(permit.owner)
        self._reply_lens.extend(reply_lens)
        if num_done_tokens:
            self.rate.add(num_done_tokens)
        if permit.cost is not None:
            self._queue.charge(permit.owner, num_done_tokens - permit.cost)
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while (self._leaves_slots and self._admit_next(self._has_none)) or self._admit_next():
            pass

    def _admit_next(self, may_leave: Callable[[str], bool] | None = None) -> bool:
        """Admit or forget the next turn of these owners; return False if none waits or none fits."""
        turn = self._queue.first(may_leave)
        if turn is None:
            return False
        permit = self._waiting[turn]
        if turn.cancelled():  # cancelled, but `_wait` has not run yet
            self._remove_waiting(turn)
            return True
        if not self._has_room(permit.owner, permit.num_turns):
            return False
        self._queue.take(may_leave)
        del self._waiting[turn]
        self._count_waiting(permit, -1)
        self._count_in_engine(permit, 1)
        turn.set_result(None)
        return True

    def _remove_waiting(self, turn: asyncio.Future[None]) -> None:
        """Remove an entry whose request no longer waits from the queue."""
        permit = self._waiting.pop(turn, None)
        if permit is not None:
            self._queue.remove(permit.owner, turn)
            self._count_waiting(permit, -1)
            self._count(permit, -1)

    def _count_waiting(self, permit: TurnPermit, sign: int) -> None:
        self._num_waiting_of[permit.owner] += sign * permit.num_turns
        if not self._num_waiting_of[permit.owner]:
            del self._num_waiting_of[permit.owner]
