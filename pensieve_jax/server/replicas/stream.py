"""The reply of one turn across all its runs on replicas, and the caller's handle of the turn.

Owns: the guarantee that output is delivered once and never changed. A second run is compared with the
delivered output and skipped up to its end.
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
from pensieve_jax.server.engine_process.unread import UnreadOutput

_OTHERWISE = (
    "The replica that ran this turn died, and the second run sampled a different reply. "
    "Send the request again."
)


class RoutedReply:
    """Reply of one turn, owned by the `RetryingSubmission` that runs it.

    Attributes:
      spec: the specification of the turn.
      is_accepted: whether a replica has queued it.
      num_runs: how often it was sent to a replica.
      output, error: its result or failure; None until it ends.
    """

    def __init__(self, spec: TurnSpec) -> None:
        self.spec = spec
        self.is_accepted = False
        self.num_runs = 0
        self.output: Output | None = None
        self.error: Exception | None = None
        # All output so far, including the unread output at its end.
        self._text: list[str] = []
        self._num_chars = 0
        self._ids: list[int] = []
        self._unread = UnreadOutput(has_logprobs=spec.params.logprobs is not None)
        # Output of the current run. While a second run repeats the first, it is shorter than the total.
        self._come_chars = self._come_ids = 0
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def done(self) -> bool:
        """Whether the turn has an output or an error."""
        return self.output is not None or self.error is not None

    @property
    def has_begun(self) -> bool:
        """Whether the current run has produced a token."""
        return self._come_ids > 0

    def accept(self) -> None:
        """Mark the turn as queued by a replica."""
        self.is_accepted = True
        self._wake()

    def begin_again(self) -> None:
        """Start a new run, whose output begins again at the first token."""
        self.num_runs += 1
        self._come_chars = self._come_ids = 0

    def add(self, text: str, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        """Add a part of the reply. If a second run differs from the delivered output, the turn fails."""
        if not self.done:
            self._add(text, ids, logprobs)

    def end(self, output: Output) -> None:
        """End the turn with an output; the rest of it becomes the last delta."""
        if self.done:
            return
        logprobs = None if output.logprobs is None else output.logprobs[self._come_ids :]
        if not self._add(output.text[self._come_chars :], output.token_ids[self._come_ids :], logprobs):
            return
        if self._come_chars < self._num_chars or self._come_ids < len(self._ids):  # shorter than delivered
            self.fail(EngineDiedError(_OTHERWISE))
            return
        self.output = output
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the turn with an error, because it was refused or failed."""
        if not self.done:
            self.error = error
            self._wake()

    @property
    def num_unread_entries(self) -> int:
        """Number of log-probabilities, alternatives included, that have arrived and were not read."""
        return self._unread.num_entries

    def take(self) -> AsyncDelta | None:
        """Return unread output as `UnreadOutput.take` does, or None if all was read."""
        return self._unread.take() if self._unread else None

    async def changed(self) -> None:
        """Wait until the turn is accepted, has new output, or ends."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    # Private methods

    def _add(self, text: str, ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> bool:
        """Add a part of the current run; return False and fail if it differs from the delivered output."""
        new_text = self._new_text(text)
        new_ids = self._new_ids(ids)
        if new_text is None or new_ids is None:
            self.fail(EngineDiedError(_OTHERWISE))
            return False
        if new_text:
            self._text.append(new_text)
            self._num_chars += len(new_text)
        self._ids += new_ids
        if new_text or new_ids:
            new_logprobs = logprobs[-len(new_ids) :] if logprobs is not None and new_ids else None
            self._unread.add(new_text, new_ids, new_logprobs)
            self._wake()
        return True

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _new_text(self, text: str) -> str | None:
        """Return the new part of `text`, or None if the repeated part differs from the delivered text."""
        begin, self._come_chars = self._come_chars, self._come_chars + len(text)
        num_sent = min(self._num_chars - begin, len(text))
        if num_sent <= 0:
            return text
        if len(self._text) > 1:
            self._text = ["".join(self._text)]
        return text[num_sent:] if self._text[0].startswith(text[:num_sent], begin) else None

    def _new_ids(self, ids: Sequence[int]) -> list[int] | None:
        begin, self._come_ids = self._come_ids, self._come_ids + len(ids)
        num_sent = max(0, min(len(self._ids) - begin, len(ids)))
        is_same = self._ids[begin : begin + num_sent] == list(ids[:num_sent])
        return list(ids[num_sent:]) if is_same else None


class RoutedTurn:
    """Turn on a replica and iterator of its deltas. Losing its last reference cancels it."""

    __slots__ = ("__weakref__", "_cancel", "_finalizer", "_reply", "_turn_id")

    def __init__(self, reply: RoutedReply, turn_id: str, cancel: Callable[[RoutedReply], None]) -> None:
        """Wrap a reply; `cancel` cancels the turn on its replica.

        The garbage collector may run in another thread, so the finalizer calls `cancel` on the event loop.
        """
        self._reply = reply
        self._turn_id = turn_id
        self._cancel = cancel
        self._finalizer = weakref.finalize(self, _drop, asyncio.get_running_loop(), cancel, reply)
        self._finalizer.atexit = False

    @property
    def turn_id(self) -> str:
        """Id of the turn. For a turn without a node, it is valid in this process only."""
        return self._turn_id

    @property
    def output(self) -> Output | None:
        """Result of the turn, or None until it ends successfully."""
        return self._reply.output

    @property
    def usage(self) -> Usage | None:
        """Sources of the turn's tokens, or None until it ends successfully."""
        return None if self._reply.output is None else self._reply.output.usage

    @property
    def num_unread_entries(self) -> int:
        return self._reply.num_unread_entries

    async def accepted(self) -> None:
        """Wait until a replica has queued the turn; raises the error if the replica refuses it."""
        reply = self._reply
        while not (reply.is_accepted or reply.done):
            await reply.changed()
        if reply.error is not None and not reply.is_accepted:
            raise reply.error

    def __aiter__(self) -> AsyncIterator[AsyncDelta]:
        return self

    async def __anext__(self) -> AsyncDelta:
        """Return the output since the last call; raises the turn's error once all earlier output was read."""
        reply = self._reply
        while (delta := reply.take()) is None:
            if reply.error is not None:
                raise reply.error
            if reply.output is not None:
                raise StopAsyncIteration
            await reply.changed()
        return delta

    async def result(self) -> Output:
        """Wait for the end, whether or not the deltas were read; raises the turn's error."""
        reply = self._reply
        while not reply.done:
            await reply.changed()
        if reply.error is not None:
            raise reply.error
        assert reply.output is not None
        return reply.output

    async def cancel(self) -> None:
        """End the turn as if it had never been submitted. A finished turn is unaffected.

        This does not wait for the replica, so a turn that ends meanwhile may be committed.
        """
        self._cancel(self._reply)


def _drop(loop: asyncio.AbstractEventLoop, cancel: Callable[[RoutedReply], None], reply: RoutedReply) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(cancel, reply)
