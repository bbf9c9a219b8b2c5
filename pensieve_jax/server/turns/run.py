"""The turns of one request, from admission to their end.

Owns: taking a permit before turns start and returning it afterwards, the fallbacks when the engine no longer
has the parent turn, cancelling turns when their request ends, and their metrics.
Does not know: what turns are for, request schemas, or how a reply is written.
Called by the handlers of `server.openai`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from pensieve_jax.core.errors import UnknownTurnError
from pensieve_jax.core.outputs import Output
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.server.async_engine import AsyncDelta, AsyncTurn, EngineService
from pensieve_jax.server.context.resolver import Memory, ResolvedContext
from pensieve_jax.server.http.admission import TurnPermit
from pensieve_jax.server.http.errors import ApiError, overloaded
from pensieve_jax.server.http.ledger import Ticket
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.metrics import Metrics, TurnTimes
from pensieve_jax.server.workers import WorkEstimate

if TYPE_CHECKING:
    from pensieve_jax.server.tracing import Tracing

_ENTRY_CHARACTERS: Final = 10
"""Cost of one log-probability in a response, in characters of text."""
_ENTRY_BYTES: Final = 128
"""Memory of one log-probability that was not read; its JSON takes as much."""
_FREE_BYTES: Final = 2**18
"""What a stream may have unread without a charge, so that short delays of its client never end it."""
type Start = Callable[[], Awaitable[Sequence[AsyncTurn]]]
type Prepared = tuple[ResolvedContext, Sequence[TurnSpec]]
type RunCpu = Callable[[Callable[[Memory], Prepared], Memory], Awaitable[Prepared]]


async def run_turns(
    services: Services,
    owner: str,
    start: Start,
    *,
    num_turns: int = 1,
    num_tokens: int = 0,
    max_tokens: int | None = None,
    num_shared: int = 1,
    wait: Callable[[Awaitable[TurnPermit]], Awaitable[TurnPermit]] | None = None,
) -> RunningTurns:
    """Wait for admission, then start the turns.

    Args:
      services: the server's services.
      owner: the key owner whose share the turns count against.
      start: submits the turns and waits until the engine accepts them; may raise.
      num_turns: number of turns that `start` submits.
      num_tokens: approximate number of prompt tokens, all turns together.
      max_tokens: limit of each reply if the client gave one.
      num_shared: number of consecutive turns that reply to the same prompt, which counts once.
      wait: wraps the wait for a permit, such as `HttpRequest.unless_gone`. It is called only if a permit is
        not free at once, so most requests do not pay for it.

    Raises ApiError 429 and 503, and what `start` raises. Cancelling it while it waits leaves no state behind.
    """
    began_s = time.perf_counter()
    permit = services.limits.enter_now(owner, num_turns, num_tokens, max_tokens)
    if permit is None:
        entering = services.limits.enter(owner, num_turns, num_tokens, max_tokens)
        permit = await (entering if wait is None else wait(entering))
    services.metrics.waited(time.perf_counter() - began_s)
    try:
        turns = await start()
    except BaseException:
        permit.leave()
        raise
    accepted_s = time.perf_counter()
    timed = [
        TimedTurn(
            turn,
            services.metrics,
            TurnTimes(began_s, accepted_s),
            owner=owner,
            counts_context=index % num_shared == 0,
        )
        for index, turn in enumerate(turns)
    ]
    return RunningTurns(timed, permit, services.tracing, services.ledger.ticket(owner))


async def start_turns(
    engine: EngineService,
    find: Callable[[Memory], ResolvedContext],
    specs_of: Callable[[ResolvedContext], Sequence[TurnSpec]],
    *,
    run_cpu: RunCpu,
) -> tuple[ResolvedContext, list[AsyncTurn]]:
    """Submit the turns of a context and wait until the engine accepts them, all or none.

    Args:
      engine: the engine that runs them.
      find: resolves the context. When the engine does not know the parent that it found, it is called again
        with the next, narrower `Memory`.
      specs_of: returns the turns to submit; several turns must be siblings, for several replies.
      run_cpu: runs `find` and `specs_of` without blocking the event loop: a request may have a million ids
        to check, or tools whose grammar has to be written.

    Raises what `find` and the engine raise; UnknownTurnError only if no fallback finds another parent.
    """

    def prepare(memory: Memory) -> Prepared:
        resolved = find(memory)
        return resolved, specs_of(resolved)

    unknown: UnknownTurnError | None = None
    for memory in Memory:
        resolved, specs = await run_cpu(prepare, memory)
        turns = engine.submit_all(specs)
        try:
            for turn in turns:
                await turn.accepted()
            return resolved, turns
        except UnknownTurnError as error:
            unknown = error
            if resolved.parent is not None:
                resolved.index.forget(resolved.node.owner, resolved.parent.turn_id)
    assert unknown is not None
    raise unknown


def takes_long(outputs: Sequence[Output]) -> bool:
    """Return whether a response to these outputs takes long to make, so that a thread should make it."""
    num_characters = sum(len(output.text) for output in outputs)
    num_entries = sum(1 + len(one.top) for output in outputs for one in output.logprobs or ())
    is_scored = any(output.prompt_logprobs is not None for output in outputs)
    return is_scored or WorkEstimate(num_characters + _ENTRY_CHARACTERS * num_entries).is_long


class ReplyTurn(Protocol):
    """A turn that runs, or is read from the history."""

    @property
    def output(self) -> Output | None:
        """The result, once the turn has succeeded; None before."""
        ...

    def __aiter__(self) -> AsyncIterator[AsyncDelta]:
        """Iterate over the deltas; raise what the turn failed with."""
        ...

    async def __anext__(self) -> AsyncDelta:
        """Return the next delta."""
        ...


class ReplyTurns(Protocol):
    """The turns of one request. The caller must call `close` on every path."""

    @property
    def turns(self) -> Sequence[ReplyTurn]:
        """The turns, in the order of their replies."""
        ...

    async def results(self) -> list[Output]:
        """Wait for all turns; raise the first failure."""
        ...

    def charge_unread(self) -> None:
        """Charge what the client of a stream has not read, and stop the turns if it is too much."""
        ...

    async def close(self) -> None:
        """Cancel the turns that have not ended."""
        ...


class TimedTurn:
    """An engine turn that records metrics as its tokens arrive.

    Attributes:
      times: when the request began, the engine accepted it, its first token came, and it ended.
      num_tokens: tokens of the reply that have arrived.
    """

    def __init__(
        self,
        turn: AsyncTurn,
        metrics: Metrics,
        times: TurnTimes,
        *,
        owner: str = "",
        counts_context: bool = True,
    ) -> None:
        """`turn` must be accepted by the engine; see `Metrics.finished` for `counts_context`."""
        self.times = times
        self.num_tokens = 0
        self._turn = turn
        self._metrics = metrics
        self._deltas = aiter(turn)
        self._latest_s = 0.0
        self._is_counted = False
        self._owner = owner
        self._counts_context = counts_context
        self._stopped: ApiError | None = None

    @property
    def turn_id(self) -> str:
        return self._turn.turn_id

    @property
    def output(self) -> Output | None:
        """The result, once the turn has succeeded; None before."""
        return self._turn.output

    @property
    def num_unread_entries(self) -> int:
        """Number of log-probabilities that were not read; see `AsyncTurn`."""
        return self._turn.num_unread_entries

    def __aiter__(self) -> AsyncIterator[AsyncDelta]:
        return self

    async def __anext__(self) -> AsyncDelta:
        """Return the next delta; raise what the turn failed with, and ApiError if the server cancelled it."""
        try:
            delta = await anext(self._deltas)
        except StopAsyncIteration:
            if self._stopped is None:
                self._count_end()
                raise
        if self._stopped is not None:
            raise self._stopped
        if self._latest_s:
            self._metrics.delta(len(delta.token_ids))
        self._count(delta)
        return delta

    async def result(self) -> Output:
        """Wait for the end; raise what the turn failed with, and ApiError if the server cancelled it."""
        async for delta in self._deltas:  # the arrival times count for the metrics here too
            self._count(delta)
        self._count_end()
        assert self._turn.output is not None
        return self._turn.output

    async def cancel(self) -> None:
        """Cancel the turn and undo its effects, unless it has ended."""
        if self._turn.output is None:
            await self._turn.cancel()

    async def stop(self, error: ApiError) -> None:
        """Cancel the turn; the next read of a delta raises `error`."""
        self._stopped = error
        await self.cancel()

    def _count(self, delta: AsyncDelta) -> None:
        now_s = time.perf_counter()
        self.num_tokens += len(delta.token_ids)
        if self._latest_s:
            self._metrics.next_tokens(len(delta.token_ids), now_s - self._latest_s)
        else:
            self.times.first_token_s = now_s
            self._metrics.first_token(now_s - self.times.began_s)
        self._latest_s = now_s

    def _count_end(self) -> None:
        output = self._turn.output
        assert output is not None, "a turn ends with an output or raises"
        if output.finish_reason == "cancelled":
            raise overloaded("The server cancelled this turn before it was done; send it again.", 1)
        if not self._is_counted:
            self._is_counted = True
            self.times.ended_s = time.perf_counter()
            seconds = self.times.ended_s - self.times.began_s
            self._metrics.finished(output, seconds, owner=self._owner, counts_context=self._counts_context)


class RunningTurns:
    """The running turns of one request. The caller must call `close` on every path.

    Attributes:
      turns: in the order in which they were submitted.
    """

    def __init__(
        self, turns: Sequence[TimedTurn], permit: TurnPermit, tracing: Tracing | None, ticket: Ticket
    ) -> None:
        """Take over the turns.

        `permit` is their permit; `tracing` gets one report of the end of each turn; `ticket` is charged what
        was not read.
        """
        self.turns = turns
        self._ticket = ticket
        self._num_charged = 0
        self._stopping: list[asyncio.Future[None]] = []
        self._permit = permit
        self._tracing = tracing

    async def results(self) -> list[Output]:
        """Wait for all turns; raise the first failure."""
        if len(self.turns) == 1:
            return [await self.turns[0].result()]
        waiting = [asyncio.ensure_future(turn.result()) for turn in self.turns]
        try:
            return await asyncio.gather(*waiting)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)

    def charge_unread(self) -> None:
        """Charge the log-probabilities that the client has not read; stop the turns if there are too many.

        Text and ids are not charged: the limit of the context bounds them.
        """
        num_unread = sum(turn.num_unread_entries for turn in self.turns)
        num_bytes = max(0, _ENTRY_BYTES * num_unread - _FREE_BYTES)
        if num_bytes <= self._num_charged or self._stopping:
            return
        try:
            self._ticket.charge("answer_bytes", num_bytes - self._num_charged)
            self._num_charged = num_bytes
        except ApiError as error:
            self._stopping = [asyncio.ensure_future(turn.stop(error)) for turn in self.turns]

    async def close(self) -> None:
        """Cancel the turns that have not ended, and return the permit."""
        outputs = [turn.output for turn in self.turns]
        try:
            if self._stopping:
                await asyncio.wait(self._stopping)
            for turn, output in zip(self.turns, outputs, strict=True):
                if output is None:
                    await turn.cancel()
        finally:
            self._ticket.close()
            self._trace()
            ended = [output for output in outputs if output is not None]
            num_tokens = sum(output.usage.prompt_tokens + output.usage.output_tokens for output in ended)
            # A cancelled turn has no usage. What it did counts, so that cancelling saves no owner its share.
            cut = [turn for turn, output in zip(self.turns, outputs, strict=True) if output is None]
            num_tokens += sum(turn.num_tokens for turn in cut)
            num_tokens += self._permit.num_tokens * len(cut) // self._permit.num_turns
            self._permit.leave(
                num_tokens,
                # Cancelled replies are cut short, so they say nothing about typical reply lengths.
                [output.usage.output_tokens for output in ended if output.finish_reason != "cancelled"],
            )

    def _trace(self) -> None:
        tracing, self._tracing = self._tracing, None
        if tracing is not None:
            for turn in self.turns:
                turn.times.ended_s = turn.times.ended_s or time.perf_counter()
                tracing.ended(turn.turn_id, turn.times, turn.output)


async def merged(turns: Sequence[ReplyTurn]) -> AsyncGenerator[tuple[int, AsyncDelta | None]]:
    """Yield the deltas of several turns as they arrive, with the turn's index; None means that it has ended.

    At most one delta of each turn is requested ahead, so a turn merges its deltas while the client is slow.
    """
    if len(turns) == 1:
        async for delta in turns[0]:
            yield 0, delta
        yield 0, None
        return
    waiting = {asyncio.ensure_future(anext(turn, None)): index for index, turn in enumerate(turns)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                found = task.result()
                yield index, found
                if found is not None:
                    waiting[asyncio.ensure_future(anext(turns[index], None))] = index
    finally:
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)
