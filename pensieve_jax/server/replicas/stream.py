"""What has come of one turn, whichever replicas it ran on, and the turn as those who wait for it hold it.

Owns: that what was told once is never told again or otherwise: a replay is skipped as far as it was told.
Does not know: replicas, messages, or when a turn is run again.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Sequence

from pensieve_jax.core.errors import EngineDiedError
from pensieve_jax.core.outputs import Output, TokenLogprob, Usage
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.server.async_engine import AsyncDelta

_OTHERWISE = (
    "The replica that ran this turn died, and another one sampled another reply than the one that has begun; "
    "send the request again."
)


class RoutedReply:
    """Of one turn; belongs to the errand that runs it.

    Attributes:
      spec: the turn.
      is_accepted: some replica has queued it.
      num_runs: how often it was sent to one.
      output, error: how it ended.
    """

    def __init__(self, spec: TurnSpec) -> None:
        self.spec = spec
        self.is_accepted = False
        self.num_runs = 0
        self.output: Output | None = None
        self.error: Exception | None = None
        # All that was told, with what nobody has taken yet at its end.
        self._text: list[str] = []
        self._num_chars = 0
        self._ids: list[int] = []
        self._waiting_text: list[str] = []
        self._waiting_ids: list[int] = []
        self._waiting_logprobs: list[TokenLogprob] | None = None if spec.params.logprobs is None else []
        # Of the run that goes on now, so much has come: less than was told while it is a replay.
        self._come_chars = self._come_ids = 0
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def done(self) -> bool:
        """It has an output, or failed."""
        return self.output is not None or self.error is not None

    @property
    def has_begun(self) -> bool:
        """A token of the run that goes on now has come."""
        return self._come_ids > 0

    def accept(self) -> None:
        """A replica has queued it."""
        self.is_accepted = True
        self._wake()

    def begin_again(self) -> None:
        """What comes from now on comes from the beginning."""
        self.num_runs += 1
        self._come_chars = self._come_ids = 0

    def add(self, text: str, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        """A piece of the reply; a replay that says something else than was told ends the turn."""
        if not self.done:
            self._add(text, ids, logprobs)

    def end(self, output: Output) -> None:
        """It ended so; what of it no piece had is the last one."""
        if self.done:
            return
        logprobs = None if output.logprobs is None else output.logprobs[self._come_ids :]
        if not self._add(output.text[self._come_chars :], output.token_ids[self._come_ids :], logprobs):
            return
        if self._come_chars < self._num_chars or self._come_ids < len(self._ids):  # it ended sooner
            self.fail(EngineDiedError(_OTHERWISE))
            return
        self.output = output
        self._wake()

    def fail(self, error: Exception) -> None:
        """It was refused, or lost."""
        if not self.done:
            self.error = error
            self._wake()

    def take(self) -> AsyncDelta | None:
        """What nobody has taken yet."""
        if not self._waiting_ids and not self._waiting_text:
            return None
        logprobs = None if self._waiting_logprobs is None else tuple(self._waiting_logprobs)
        delta = AsyncDelta("".join(self._waiting_text), tuple(self._waiting_ids), logprobs)
        self._waiting_text, self._waiting_ids = [], []
        if self._waiting_logprobs is not None:
            self._waiting_logprobs = []
        return delta

    async def changed(self) -> None:
        """Wait until something comes of it."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    # Inside

    def _add(self, text: str, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> bool:
        """Whether the piece is, as far as it was told before, what was told."""
        new_text = self._new_text(text)
        new_ids = self._new_ids(ids)
        if new_text is None or new_ids is None:
            self.fail(EngineDiedError(_OTHERWISE))
            return False
        if new_text:
            self._text.append(new_text)
            self._num_chars += len(new_text)
            self._waiting_text.append(new_text)
        self._ids += new_ids
        self._waiting_ids += new_ids
        if logprobs is not None and self._waiting_logprobs is not None and new_ids:
            self._waiting_logprobs += logprobs[-len(new_ids) :]
        if new_text or new_ids:
            self._wake()
        return True

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _new_text(self, text: str) -> str | None:
        """What of a piece was not told before; None where it is not what was told."""
        begin, self._come_chars = self._come_chars, self._come_chars + len(text)
        num_told = min(self._num_chars - begin, len(text))
        if num_told <= 0:
            return text
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return text[num_told:] if self._text[0].startswith(text[:num_told], begin) else None

    def _new_ids(self, ids: Sequence[int]) -> list[int] | None:
        begin, self._come_ids = self._come_ids, self._come_ids + len(ids)
        num_told = max(0, min(len(self._ids) - begin, len(ids)))
        is_same = self._ids[begin : begin + num_told] == list(ids[:num_told])
        return list(ids[num_told:]) if is_same else None


class RoutedTurn:
    """A turn on some replica: an iterator of deltas. Dropping it before its end cancels it."""

    __slots__ = ("__weakref__", "_cancel", "_finalizer", "_reply", "_turn_id")

    def __init__(self, reply: RoutedReply, turn_id: str, cancel: Callable[[RoutedReply], None]) -> None:
        """`cancel` ends the turn where it runs; whoever collects garbage may be in another thread."""
        self._reply = reply
        self._turn_id = turn_id
        self._cancel = cancel
        self._finalizer = weakref.finalize(self, _drop, asyncio.get_running_loop(), cancel, reply)
        self._finalizer.atexit = False

    @property
    def turn_id(self) -> str:
        """Its id; for a turn without a node, one of this process only."""
        return self._turn_id

    @property
    def output(self) -> Output | None:
        """The result, once the turn has ended well."""
        return self._reply.output

    @property
    def usage(self) -> Usage | None:
        """Where its tokens came from, once the turn has ended well."""
        return None if self._reply.output is None else self._reply.output.usage

    async def accepted(self) -> None:
        """Wait until a replica has queued it; raises what it was refused with."""
        reply = self._reply
        while not (reply.is_accepted or reply.done):
            await reply.changed()
        if reply.error is not None and not reply.is_accepted:
            raise reply.error

    def __aiter__(self) -> AsyncIterator[AsyncDelta]:
        return self

    async def __anext__(self) -> AsyncDelta:
        """What came since the last call; raises what the turn failed with, once all before it was taken."""
        reply = self._reply
        while (delta := reply.take()) is None:
            if reply.error is not None:
                raise reply.error
            if reply.output is not None:
                raise StopAsyncIteration
            await reply.changed()
        return delta

    async def result(self) -> Output:
        """Wait for the end, whatever of the deltas was taken; raises what the turn failed with."""
        reply = self._reply
        while not reply.done:
            await reply.changed()
        if reply.error is not None:
            raise reply.error
        assert reply.output is not None
        return reply.output

    async def cancel(self) -> None:
        """End it as if it had never been sent; nothing happens to one that is done.

        The replica is told, and not waited for: one that ends meanwhile may have been committed.
        """
        self._cancel(self._reply)


def _drop(loop: asyncio.AbstractEventLoop, cancel: Callable[[RoutedReply], None], reply: RoutedReply) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(cancel, reply)
