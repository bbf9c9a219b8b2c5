"""Submitted turns whose grammars are still compiled, in threads beside the engine's.

Owns: the threads, the limit of grammars that compile at a time, and the messages that wait for them.
Does not know: engines, or how a message is handled once its grammars are compiled.

The engine's process compiles, because a compiled grammar cannot be sent to another process. The grammar
library holds no lock of the interpreter meanwhile, so steps continue.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

from pensieve_jax.core.errors import GrammarFailedError, GrammarQueueFullError, PensieveError
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.server.engine_process.messages import Submit
from pensieve_jax.text.grammar import Grammar, Grammars

_log = logging.getLogger(__name__)
MAX_COMPILING: Final = 16
_NUM_THREADS: Final = 2


class _Held(NamedTuple):
    message: Submit
    compiling: list[Future[Grammar]]


class CompilingTurns:
    """Messages that wait until the grammars of their turns are compiled, in order of arrival."""

    def __init__(self, grammars: Grammars | None, watch: Callable[[socket.socket], None]) -> None:
        """Start without messages.

        Args:
          grammars: what to compile into; None for a model without a tokenizer, whose turns need not wait.
          watch: called once, before the first grammar is compiled, with a socket that becomes readable
            whenever one was compiled.
        """
        self._grammars = grammars
        self._watch = watch
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._held: list[_Held] = []
        self._compiling: dict[StructuredOutput, Future[Grammar]] = {}

    def hold(self, message: Submit) -> bool:
        """Keep a message if one of its grammars is not compiled, and return whether it is kept.

        Raises GrammarQueueFullError if too many grammars are compiling.
        """
        if self._grammars is None:
            return False
        forms = dict.fromkeys(turn.params.structured for turn in message.turns)
        missing = [form for form in forms if form is not None and self._grammars.kept(form) is None]
        if not missing:
            return False
        new = [form for form in missing if form not in self._compiling]
        if len(self._compiling) + len(new) > MAX_COMPILING:
            raise GrammarQueueFullError(MAX_COMPILING)
        if self._sockets is None:
            self._sockets = socket.socketpair()
            for end in self._sockets:
                end.setblocking(False)
            self._watch(self._sockets[0])
        for form in new:
            self._compiling[form] = future = self._threads.submit(self._grammars.compile, form)
            future.add_done_callback(self._notify)
        self._held.append(_Held(message, [self._compiling[form] for form in missing]))
        return True

    def take_ready(self) -> Iterator[tuple[Submit, PensieveError | None]]:
        """Yield and forget the messages whose grammars are compiled, or the error of one of them."""
        self._drain()  # first, also without messages: a notice may come after its message was taken
        for form, future in list(self._compiling.items()):
            if future.done():
                del self._compiling[form]
        held, self._held = self._held, []
        for one in held:
            if not all(future.done() for future in one.compiling):
                self._held.append(one)
                continue
            problem: PensieveError | None = None
            for future in one.compiling:
                error = future.exception()
                if isinstance(error, PensieveError):
                    problem = error
                elif error is not None:  # of the library; this must not end the process
                    _log.error("a grammar could not be compiled", exc_info=error)
                    problem = GrammarFailedError("the grammar could not be compiled; see the log")
            yield one.message, problem

    def close(self) -> None:
        """Start no more compilations, and close the sockets."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for end in self._sockets or ():
            end.close()

    def _notify(self, future: Future[Grammar]) -> None:
        """Make `wake` readable; called in a thread of the pool."""
        assert self._sockets is not None
        with contextlib.suppress(BlockingIOError):  # it is readable already
            self._sockets[1].send(b"\0")

    def _drain(self) -> None:
        if self._sockets is None:
            return
        with contextlib.suppress(BlockingIOError):
            while self._sockets[0].recv(4096):
                pass
