"""The engine's loop: read incoming messages, run a step, report its results.

Owns: the turns that the front end submitted, one report per step, and the backlog while the front end does
not read.
Does not know: JAX, in which process or thread it runs, or what the front end is.

A lock of another program on the history never delays a step: changes that need it wait in order, for at most
`LOCK_WAIT_S`. A stalled front end never delays a step either. While the socket is full, no report is created:
turns collect their text, and the next report has more of each. So the backlog is bounded by the replies
themselves.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

from pensieve_jax.core.errors import (
    ClockAheadError,
    HistoryBusyError,
    HistoryError,
    PensieveError,
    StepFailedError,
)
from pensieve_jax.core.outputs import Output
from pensieve_jax.core.turn_node import TurnNode
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.turn import Deltas, Turn, cancelled_output
from pensieve_jax.history.failure_log import FailureLog
from pensieve_jax.history.server_tables.changes import (
    DeleteResponse,
    EndResponse,
    HistoryChange,
    ResponseDraft,
    StartResponse,
    TakeBackStart,
)
from pensieve_jax.history.store import LOCK_WAIT_S
from pensieve_jax.prompts import PromptEncoder
from pensieve_jax.server.async_engine import EngineInfo
from pensieve_jax.server.engine_process import calls
from pensieve_jax.server.engine_process.compiling import Compiled, CompilingTurns
from pensieve_jax.server.engine_process.messages import (
    Answer,
    Apply,
    Call,
    Cancel,
    Ending,
    FrontMessage,
    Ready,
    Report,
    SentError,
    SentTurn,
    Submit,
    received_change,
    received_spec,
    senders,
    sent_error,
    submitted,
)
from pensieve_jax.server.engine_process.wire import FrameReader, FrameWriter, UnreadableError, WireError
from pensieve_jax.server.logs import num_dropped_lines
from pensieve_jax.text import Tokenizer

_READ_BYTES = 1 << 16
_MAX_READS = 16  # between two steps
_MANY_LOGPROBS = 128  # of a reply, each with up to 20 others
_MAX_UNSENT = 10_000  # unsent answers and endings; above it, nothing more is read from the front end
_BEAT_S = 1.0
_LOCK_RETRY_S = 0.05  # between two attempts of a change that waits for another program's lock
_log = logging.getLogger(__name__)


class _WaitingCall(NamedTuple):
    """A call that waits for another program's lock until `until_s`, or for the calls before it."""

    number: int
    call: Callable[[], Any]
    until_s: float


