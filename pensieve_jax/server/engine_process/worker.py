"""The engine's process: `python -m pensieve_jax.server.engine_process.worker FD`.

Owns: the creation of the engine from the front end's first message, the report of a failed start, and the
handling of signals and of a front end that dies during the start.
Does not know: turns, which `EngineServer` serves.

This process ignores Ctrl-C and SIGTERM, because the front end handles them and drains first. It ends when its
socket is closed.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Final

from model_defs import ModelError
from pallas_kernels.ragged_paged_attention import AttentionArgumentError
from pensieve_jax.assembly import Assembled, assemble
from pensieve_jax.core.errors import PensieveError
from pensieve_jax.describe import describe
from pensieve_jax.device.model_runner import ModelRunner
from pensieve_jax.engine.runner import Runner
from pensieve_jax.server.async_engine import EngineInfo
from pensieve_jax.server.engine_process.engine_server import EngineServer
from pensieve_jax.server.engine_process.messages import Failed, Start, sent_error
from pensieve_jax.server.engine_process.wire import FrameReader, FrameWriter, WireError
from pensieve_jax.server.logs import log_to, log_uncaught

EXIT_REFUSED: Final = 2
_READ_BYTES = 1 << 16
_POLL_MS = 500


def main(make: Callable[[Start], Assembled] | None = None) -> int:
    """Serve the front end at the file descriptor of the command line, and return the exit status.

    `make` builds the engine; a program of the laboratory has its own.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as front:
        start = _first_message(front)
        if start is None:
            return 0
        if start.log_format is not None:
            log_to(log_format=start.log_format)
        ready = threading.Event()
        threading.Thread(target=_leave_with_front, args=(front, ready), daemon=True).start()
        try:
            parts = (make or assembled)(start)
        except (PensieveError, ModelError, AttentionArgumentError) as error:
            front.sendall(FrameWriter().frame(Failed(sent_error(error))))
            return EXIT_REFUSED
        finally:
            ready.set()  # stops the thread, which would mistake the close of this socket for the front end's
        if start.log_format is not None:
            log_uncaught()  # from now on, an error's message might quote a prompt
        if parts.engine.grammars is not None:
            parts.engine.grammars.prepare()  # up to a second, which would delay every stream later
        gc.collect()
        gc.freeze()  # existing objects are permanent, so the collector need not scan them again
        EngineServer(parts.engine, parts.tokenizer, front, info=_info(parts, start)).run()
    return 0


def _first_message(front: socket.socket) -> Start | None:
    """Return the first message, or None if the front end has disconnected."""
    reader = FrameReader(Start)
    while data := front.recv(_READ_BYTES):
        for message in reader.feed(data):
            if not isinstance(message, Start):
                raise WireError(f"The first message is {type(message).__name__}, but must be Start.")
            return message
    return None


def _leave_with_front(front: socket.socket, ready: threading.Event) -> None:
    """Exit if the front end closes the socket during the start.

    No other code reads the socket during the minutes in which weights are loaded and steps are compiled.
    """
    poll = select.poll()
    poll.register(front, getattr(select, "POLLRDHUP", 0))  # POLLHUP is reported on every system
    while not ready.is_set():
        if poll.poll(_POLL_MS) and not ready.is_set():
            os._exit(0)


def assembled(start: Start, wrap: Callable[[ModelRunner], Runner] | None = None) -> Assembled:
    """Build the engine that the front end asks for; see `assemble` for `wrap` and errors."""
    return assemble(
        start.model,
        dtype=start.dtype,
        history=start.history,
        synchronous=start.synchronous,
        config=start.config,
        progress=start.progress,
        may_make_history=start.may_make_history,
        wrap=wrap,
    )


def _info(parts: Assembled, start: Start) -> EngineInfo:
    return EngineInfo(
        model_name=parts.model_name,
        source=parts.source,
        fingerprint=parts.fingerprint,
        history=start.history or "",
        limits=parts.engine.limits,
        max_num_running=parts.config.scheduler.running_limit,
        chunk_tokens=parts.config.cache.chunk_tokens,
        description=dict(describe(parts)),
    )


if __name__ == "__main__":
    sys.exit(main())
