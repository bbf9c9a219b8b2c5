"""What the server takes on at a time: bytes of bodies and turns. The rest is told to come later.

Owns: the bytes of bodies from their first part until their requests are answered, in all and by key; places
in the engine and in the queue before it, a key's share of them; the rate of tokens and the length of replies.
Does not know: what bodies mean or how they are read, the engine beyond its state and size, HTTP beyond the
errors that say "later".

The engine gets as many turns as it can run, and some more so that a place never stands empty. The others wait
here, first come first served, where waiting can be ended. Retry-After is how long the tokens that are waited
for should take at the recent rate: those of the prompts, and replies as long as recent ones were.

Places for turns bound what the engine has. The budget of bodies bounds what is read, decoded and tokenized
before that.
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
_NUM_LATE_REPLIES: Final = 64
_STATES: Final = {
    "starting": "The engine is starting; try again soon.",
    "draining": "The server is about to end, and takes no more turns.",
    "dead": "The engine has ended; it is started again, or the server ends.",
}
NUM_LONGEST: Final = 32
"""So many bodies of the longest kind fit."""
KEYS_PART: Final = 4
"""One key may have one part in so many."""


class TokenRate:
    """Tokens a second over the last half minute."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        """`now_s` tells the time in seconds."""
        self._now_s = now_s
        self._began_s = now_s()
        self._counts: deque[tuple[float, int]] = deque()
        self._total = 0

    def add(self, num_tokens: int) -> None:
        """So many were computed or sampled just now."""
        self._counts.append((self._now_s(), num_tokens))
        self._total += num_tokens
        self._forget()

    def per_second(self) -> float:
        """0 while nothing is known."""
        self._forget()
        span_s = min(_RATE_WINDOW_S, self._now_s() - self._began_s)
        return self._total / span_s if span_s > 0 else 0.0

    def _forget(self) -> None:
        oldest_s = self._now_s() - _RATE_WINDOW_S
        while self._counts and self._counts[0][0] < oldest_s:
            self._total -= self._counts.popleft()[1]


class Ticket:
    """Room for some turns of one request, from `Limits.enter` until `leave`; a context manager."""

    def __init__(
        self,
        limits: Limits,
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
        self._limits = limits
        self._left = False

    def num_expected_tokens(self, reply_len: float) -> float:
        """Of prompts and replies, where a reply takes so many unless it must end before."""
        if self.max_tokens is not None:
            reply_len = min(reply_len, self.max_tokens)
        return self.num_tokens + self.num_turns * reply_len

    def leave(self, num_done_tokens: int = 0, reply_lens: Iterable[int] = ()) -> None:
        """Give it back; more than once is as good as once.

        `num_done_tokens` were computed meanwhile, and replies of these lengths have ended.
        """
        if not self._left:
            self._left = True
            self._limits._leave(self, num_done_tokens, reply_lens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()


class Limits:
    """The places of one server. Used by the event loop's thread only."""

    def __init__(self, engine: EngineService, settings: ServerSettings, now_s: Callable[[], float]) -> None:
        """`now_s` tells the time in seconds, for the rate."""
        self._engine = engine
        self._settings = settings
        self.rate = TokenRate(now_s)
        self._now_s = now_s
        self._reply_lens: deque[int] = deque(maxlen=_NUM_LATE_REPLIES)
        self._num_inside = 0
        self._num_waiting = 0
        self._places: dict[Ticket, None] = {}  # that somebody has or waits for, by arrival
        self._has_keys = settings.api_keys_file is not None  # without keys, nobody's share is another's loss
        self._in_flight: dict[str, int] = {}
        self._queue: dict[asyncio.Future[None], Ticket] = {}  # by arrival

    @property
    def num_inside(self) -> int:
        """Turns that the engine has."""
        return self._num_inside

    @property
    def num_owners(self) -> int:
        """Owners who have turns in flight."""
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Turns that wait here."""
        return self._num_waiting

    def in_flight(self, owner: str) -> int:
        """Turns that a key has, waiting or not."""
        return self._in_flight.get(owner, 0)

    def check_ready(self) -> None:
        """Raise ApiError 503 unless the engine takes turns."""
        state = self._engine.state
        if state != "ready":
            raise overloaded(_STATES[state], self.retry_after_s())

    async def enter(
        self, owner: str, num_turns: int = 1, num_tokens: int = 0, max_tokens: int | None = None
    ) -> Ticket:
        """Room for turns that are given to the engine together, now or within the time that they may wait.

        Args:
          owner: whose they are.
          num_turns: how many.
          num_tokens: of their prompts, as far as that is known.
          max_tokens: of each reply; None where the client gave no limit.

        Raises ApiError 400 for more turns than there is ever room for, 429 where the key has too many, 503
        where the queue is full, the wait too long, or the engine takes none.
        """
        place = self.enter_now(owner, num_turns, num_tokens, max_tokens)
        if place is None:
            place = Ticket(self, owner, num_turns, num_tokens, max_tokens, self._now_s())
            self._count(place, 1)
            await self._wait(place)
        return place

    def enter_now(
        self, owner: str, num_turns: int = 1, num_tokens: int = 0, max_tokens: int | None = None
    ) -> Ticket | None:
        """As `enter`, but None where there is a wait to begin."""
        self.check_ready()
        self._check_possible(num_turns)
        most = self._settings.max_in_flight_per_key
        if self._has_keys and self.in_flight(owner) + num_turns > most:
            sentence = f"A key may have {most} turns at a time; wait for one of them."
            raise rate_limited(sentence, self.retry_after_s())
        if not self._queue and self._has_room(num_turns):
            place = Ticket(self, owner, num_turns, num_tokens, max_tokens, self._now_s())
            self._num_inside += num_turns
            self._count(place, 1)
            return place
        most_waiting = self._settings.queue_per_running * self._engine.info.max_num_running
        # One that alone is more than that has its turn as well, when nobody else waits.
        if self._num_waiting and self._num_waiting + num_turns > most_waiting:
            raise self._overloaded("The queue is full; try again later.")
        return None

    def retry_after_s(self) -> int:
        """Whole seconds, 1 to 30, until what is waited for should be done."""
        if not self._places:
            return 1
        rate = self.rate.per_second()
        if rate > 0:
            reply_len = sum(self._reply_lens) / max(1, len(self._reply_lens))
            expected_s = sum(place.num_expected_tokens(reply_len) for place in self._places) / rate
        else:  # nothing has ended of late: what has taken so long will take as long again
            expected_s = self._now_s() - next(iter(self._places)).entered_s
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(expected_s)))

    # Inside

    def _overloaded(self, sentence: str) -> ApiError:
        return overloaded(sentence, self.retry_after_s())

    def _check_possible(self, num_turns: int) -> None:
        """What never fits would wait in vain, and keep everybody behind it waiting."""
        most = self._most_inside()
        if self._has_keys:
            most = min(most, self._settings.max_in_flight_per_key)
        if num_turns > most:
            sentence = f"The request is for {num_turns} turns, but must be for at most {most}."
            raise ApiError(400, "invalid_value", sentence)

    def _most_inside(self) -> int:
        """Some wait in the engine, so that a place that falls free is taken by the very next step."""
        most = self._engine.info.max_num_running
        return most + max(8, most // 4)

    def _has_room(self, num_turns: int) -> bool:
        return self._num_inside + num_turns <= self._most_inside()

    def _count(self, place: Ticket, sign: int) -> None:
        left = self.in_flight(place.owner) + sign * place.num_turns
        if sign > 0:
            self._places[place] = None
        else:
            del self._places[place]
        if left:
            self._in_flight[place.owner] = left
        else:
            del self._in_flight[place.owner]

    async def _wait(self, place: Ticket) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue[turn] = place
        self._num_waiting += place.num_turns
        try:
            async with asyncio.timeout(self._settings.queue_timeout_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # its place came in the same moment
                place.leave()
            else:
                self._give_up(turn)
                self._let_in()
            if isinstance(error, TimeoutError):
                waited = f"{self._settings.queue_timeout_s:g}"
                raise self._overloaded(f"No place fell free within {waited} s; try again later.") from None
            raise
        try:
            self.check_ready()  # it may have ended meanwhile
        except ApiError:
            place.leave()
            raise

    def _leave(self, place: Ticket, num_done_tokens: int, reply_lens: Iterable[int]) -> None:
        self._num_inside -= place.num_turns
        self._count(place, -1)
        self._reply_lens.extend(reply_lens)
        if num_done_tokens:
            self.rate.add(num_done_tokens)
        self._let_in()

    def _let_in(self) -> None:
        for turn, place in list(self._queue.items()):
            if turn.cancelled():  # whoever waited has not been told yet
                self._give_up(turn)
                continue
            if not self._has_room(place.num_turns):
                return
            del self._queue[turn]
            self._num_waiting -= place.num_turns
            self._num_inside += place.num_turns
            turn.set_result(None)

    def _give_up(self, turn: asyncio.Future[None]) -> None:
        """Nobody waits for this place any more."""
        place = self._queue.pop(turn, None)
        if place is not None:
            self._num_waiting -= place.num_turns
            self._count(place, -1)


class BodyBudget:
    """The budget of one server. Used by the event loop's thread only."""

    def __init__(self, settings: ServerSettings) -> None:
        self._most = NUM_LONGEST * settings.max_body_bytes
        self._has_keys = settings.api_keys_file is not None  # without keys, nobody's part is another's loss
        self._by_owner: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Bytes that all owners hold now."""
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
        """Release bytes that `take` has counted for an owner."""
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
        """Hold more bytes for this request; raise the errors of `BodyBudget.take`."""
        self._budget.take(self._owner, num_bytes)
        self._num_bytes += num_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.give_back(self._owner, self._num_bytes)