class EngineServer:
    """Server of one front end over one socket, in the thread that calls `run`."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        front: socket.socket,
        *,
        info: EngineInfo | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take ownership of the engine and the socket, which the end of `run` closes.

        Args:
          engine: an idle engine.
          tokenizer: the tokenizer for prompts that the front end sends as text or messages.
          front: the engine's end of the socket pair.
          info: the description to send first; None if the front end has it already.
          now: returns the time in seconds, for heartbeats.
        """
        front.setblocking(False)
        engine.wait_for_locks(0.0)
        self._engine = engine
        self._front = front
        self._now = now
        self._prompts = PromptEncoder(tokenizer, lambda: engine.conversations)
        self._reader = FrameReader(FrontMessage.__value__)
        self._writer = FrameWriter()
        self._poll = select.poll()
        self._poll.register(front, select.POLLIN)
        self._compiling = CompilingTurns(
            engine.grammars, watch=lambda end: self._poll.register(end, select.POLLIN)
        )
        # The rest of a message that the socket has accepted only in part.
        self._unsent = memoryview(b"" if info is None else self._writer.frame(Ready(info)))
        self._report = Report()  # the next report, still without deltas
        self._parts: deque[bytes | bytearray] = deque()  # frames of long endings, one for each report
        self._numbers: dict[Turn, int] = {}
        self._turns: dict[int, Turn] = {}  # a turn without a reference would be cancelled
        # Turns whose grammars are still compiled, each with the message that submits it.
        self._held: dict[int, tuple[Submit, TurnSpec]] = {}
        # Owners and ids of background responses with a counted run that has not ended in the history.
        self._counted: set[tuple[str, str]] = set()
        self._front_left = self._has_front_ended = False
        self._calls: deque[_WaitingCall] = deque()  # by arrival
        self._next_try_s = 0.0
        self._failure_log = FailureLog()
        self._logged_failure: StepFailedError | None = None
        self._beat_s = -_BEAT_S
        self._num_deltas = self._num_delta_tokens = 0
        self._may_copy = False  # whether an idle engine may have copies, which start and finish in steps
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            Submit: self._submit,
            Cancel: self._cancel,
            Call: self._call,
            Apply: self._apply,
        }

    def run(self) -> None:
        """Serve until the front end disconnects; then cancel running turns and close the history.

        An error of a step is not sent to the front end; it is raised here and ends the loop.
        """
        try:
            while not self._front_left:
                self.run_once()
            if self._has_front_ended:
                self._take_back_starts()
        finally:
            self._front.close()
            try:
                self._engine.close()
            finally:
                self._compiling.close()

    def run_once(self) -> None:
        """Run the loop once: inbox, step, report. If no turn is unfinished, first wait for an event."""
        engine = self._engine
        if not engine.has_unfinished:
            self._wait()
        self._take_inbox()
        if self._calls:
            self._retry_calls()
        if self._compiling.has_begun:
            for message, compiled in self._compiling.take_ready():
                self._submit(message, compiled)
        if engine.has_unfinished or self._may_copy:
            self._may_copy = False
            for turn in engine.step():
                self._tell_end(self._numbers[turn], turn)
        self._beat()
        self._tell()

    def _take_back_starts(self) -> None:
        """Store that background responses ran at no death of an engine.

        The front end has counted their runs, and has ended without taking them back. It may have ended before
        it submitted the turn, or after the turn ended.
        """
        running = [turn.reply.node for turn in self._turns.values()]
        nodes = (*running, *(spec.node for _, spec in self._held.values()))
        for owner, response_id in self._counted.union(*map(_background_response, nodes)):
            with contextlib.suppress(PensieveError):  # they run alone next time
                self._engine.apply(TakeBackStart(owner=owner, response_id=response_id))

    # Incoming messages

    def _wait(self) -> None:
        """Wait until the front end sends data, can read unsent data, or the next heartbeat is due."""
        events = select.POLLIN if self._is_listening else 0
        if self._unsent or self._parts:
            events |= select.POLLOUT
        self._poll.modify(self._front, events)
        left_s = self._beat_s + _BEAT_S - self._now()
        if self._calls:
            left_s = min(left_s, self._next_try_s - self._now())
        self._poll.poll(max(1e3 * left_s, 0.0))

    @property
    def _is_listening(self) -> bool:
        num_ended = len(self._report.answers) + len(self._report.endings) + len(self._parts)
        return num_ended + len(self._calls) < _MAX_UNSENT

    def _take_inbox(self) -> None:
        for _ in range(_MAX_READS):
            if not self._is_listening:
                return
            try:
                data = self._front.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            self._receive(data)
            if self._front_left or len(data) < _READ_BYTES:
                return

    def _receive(self, data: bytes) -> None:
        try:
            if not data:
                self._front_left = self._has_front_ended = True
                self._reader.finish()
            for message in self._messages(data):
                handle = self._handlers.get(type(message))
                if handle is None:
                    raise WireError(f"The front end sent {type(message).__name__} to a running engine.")
                handle(message)
        except WireError as error:
            _log.error("The connection to the front end is closed: %s", error)
            self._front_left = True

    def _messages(self, data: bytes) -> Iterator[Any]:
        """Yield the received messages.

        An unreadable message fails only its own turns or calls, because other requests share the front end.
        """
        while True:
            try:
                yield from self._reader.feed(data)
                return
            except UnreadableError as error:
                turns, answers = senders(error.payload)
                if not turns and not answers:
                    raise
                problem = sent_error(WireError(str(error)))
                self._report.endings += [Ending(number, error=problem) for number in turns]
                self._report.answers += [Answer(number, error=problem) for number in answers]
            data = b""

    def _submit(self, message: Submit, compiled: Compiled = MappingProxyType({})) -> None:
        """Queue the turns of a message, now or once their grammars are compiled.

        A prompt is encoded again then: the conversation may have gone on, and the form may have moved behind
        another beginning of the reply.
        """
        try:
            specs = [self._spec(turn, len(message.turns)) for turn in submitted(message)]
            forms = [spec.params.structured for spec in specs]
            grammars = self._compiling.grammars_of(message, forms, compiled)
            turns = None if grammars is None else self._engine.submit(specs, grammars)
        except PensieveError as error:
            self._refuse(message, error)
            return
        numbers = [turn.number for turn in message.turns]
        if turns is None:
            self._held.update(zip(numbers, [(message, spec) for spec in specs], strict=True))
            return
        for number, turn in zip(numbers, turns, strict=True):
            self._held.pop(number, None)
            self._numbers[turn] = number
            self._turns[number] = turn
            self._report.accepted.append(number)

    def _refuse(self, message: Submit, error: PensieveError) -> None:
        sent = self._sent(error)
        for turn in message.turns:
            self._held.pop(turn.number, None)
            self._report.endings.append(Ending(turn.number, error=sent))

    def _spec(self, turn: SentTurn, count: int) -> TurnSpec:
        if turn.is_encoded:
            return received_spec(turn)
        field = "prompt" if count == 1 else f"prompts[of turn {turn.number}]"
        return self._prompts.turn(turn.prompt, turn.params, turn.conversation_id, field=field)

    def _cancel(self, message: Cancel) -> None:
        for number in message.numbers:
            turn = self._turns.get(number)
            if number in self._held:
                self._cancel_held(number)
            elif turn is not None:  # it may have ended meanwhile
                self._engine.cancel(turn)
                self._tell_end(number, turn)

    def _cancel_held(self, number: int) -> None:
        """End a turn whose grammar is still compiled; the other turns of its message wait on."""
        message, spec = self._held.pop(number)
        message.turns = [turn for turn in message.turns if turn.number != number]
        if not message.turns:
            self._compiling.forget(message)
        self._report.endings.append(Ending(number, cancelled_output(spec, time.time())))

    def _call(self, message: Call) -> None:
        self._may_copy = True

        def call() -> Any:
            return calls.answer(self._engine, message.name, message.arguments)

        if message.name in calls.IN_ORDER:
            self._answer_in_order(message.number, call)
        else:
            self._answer(_WaitingCall(message.number, call, 0.0))

    def _apply(self, message: Apply) -> None:
        self._answer_in_order(message.number, lambda: self._change(received_change(message)))

    def _change(self, change: HistoryChange) -> None:
        self._engine.apply(change)
        match change:
            case StartResponse():
                self._counted.add((change.owner, change.response_id))
            case TakeBackStart() | EndResponse() | DeleteResponse():
                self._counted.discard((change.owner, change.response_id))

    def _answer_in_order(self, number: int, call: Callable[[], Any]) -> None:
        """Answer a call behind those that wait for a lock, or let it wait for one itself."""
        waiting = _WaitingCall(number, call, self._now() + LOCK_WAIT_S)
        if self._calls or not self._answer(waiting):
            self._calls.append(waiting)

    def _retry_calls(self) -> None:
        """Answer the waiting calls in order, as far as locks allow."""
        if self._now() < self._next_try_s:
            return
        while self._calls and self._answer(self._calls[0]):
            self._calls.popleft()

    def _answer(self, waiting: _WaitingCall) -> bool:
        """Make a call and queue its answer; return False if it must wait for a lock."""
        try:
            answer = Answer(waiting.number, waiting.call())
        except PensieveError as error:
            if isinstance(error, HistoryBusyError) and self._now() < waiting.until_s:
                self._next_try_s = self._now() + _LOCK_RETRY_S
                return False
            answer = Answer(waiting.number, error=self._sent(error))
        self._report.answers.append(answer)
        return True

    # Outgoing messages

    def _tell_end(self, number: int, turn: Turn) -> None:
        del self._turns[number], self._numbers[turn]
        error = None if turn.error is None else self._sent(turn.error)
        output = turn.output if error is None else None
        if output is not None and output.finish_reason != "cancelled":
            self._counted -= _background_response(turn.reply.node)
        ending = Ending(number, output, error)
        # An ending can have megabytes. The deltas and short endings of other turns go between its parts.
        parts = self._writer.parts(Report(endings=[ending])) if _may_be_long(output) else []
        if len(parts) > 1:
            self._parts += parts
        else:
            self._report.endings.append(ending)

    def _sent(self, error: PensieveError) -> SentError:
        """Return an error to send; those that clients get no details of are also logged.

        The front end itself logs that a clock is ahead.
        """
        if isinstance(error, HistoryError) and not isinstance(error, ClockAheadError):
            self._failure_log.note(error)
        elif isinstance(error, StepFailedError) and error is not self._logged_failure:
            self._logged_failure = error  # all turns of a step have the same one
            _log.error("%s", error)
        return sent_error(error)

    def _beat(self) -> None:
        now_s = self._now()
        if now_s - self._beat_s < _BEAT_S:
            return
        self._beat_s = now_s
        self._may_copy = True
        self._expire_idle()
        self._report.stats = {
            **self._engine.stats(),
            "num_deltas": self._num_deltas,
            "num_delta_tokens": self._num_delta_tokens,
            "engine_thread_s": time.thread_time(),
            "num_log_lines_dropped": num_dropped_lines(),
        }

    def _expire_idle(self) -> None:
        """End idle conversations; after an error of the history, the next beat tries again."""
        try:
            self._engine.expire_idle()
        except HistoryError as error:
            self._failure_log.note(error)

    def _tell(self) -> None:
        """Send a report if there is news and the previous report is completely sent.

        A part of a long ending goes with it.
        """
        if self._unsent:
            self._send()
        if self._unsent:
            return
        report = self._report
        deltas = self._engine.take_deltas()
        if deltas.turns:
            self._add_deltas(report, deltas)
        elif not (report.endings or report.accepted or report.answers or report.stats or self._parts):
            return
        self._report = Report()
        frame = self._writer.frame(report)
        if self._parts:
            frame += self._parts.popleft()
        self._unsent = memoryview(frame)
        self._send()

    def _add_deltas(self, report: Report, deltas: Deltas) -> None:
        numbers = self._numbers
        report.numbers = [numbers[turn] for turn in deltas.turns]
        report.texts, report.token_ids = deltas.texts, deltas.token_ids
        report.logprobs = {numbers[turn]: logprobs for turn, logprobs in deltas.logprobs.items()}
        self._num_deltas += len(deltas.turns)
        self._num_delta_tokens += len(deltas.token_ids)
        if list in map(type, deltas.token_ids):  # rarely: most steps have one new id for each turn
            self._num_delta_tokens += sum(len(ids) - 1 for ids in deltas.token_ids if isinstance(ids, list))

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                self._unsent = self._unsent[self._front.send(self._unsent) :]
            except ConnectionError:
                self._front_left = True
                self._unsent = memoryview(b"")


def _may_be_long(output: Output | None) -> bool:
    return output is not None and (
        output.prompt_logprobs is not None or len(output.logprobs or ()) > _MANY_LOGPROBS
    )


def _background_response(node: TurnNode | None) -> set[tuple[str, str]]:
    """Return owner and id of the background response that a turn completes, if it has one."""
    draft = None if node is None else node.attachment
    if not isinstance(draft, ResponseDraft) or not draft.background:
        return set()
    return {(draft.owner, draft.response_id)}
