"""The engine's loop beside an inbox: take what came, step, tell what the step gave.

Owns: which turns are the front's, one message a step, and what happens while the front does not read.
Does not know: JAX, in which process or thread it runs, or what the front is.

A stalled front never stops a step. While the socket is full nothing is made for it: turns keep their text,
so the next message has more of each, and what is held is bounded by the replies themselves.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.turn import Deltas, Turn
from pensieve_jax.prompts import PromptEncoder
from pensieve_jax.server.async_engine import EngineInfo
from pensieve_jax.server.engine_process import calls
from pensieve_jax.server.engine_process.messages import (
    Answer,
    Apply,
    Call,
    Cancel,
    Ending,
    FrontMessage,
    Ready,
    Report,
    SentTurn,
    Submit,
    received_change,
    received_spec,
    senders,
    sent_error,
    submitted,
)
from pensieve_jax.server.engine_process.wire import FrameReader, FrameWriter, UnreadableError, WireError
from pensieve_jax.text import Tokenizer

_READ_BYTES = 1 << 16
_MAX_READS = 16  # between two steps
_MAX_UNTOLD = (
    10_000  # answers and endings, beyond which nothing more is taken from a front that does not read
)
_BEAT_S = 1.0
_log = logging.getLogger(__name__)


class EngineServer:
    """Serves one front over one socket, from the thread that calls `run`."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        front: socket.socket,
        *,
        info: EngineInfo | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Both become this object's: the engine and the socket are closed at the end of `run`.

        Args:
          engine: idle.
          tokenizer: of prompts that the front sends as text or messages.
          front: the engine's end of the socket pair.
          info: what the front is told first; None: nothing, it knows.
          now: the time in seconds, for heartbeats.
        """
        front.setblocking(False)
        self._engine = engine
        self._front = front
        self._now = now
        self._prompts = PromptEncoder(tokenizer, lambda: engine.conversations)
        self._reader = FrameReader(FrontMessage.__value__)
        self._writer = FrameWriter()
        self._poll = select.poll()
        self._poll.register(front, select.POLLIN)
        # Of a message that the socket took a part of.
        self._unsent = memoryview(b"" if info is None else self._writer.frame(Ready(info)))
        self._report = Report()  # what is to be told next, without deltas
        self._numbers: dict[Turn, int] = {}
        self._turns: dict[int, Turn] = {}  # holding them keeps them running
        self._front_left = False
        self._beat_s = -_BEAT_S
        self._num_deltas = self._num_delta_tokens = 0
        self._may_copy = False  # an idle engine's copies begin and end in steps, too
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            Submit: self._submit,
            Cancel: self._cancel,
            Call: self._call,
            Apply: self._apply,
        }

    def run(self) -> None:
        """Serve until the front has left; then cancel what runs, and close the history.

        What a step raises is not for the front, and ends this.
        """
        try:
            while not self._front_left:
                self.turn_over()
        finally:
            self._front.close()
            self._engine.close()

    def turn_over(self) -> None:
        """Once around: inbox, step, message. Waits for something to happen where nothing is unfinished."""
        engine = self._engine
        if not engine.has_unfinished:
            self._wait()
        self._take_inbox()
        if engine.has_unfinished or self._may_copy:
            self._may_copy = False
            for turn in engine.step():
                self._tell_end(self._numbers[turn], turn)
        self._beat()
        self._tell()

    # What comes

    def _wait(self) -> None:
        """Until the front says something, or can be told what is left to tell, or the next heartbeat."""
        events = select.POLLIN if self._is_listening else 0
        if self._unsent:
            events |= select.POLLOUT
        self._poll.modify(self._front, events)
        left_s = self._beat_s + _BEAT_S - self._now()
        self._poll.poll(max(1e3 * left_s, 0.0))

    @property
    def _is_listening(self) -> bool:
        return len(self._report.answers) + len(self._report.endings) < _MAX_UNTOLD

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
                self._front_left = True
                self._reader.finish()
            for message in self._messages(data):
                handle = self._handlers.get(type(message))
                if handle is None:
                    raise WireError(f"The front sent {type(message).__name__}, which this engine did before.")
                handle(message)
        except WireError as error:
            _log.error("The front is taken for dead: %s", error)
            self._front_left = True

    def _messages(self, data: bytes) -> Iterator[Any]:
        """What came. What cannot be read is refused to whoever sent it, for others share the front."""
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

    def _submit(self, message: Submit) -> None:
        try:
            specs = [self._spec(turn, len(message.turns)) for turn in submitted(message)]
            turns = self._engine.submit(specs)
        except PensieveError as error:
            sent = sent_error(error)
            self._report.endings += [Ending(turn.number, error=sent) for turn in message.turns]
            return
        for sent_turn, turn in zip(message.turns, turns, strict=True):
            self._numbers[turn] = sent_turn.number
            self._turns[sent_turn.number] = turn
            self._report.accepted.append(sent_turn.number)

    def _spec(self, turn: SentTurn, count: int) -> TurnSpec:
        if turn.is_encoded:
            return received_spec(turn)
        field = "prompt" if count == 1 else f"prompts[of turn {turn.number}]"
        return self._prompts.turn(turn.prompt, turn.params, turn.conversation_id, field=field)

    def _cancel(self, message: Cancel) -> None:
        for number in message.numbers:
            turn = self._turns.get(number)
            if turn is not None:  # it may have ended in the meantime
                self._engine.cancel(turn)
                self._tell_end(number, turn)

    def _call(self, message: Call) -> None:
        self._may_copy = True
        self._answer(message.number, lambda: calls.answer(self._engine, message.name, message.arguments))

    def _apply(self, message: Apply) -> None:
        self._answer(message.number, lambda: self._engine.apply(received_change(message)))

    def _answer(self, number: int, call: Callable[[], Any]) -> None:
        try:
            self._report.answers.append(Answer(number, call()))
        except PensieveError as error:
            self._report.answers.append(Answer(number, error=sent_error(error)))

    # What goes

    def _tell_end(self, number: int, turn: Turn) -> None:
        del self._turns[number], self._numbers[turn]
        error = None if turn.error is None else sent_error(turn.error)
        output = turn.output if error is None else None
        self._report.endings.append(Ending(number, output, error))

    def _beat(self) -> None:
        now_s = self._now()
        if now_s - self._beat_s < _BEAT_S:
            return
        self._beat_s = now_s
        self._may_copy = True
        self._engine.expire_idle()
        self._report.stats = {
            **self._engine.stats(),
            "num_deltas": self._num_deltas,
            "num_delta_tokens": self._num_delta_tokens,
            "engine_thread_s": time.thread_time(),
        }

    def _tell(self) -> None:
        """Send what there is, unless the socket still holds the message before."""
        if self._unsent:
            self._send()
        if self._unsent:
            return
        report = self._report
        deltas = self._engine.take_deltas()
        if deltas.turns:
            self._add_deltas(report, deltas)
        elif not (report.endings or report.accepted or report.answers or report.stats):
            return
        self._report = Report()
        self._unsent = memoryview(self._writer.frame(report))
        self._send()

    def _add_deltas(self, report: Report, deltas: Deltas) -> None:
        numbers = self._numbers
        report.numbers = [numbers[turn] for turn in deltas.turns]
        report.texts, report.token_ids = deltas.texts, deltas.token_ids
        report.logprobs = {numbers[turn]: logprobs for turn, logprobs in deltas.logprobs.items()}
        self._num_deltas += len(deltas.turns)
        self._num_delta_tokens += sum(1 if isinstance(ids, int) else len(ids) for ids in deltas.token_ids)

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                self._unsent = self._unsent[self._front.send(self._unsent) :]
            except ConnectionError:
                self._front_left = True
                self._unsent = memoryview(b"")
