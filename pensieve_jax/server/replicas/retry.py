"""Sends turns to a replica, and sends them again once if that replica dies.

Owns: the recovery from a replica's death, which reads committed turns from the history and reruns the others;
the conversion of a stored turn to the output that the dead replica could not send.
Does not know: Ray, how a replica is chosen, or the purpose of a turn.

A turn is a function of its seed, its position and its tokens, so another replica produces the same reply. The
part that the client has already received must be its beginning; otherwise the turn fails. A replica may die
right after a commit that the history does not show yet. Then the second run is refused because its id is in
use, so the history is queried again after that refusal.

A background response is sent once: its caller counts the runs that end with the death of an engine, and runs
it again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, cast

from pensieve_jax.core.errors import (
    EngineClosedError,
    EngineDiedError,
    HistoryError,
    PensieveError,
    UnknownTurnError,
)
from pensieve_jax.core.outputs import FinishReason, Output, Usage
from pensieve_jax.core.turn_node import root_of
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.history.reader import HistoryReader, TurnView
from pensieve_jax.history.server_tables.changes import ResponseDraft
from pensieve_jax.server.engine_process.messages import Ending, Report, received_error, sent_spec, submission
from pensieve_jax.server.replicas.links import Replicas, ReplicaStream, decoded_report, encoded
from pensieve_jax.server.replicas.stream import RoutedReply
from pensieve_jax.server.workers import run_io

type StoredOutput = Callable[[TurnSpec], Awaitable[Output | None]]
"""Function that returns the output of a turn from the history, or None if the turn is not stored."""

MAX_RUNS: Final = 2
_CANCELLED = "The turn was cancelled."
_AGAIN = "The replica that ran this turn died, and the turn could not be run again"
_UNEXPECTED = "The turn failed with an unexpected error; see the log."
_ENDED_EARLY = "The replica stopped before the turn had ended."


class RetryingSubmission:
    """Submission of the turns of one key, with one retry. Use it from one event loop only.

    Attributes:
      key: the routing key, which selects the replica.
      replies: the replies of the turns, in order.
      num_runs: how often turns were sent.
      num_run_again: how many turns were sent a second time.
    """

    def __init__(self, replicas: Replicas, key: str, specs: Sequence[TurnSpec], stored: StoredOutput) -> None:
        """Prepare the turns, but send nothing; raises InvalidRequestError for values that cannot be sent."""
        self.key = key
        self.replies = [RoutedReply(spec) for spec in specs]
        self.num_runs = self.num_run_again = 0
        self._replicas = replicas
        self._stored = stored
        self._sent = [sent_spec(number, spec) for number, spec in enumerate(specs)]
        self._stream: ReplicaStream | None = None
        self._max_runs = 1 if any(map(_is_background, specs)) else MAX_RUNS
        self._has_engine_died = False  # with a turn that it ran, in the last run

    async def run(self) -> None:
        """Run until every turn has an output or an error."""
        died: EngineDiedError | None = None
        why: Exception = EngineDiedError(_UNEXPECTED)
        try:
            while self._left() and self.num_runs < self._max_runs:
                died = await self._run_once()
                if died is None:
                    return
                await self._end_stored_turns(died)
            why = died or EngineDiedError(_ENDED_EARLY)
            if self._max_runs == 1 and not self._has_engine_died:
                why = EngineClosedError(_ENDED_EARLY)  # the other text may quote a replica's error
        except asyncio.CancelledError:
            why = EngineClosedError(_CANCELLED)
            raise
        finally:
            self._fail_rest(why)

    def cancel(self, reply: RoutedReply) -> None:
        """Cancel a turn. The replica is notified only when all turns of the submission have ended."""
        reply.fail(EngineClosedError(_CANCELLED))
        if not self._left() and self._stream is not None:
            self._stream.cancel()

    def cancel_all(self) -> None:
        """Cancel every turn of the submission."""
        for reply in self.replies:
            self.cancel(reply)

    # Private methods

    def _left(self) -> list[int]:
        return [number for number, reply in enumerate(self.replies) if not reply.done]

    async def _run_once(self) -> EngineDiedError | None:
        """Send the unfinished turns and handle their reports.

        Return None once all have ended, or the error if the replica is lost.
        """
        left = self._left()
        for number in left:
            self.replies[number].begin_again()
        if self.num_runs:
            self.num_run_again = len(left)
        self.num_runs += 1
        died: EngineDiedError | None = None
        try:
            frame = encoded(submission([self._sent[number] for number in left]))
        except PensieveError as error:
            self._refuse(left, error)
            return None
        stream = self._stream = self._replicas.run(self.key, frame)
        try:
            async for data in stream:
                died = self._take(decoded_report(data)) or died
        except EngineDiedError as error:
            died = error
            # A replica that could not be reached has run nothing.
            self._has_engine_died = any(self.replies[number].is_accepted for number in left)
        except PensieveError as error:
            self._refuse(left, error)
        finally:
            self._stream = None
            stream.cancel()  # needed if the loop was left early; no effect on a stream that has ended
        if not self._left():
            return None
        return died or EngineDiedError(_ENDED_EARLY)

    def _take(self, report: Report) -> EngineDiedError | None:
        """Apply a report to the replies; return the error if it says that the replica's engine is lost."""
        replies = self.replies
        for number in report.accepted:
            replies[number].accept()
        num_taken: Counter[int] = Counter()
        for number, text, sampled in zip(report.numbers, report.texts, report.token_ids, strict=True):
            ids = sampled if isinstance(sampled, list) else [sampled]
            logprobs = report.logprobs.get(number) if report.logprobs else None
            if logprobs is not None:  # a number may have several entries, which share one list of logprobs
                first = num_taken[number]
                logprobs = logprobs[first : first + len(ids)]
                num_taken[number] += len(ids)
            replies[number].add(text, ids, logprobs)
        died = None
        for ending in report.endings:
            died = self._end(replies[ending.number], ending) or died
        return died

    def _end(self, reply: RoutedReply, ending: Ending) -> EngineDiedError | None:
        if reply.done:
            return None
        if ending.output is not None:
            if ending.output.finish_reason == "cancelled":  # by the replica, which is stopping
                return EngineDiedError(_ENDED_EARLY)
            reply.end(ending.output)
            return None
        error: Exception = PensieveError("The turn ended without a result.")
        if ending.error is not None:
            error = received_error(ending.error)
        if isinstance(error, EngineDiedError):
            self._has_engine_died = True
            return error
        # Ray may send a turn again by itself. If its id is in use, the history may have its output.
        if self.num_runs == 1 and not (reply.spec.node is not None and _says_id_in_use(error)):
            reply.fail(error)
            return None
        return _not_again(reply, error)

    def _refuse(self, numbers: Sequence[int], error: PensieveError) -> None:
        for number in numbers:
            self.replies[number].fail(error)

    async def _end_stored_turns(self, died: EngineDiedError) -> None:
        """End committed turns with their stored output, and fail turns that cannot run again."""
        for number in self._left():
            reply = self.replies[number]
            try:
                output = await self._stored(reply.spec)
            except HistoryError as error:
                reply.fail(error)
                continue
            if output is None:
                if not _may_run_again(reply.spec):
                    reply.fail(died)
            elif reply.spec.params.prompt_logprobs is not None:
                sentence = (
                    "The replica died after it had committed this turn, and before it had sent the "
                    "log-probabilities of the prompt, which are not stored. Send the request again."
                )
                reply.fail(EngineDiedError(sentence))
            elif reply.spec.params.logprobs is not None:
                sentence = (
                    "The replica died after it had committed this turn, and before it had sent the reply. "
                    "Retrieve the stored response, which has its log-probabilities."
                )
                reply.fail(EngineDiedError(sentence))
            else:
                reply.accept()
                reply.end(output)

    def _fail_rest(self, error: Exception) -> None:
        for number in self._left():
            self.replies[number].fail(error)


