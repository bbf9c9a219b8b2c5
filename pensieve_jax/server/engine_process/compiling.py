"""Submitted turns whose grammars are still compiled, in threads beside the engine's.

Owns: the threads, the limit of grammars that compile at a time, and the messages that wait for them.
Does not know: engines, or how a message is handled once its grammars are compiled.

The engine's process compiles, because a compiled grammar cannot be sent to another process. The grammar
library holds no lock of the interpreter meanwhile, so steps continue.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Final, NamedTuple

from pensieve_jax.core.errors import GrammarFailedError, GrammarQueueFullError, PensieveError
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.server.engine_process.messages import Submit
from pensieve_jax.text.grammar import Grammar, Grammars

_log = logging.getLogger(__name__)
MAX_COMPILING: Final = 16
_NUM_THREADS: Final = 2
_NICENESS: Final = 10
"""What is added to the threads' niceness: on few cores, steps and the front end come first."""
_HIGHEST_NICENESS: Final = 19


type Compiled = Mapping[StructuredOutput, Grammar | PensieveError]
"""What came of compiling forms: a grammar, or why there is none."""


class _Held(NamedTuple):
    message: Submit
    known: Compiled
    compiling: Mapping[StructuredOutput, Future[Grammar]]


class CompilingTurns:
    """Messages that wait until the grammars of their turns are compiled, in order of arrival.

    A message holds its grammars until its turns are queued. A grammar that was evicted meanwhile would be
    compiled again in the engine's thread.
    """

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
        self._threads = ThreadPoolExecutor(
            _NUM_THREADS, thread_name_prefix="grammar", initializer=_let_others_go_first
        )
        self._held: list[_Held] = []
        self._compiling: dict[StructuredOutput, Future[Grammar]] = {}

    def grammars_of(
        self,
        message: Submit,
        asked: Iterable[StructuredOutput | None],
        known: Compiled = MappingProxyType({}),
    ) -> dict[StructuredOutput, Grammar] | None:
        """Return the grammars of a message's turns; if one is not compiled, hold the message and return None.

        Args:
          message: the message.
          asked: the form of each of its turns.
          known: what `take_ready` yielded with the message.

        Raises the error of a form that cannot be compiled, and GrammarQueueFullError if too many grammars are
        compiling.
        """
        forms = dict.fromkeys([form for form in asked if form is not None])
        if self._grammars is None or not forms:
            return {}
        found: dict[StructuredOutput, Grammar] = {}
        missing: list[StructuredOutput] = []
        for form in forms:
            grammar = known.get(form) or self._grammars.kept(form)
            if isinstance(grammar, PensieveError):
                raise grammar
            if grammar is None:
                missing.append(form)
            else:
                found[form] = grammar
        if not missing:
            return found
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
        self._held.append(_Held(message, found, {form: self._compiling[form] for form in missing}))
        return None

    @property
    def has_begun(self) -> bool:
        """Whether any grammar was compiled here; `take_ready` yields nothing before."""
        return self._sockets is not None

    def forget(self, message: Submit) -> None:
        """Hold a message no more. Grammars that only it waits for are not compiled, if that has not begun."""
        self._held = [one for one in self._held if one.message is not message]
        wanted = {form for one in self._held for form in one.compiling}
        for form, future in list(self._compiling.items()):
            if form not in wanted and future.cancel():
                del self._compiling[form]

    def take_ready(self) -> Iterator[tuple[Submit, Compiled]]:
        """Yield and forget the messages whose grammars are compiled, with these or the errors."""
        self._drain()  # first, also without messages: a notice may come after its message was taken
        for form, future in list(self._compiling.items()):
            if future.done():
                del self._compiling[form]
        held, self._held = self._held, []
        for one in held:
            if not all(future.done() for future in one.compiling.values()):
                self._held.append(one)
                continue
            yield one.message, {**one.known, **{form: _result(each) for form, each in one.compiling.items()}}

    def close(self) -> None:
        """Start no more compilations, and close the sockets."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for end in self._sockets or ():
            end.close()

    def _notify(self, future: Future[Grammar]) -> None:
        """Make the watched socket readable; called in any thread, when a compilation ends or is cancelled."""
        assert self._sockets is not None
        with contextlib.suppress(BlockingIOError):  # it is readable already
            self._sockets[1].send(b"\0")

    def _drain(self) -> None:
        if self._sockets is None:
            return
        with contextlib.suppress(BlockingIOError):
            while self._sockets[0].recv(4096):
                pass


def _let_others_go_first() -> None:
    """Lower the priority of the calling thread; only Linux has one for each thread."""
    if sys.platform == "linux":
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS
        os.setpriority(os.PRIO_PROCESS, 0, min(niceness, _HIGHEST_NICENESS))


def _result(compiled: Future[Grammar]) -> Grammar | PensieveError:
    error = compiled.exception()
    if error is None:
        return compiled.result()
    if isinstance(error, PensieveError):
        return error
    _log.error("a grammar could not be compiled", exc_info=error)  # of the library; the process goes on
    return GrammarFailedError("the grammar could not be compiled; see the log")
