"""The turns of one request, from their place in the queue to their end.

Owns: that a place is taken before and given back after, what is tried once an engine says that the turn
before is gone, that turns end with their request, and what is counted of them.
Does not know: what turns are for, schemas, or how a reply is written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from pensieve_jax.core.errors import UnknownTurnError
from pensieve_jax.core.outputs import Output
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.server.async_engine import AsyncDelta, AsyncTurn, EngineService
from pensieve_jax.server.context.resolver import Memory, ResolvedContext
from pensieve_jax.server.http.admission import Ticket
from pensieve_jax.server.http.errors import overloaded
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.metrics import Metrics, TurnTimes

if TYPE_CHECKING:
    from pensieve_jax.server.tracing import Tracing

type Start = Callable[[], Awaitable[Sequence[AsyncTurn]]]
type Think = Callable[[Callable[[Memory], ResolvedContext], Memory], Awaitable[ResolvedContext]]


async def run_turns(
    services: Services,
    owner: str,
    start: Start,
    *,
    num_turns: int = 1,
    num_tokens: int = 0,
    max_tokens: int | None = None,
    wait: Callable[[Awaitable[Ticket]], Awaitable[Ticket]] | None = None,
) -> RunningTurns:
    """Wait for a place, and start turns in it.

    Args:
      services: of the server.
      owner: whose turns they are.
      start: submits them and waits until they are accepted; may raise.
      num_turns: how many there will be.
      num_tokens: about how many their prompts have.
      max_tokens: the most of each reply, where the client gave a limit.
      wait: how a place is waited for, such as `Call.unless_gone`; most need not wait, nor pay for that.

    Raises ApiError 429 and 503, and what `start` raises. Cancelled while it waits, it leaves nothing behind.
    """
    began_s = time.perf_counter()
    place = services.limits.enter_now(owner, num_turns, num_tokens, max_tokens)
    if place is None:
        entering = services.limits.enter(owner, num_turns, num_tokens, max_tokens)
        place = await (entering if wait is None else wait(entering))
    services.metrics.waited(time.perf_counter() - began_s)
    try:
        turns = await start()
    except BaseException:
        place.leave()
        raise
    accepted_s = time.perf_counter()
    timed = [TimedTurn(turn, services.metrics, TurnTimes(began_s, accepted_s)) for turn in turns]
    return RunningTurns(timed, place, services.tracing)


async def start_turns(
    engine: EngineService,
    find: Callable[[Memory], ResolvedContext],
    specs_of: Callable[[ResolvedContext], Sequence[TurnSpec]],
    *,
    run_cpu: Think,
) -> tuple[ResolvedContext, list[AsyncTurn]]:
    """The turns of a context, accepted by the engine, all of them or none.

    Args:
      engine: where they run.
      find: resolves the context; which turns it may go on from is narrowed each time that the engine does not
        know the parent that was found.
      specs_of: the turns to submit; several only as siblings, for several replies.
      think: runs `find` where it keeps nobody else waiting.

    Raises what `find` and the engine raise; UnknownTurnError only where a context is bound to its parent.
    """
    unknown: UnknownTurnError | None = None
    for memory in Memory:
        resolved = await run_cpu(find, memory)
        turns = engine.submit_all(specs_of(resolved))
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


class TimedTurn:
    """A turn of an engine, whose tokens are counted as they come.

    Attributes:
      times: of what has happened to it.
    """

    def __init__(self, turn: AsyncTurn, metrics: Metrics, times: TurnTimes) -> None:
        """`times` of a turn that the engine has accepted."""
        self.times = times
        self._turn = turn
        self._metrics = metrics
        self._deltas = aiter(turn)
        self._latest_s = 0.0
        self._is_counted = False

    @property
    def turn_id(self) -> str:
        return self._turn.turn_id

    @property
    def output(self) -> Output | None:
        """The result, once the turn has ended well."""
        return self._turn.output

    def __aiter__(self) -> AsyncIterator[AsyncDelta]:
        return self

    async def __anext__(self) -> AsyncDelta:
        """What came since the last call; raises what the turn failed with, and ApiError if it was ended."""
        try:
            delta = await anext(self._deltas)
        except StopAsyncIteration:
            self._count_end()
            raise
        if self._latest_s:
            self._metrics.delta(len(delta.token_ids))
        self._count(delta)
        return delta

    async def result(self) -> Output:
        """Wait for the end; raises what the turn failed with, and ApiError if it was ended."""
        async for delta in self._deltas:  # when its tokens come counts here as well
            self._count(delta)
        self._count_end()
        assert self._turn.output is not None
        return self._turn.output

    async def cancel(self) -> None:
        """End it as if it had never been sent, unless it has ended."""
        if self._turn.output is None:
            await self._turn.cancel()

    def _count(self, delta: AsyncDelta) -> None:
        now_s = time.perf_counter()
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
            raise overloaded("The server ended this turn before it was done; send it again.", 1)
        if not self._is_counted:
            self._is_counted = True
            self.times.ended_s = time.perf_counter()
            self._metrics.finished(output, self.times.ended_s - self.times.began_s)


class RunningTurns:
    """Turns that run for one request; whoever has them calls `close`, whatever happens.

    Attributes:
      turns: in the order in which they were submitted.
    """

    def __init__(self, turns: Sequence[TimedTurn], place: Ticket, tracing: Tracing | None) -> None:
        """Of a place that they were given; `tracing` is told of their ends, once."""
        self.turns = turns
        self._place = place
        self._tracing = tracing

    async def results(self) -> list[Output]:
        """Wait for all of them; raises what the first of them failed with."""
        if len(self.turns) == 1:
            return [await self.turns[0].result()]
        waiting = [asyncio.ensure_future(turn.result()) for turn in self.turns]
        try:
            return await asyncio.gather(*waiting)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)

    async def close(self) -> None:
        """Cancel those that have not ended, and give the place to others."""
        outputs = [turn.output for turn in self.turns]
        try:
            for turn, output in zip(self.turns, outputs, strict=True):
                if output is None:
                    await turn.cancel()
        finally:
            self._trace()
            ended = [output for output in outputs if output is not None]
            self._place.leave(
                sum(output.usage.prompt_tokens + output.usage.output_tokens for output in ended),
                # Those of clients who left say nothing of how long replies are.
                [output.usage.output_tokens for output in ended if output.finish_reason != "cancelled"],
            )

    def _trace(self) -> None:
        tracing, self._tracing = self._tracing, None
        if tracing is not None:
            for turn in self.turns:
                turn.times.ended_s = turn.times.ended_s or time.perf_counter()
                tracing.ended(turn.turn_id, turn.times, turn.output)


async def merged(turns: Sequence[TimedTurn]) -> AsyncGenerator[tuple[int, AsyncDelta | None]]:
    """Deltas of several turns as they come, with the turn's index; None says that one has ended.

    No turn is asked for more than one delta ahead, so that they merge while nobody takes them.
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