def key_of(spec: TurnSpec) -> str:
    """Return the routing key of a turn: the root of its tree, or the name of its conversation."""
    if spec.node is not None:
        return root_of(spec.node.turn_id)
    return spec.conversation_id or ""


def _may_run_again(spec: TurnSpec) -> bool:
    """Return whether a turn can be retried without the risk of a second commit.

    A turn of a named conversation gets its id from the engine, so it cannot be looked up in the history.
    """
    return spec.node is not None or spec.conversation_id is None


def _is_background(spec: TurnSpec) -> bool:
    draft = None if spec.node is None else spec.node.attachment
    return isinstance(draft, ResponseDraft) and draft.background


def _not_again(reply: RoutedReply, error: Exception) -> EngineDiedError | None:
    """Handle the refusal of a second run.

    If no replica has accepted the turn and its id is free, the turn fails with this error, because its client
    can still start again. Otherwise return EngineDiedError, so that the history is queried.
    """
    if reply.is_accepted or _says_id_in_use(error):
        return EngineDiedError(f"{_AGAIN}: {error}")
    reply.fail(error)
    return None


def _says_id_in_use(error: Exception) -> bool:
    """Return whether an error says that the turn's id is in use: the turn is stored already or still runs."""
    return getattr(error, "field", None) == "turn_id"


def stored_outputs(reader: HistoryReader) -> Callable[[TurnSpec], Awaitable[Output | None]]:
    """Return a function that finds the output of a turn in a history; it raises HistoryError."""

    async def stored(spec: TurnSpec) -> Output | None:
        node = spec.node
        if node is None or not node.durable:
            return None
        try:
            view = await run_io(node.owner, reader.turn, node.owner, node.turn_id)
        except UnknownTurnError:
            return None
        return output_of(view, spec)

    return stored


def output_of(view: TurnView, spec: TurnSpec) -> Output:
    """Return the output of a committed turn, without log-probabilities."""
    usage = view.usage or Usage(
        prompt_tokens=len(spec.prompt_token_ids),
        reused_gpu_tokens=0,
        swapped_in_tokens=0,
        recomputed_tokens=0,
        prefilled_tokens=view.num_tokens - len(view.output_token_ids),
        output_tokens=len(view.output_token_ids),
    )
    return Output(
        conversation_id=None,
        token_ids=view.output_token_ids,
        text=view.output_text or "",
        finish_reason=cast(FinishReason, view.finish_reason),
        usage=usage,
        seed=spec.params.seed or 0,
        ended_at_s=view.created_at_s,
    )
