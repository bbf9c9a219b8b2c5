"""Users in real time, who send each turn when it is due, whatever the server does.

Owns: the users' thread, the token ids they send, and how late they were.
Does not know: servers, or who sends which turn when (`pensieve_lab.workload.Client`, shared with the
simulator).
"""

from __future__ import annotations

import math
import queue
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import numpy as np

from pensieve_lab.serving.clock import RunClock
from pensieve_lab.workload import Answer, Client, UserTurn

_FIRST_ID = 3  # smaller ids are special tokens in most vocabularies
_MAX_WAIT_S = 1.0  # interval between checks that the thread is alive


class Prompts:
    """Token ids of prompts, a function of seed, conversation and turn; the same for every system."""

    def __init__(self, vocab_size: int, *seed: int) -> None:
        """Draw ids from 3 to `vocab_size` - 1."""
        self._vocab_size = vocab_size
        self._seed = seed

    def of_turn(self, turn: UserTurn) -> list[int]:
        """Return the ids that a turn adds to its conversation."""
        return self._draw(turn.conversation_id, turn.turn_index, turn.prompt_tokens)

    def of_history(self, conversation_id: str, num_tokens: int) -> list[int]:
        """Return the ids of a conversation's history before the run, answers included."""
        return self._draw(conversation_id, 0, num_tokens)

    def _draw(self, conversation_id: str, index: int, num_tokens: int) -> list[int]:
        random = np.random.default_rng((*self._seed, zlib.crc32(conversation_id.encode()), index))
        ids: list[int] = random.integers(_FIRST_ID, self._vocab_size, num_tokens).tolist()
        return ids


class Lag(NamedTuple):
    """Turn that was due at `due_s` and was handed over `lag_s` later."""

    due_s: float
    lag_s: float


class ServingClient(Protocol):
    """Source of a server's turns, used from one thread; users are active while it is entered.

    Attributes:
      lags: lag of every turn that was handed over.
    """

    lags: list[Lag]

    @property
    def num_refused(self) -> int:
        """Sessions that ended early because their next turn exceeded the context."""
        ...

    @property
    def done(self) -> bool:
        """Whether every turn was taken and answered."""
        ...

    def take(self) -> list[UserTurn]:
        """Return the turns sent since the last call, without waiting."""
        ...

    def wait(self, until_s: float) -> None:
        """Block until a turn was sent, all is done, or `until_s` has passed; it may return early."""
        ...

    def answer(self, answer: Answer) -> None:
        """Give an answer to its user."""
        ...

    def __enter__(self) -> Self:
        """Activate the users; the run's clock must have started."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Deactivate the users, who send nothing more."""
        ...


class InlineClient:
    """Users without a thread of their own, for closed loops and for tests in virtual time.

    A turn that falls due during a step is sent after it. In a closed loop no turn does: turns follow answers.
    """

    def __init__(self, users: Client, prompts: Prompts, clock: RunClock) -> None:
        self.lags: list[Lag] = []
        self._users = users
        self._prompts = prompts
        self._clock = clock
        self._num_unanswered = 0

    @property
    def num_refused(self) -> int:
        return self._users.num_refused

    @property
    def done(self) -> bool:
        return not self._num_unanswered and math.isinf(self._users.next_s)

    def take(self) -> list[UserTurn]:
        found = []
        while self._users.next_s <= self._clock.now():
            turn = self._users.take()
            turn.token_ids = self._prompts.of_turn(turn)
            found.append(turn)
            self.lags.append(Lag(turn.arrival_s, self._clock.now() - turn.arrival_s))
        self._num_unanswered += len(found)
        return found

    def wait(self, until_s: float) -> None:
        self._clock.sleep_until(min(self._users.next_s, until_s))

    def answer(self, answer: Answer) -> None:
        self._num_unanswered -= 1
        self._users.receive(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: there is no thread to stop."""


class ThreadedClient:
    """Users in their own thread, who never wait for the server, for open loops.

    The thread sleeps until a turn is due or an answer arrives. Both directions use queues, so the threads
    share nothing but the interpreter lock.
    """

    def __init__(self, users: Client, prompts: Prompts, clock: RunClock) -> None:
        self.lags: list[Lag] = []
        self._users = users
        self._prompts = prompts
        self._clock = clock
        self._sent: queue.SimpleQueue[UserTurn | None] = queue.SimpleQueue()  # None: no more turns
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()  # None: stop
        self._ready: list[UserTurn] = []
        self._done = False

    @property
    def num_refused(self) -> int:
        return self._users.num_refused

    @property
    def done(self) -> bool:
        return self._done and not self._ready

    def take(self) -> list[UserTurn]:
        """Return the turns sent since the last call; raises the error that ended the users' thread early."""
        found, self._ready = self._ready, []
        while not self._sent.empty():
            self._note(self._sent.get(), found)
        self._check_thread()
        return found

    def wait(self, until_s: float) -> None:
        left_s = until_s - self._clock.now()
        if left_s <= 0 or self._done:
            return
        try:
            self._note(self._sent.get(timeout=min(left_s, _MAX_WAIT_S)), self._ready)
        except queue.Empty:
            self._check_thread()

    def answer(self, answer: Answer) -> None:
        self._answers.put(answer)

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="users")
        self._thread = self._pool.submit(self._live)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the users' thread and wait for it."""
        self._answers.put(None)
        self._pool.shutdown()

    def _note(self, sent: UserTurn | None, turns: list[UserTurn]) -> None:
        if sent is None:
            self._done = True
        else:
            turns.append(sent)

    def _check_thread(self) -> None:
        if not self._done and self._thread.done():
            self._thread.result()

    def _live(self) -> None:
        """Send what is due, and wait for the next turn's time or an answer; runs in the thread."""
        users, clock, num_unanswered = self._users, self._clock, 0
        while num_unanswered or not math.isinf(users.next_s):
            while users.next_s <= clock.now():
                turn = users.take()
                turn.token_ids = self._prompts.of_turn(turn)
                self._sent.put(turn)
                self.lags.append(Lag(turn.arrival_s, clock.now() - turn.arrival_s))
                num_unanswered += 1
            left_s = users.next_s - clock.now()
            try:
                answer = self._answers.get(timeout=None if math.isinf(left_s) else max(left_s, 0.0))
            except queue.Empty:
                continue
            if answer is None:
                return
            users.receive(answer)
            num_unanswered -= 1
        self._sent.put(None)
