"""Processes for long texts and bodies, started when they are needed.

Owns: their number, the time that one request may take, and starting another process for one that died.
Does not know: what texts are for. Called by `Tokenizer` for long texts, and by `HttpRequest.decode` for
long bodies, both in threads of `server.workers`.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, Final

from pensieve_jax.server.http.bodies import Offers
from pensieve_jax.server.http.errors import ApiError

WORKER: Final = "pensieve_jax.server.http.text_worker"
MIN_LONG: Final = 2**16
"""Characters of a text, or bytes of a body, from which on a process reads it. Shorter ones take some ten
milliseconds and some ten megabytes."""
NUM_PROCESSES: Final = 2
TIME_LIMIT_S: Final = 10.0
"""Limit of one request. A million characters of usual text take half a second."""
MEMORY_BYTES: Final = 2**30
"""Memory that a process may take beyond what it has after its start."""
_ROOT = Path(__file__).parents[3]  # the directory from which the package is imported


class TextProcesses:
    """The processes of one server. Used by several threads.

    Attributes:
      min_characters: texts of at least this length should be encoded here; see `LongTexts`.
    """

    min_characters = MIN_LONG

    def __init__(
        self, tokenizer_json: str, *, time_limit_s: float = TIME_LIMIT_S, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        """Start no process yet; `tokenizer_json` is the text of a tokenizer.json."""
        self._tokenizer_json = tokenizer_json
        self._time_limit_s = time_limit_s
        self._memory_bytes = memory_bytes
        # Places of processes. None is one that has not been started, or has died.
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(NUM_PROCESSES):
            self._idle.put(None)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, as the tokenizer's backend gives them.

        Raises what the backend raises, and ApiError 413 beyond the limit of time or memory.
        """
        return list(self._ask("The text", "encode", text))

    def offsets(self, text: str) -> list[int]:
        """Return where the tokens of a text begin, in characters; raise as `encode`."""
        return list(self._ask("The text", "offsets", text))

    def decode_body[T](self, body: bytes, kind: type[T], offers: Offers) -> tuple[T, tuple[str, ...]]:
        """Decode a body as `server.http.bodies.decode_body` does.

        Raises the errors of `decode_body`, and ApiError as `encode`.
        """
        decoded: tuple[T, tuple[str, ...]] = self._ask("The body", "decode_body", body, kind, offers)
        return decoded

    def start(self) -> None:
        """Start the first process, so that the first long text need not wait for it."""
        process = self._idle.get()
        self._idle.put(process or _Process(self._tokenizer_json, self._memory_bytes))

    def close(self) -> None:
        """End all processes. No other call may run or follow."""
        for _ in range(NUM_PROCESSES):
            process = self._idle.get_nowait()
            if process is not None:
                process.close()

    def _ask(self, subject: str, *request: Any) -> Any:
        process = self._idle.get()
        try:
            if process is not None and not process.is_alive:  # it was killed while it had nothing to do
                process.kill()
                process = None
            if process is None:
                process = _Process(self._tokenizer_json, self._memory_bytes)
            try:
                answer = process.ask(request, self._time_limit_s)
            except (EOFError, OSError, TimeoutError) as error:
                process.kill()
                process = None
                is_late = isinstance(error, TimeoutError)
                limit = f"{self._time_limit_s:g} s" if is_late else f"{self._memory_bytes >> 20} MiB"
                sentence = f"{subject} takes more than {limit} to read; send a shorter one."
                raise ApiError(413, "request_too_large", sentence) from error
        finally:
            self._idle.put(process)
        if not isinstance(answer, BaseException):
            return answer
        try:
            raise answer
        finally:
            del answer, request  # its traceback has this frame: no cycle may keep the text


class _Process:
    """One process and the connection to it."""

    def __init__(self, tokenizer_json: str, memory_bytes: int) -> None:
        self._connection, theirs = Pipe()
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", WORKER, str(theirs.fileno()), str(memory_bytes)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # only the server handles Ctrl-C in a terminal
                env={**os.environ, "PYTHONPATH": path},
            )
        self._connection.send_bytes(tokenizer_json.encode())

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: tuple[Any, ...], time_limit_s: float) -> Any:
        """Return the answer; raise TimeoutError, and EOFError or OSError if the process has died."""
        self._connection.send_bytes(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))
        if not self._connection.poll(time_limit_s):
            raise TimeoutError
        return pickle.loads(self._connection.recv_bytes())

    def kill(self) -> None:
        self._process.kill()
        self.close()

    def close(self) -> None:
        self._connection.close()
        self._process.wait()
