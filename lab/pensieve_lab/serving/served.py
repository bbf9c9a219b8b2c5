"""`pensieve serve` as a child process of a script.

Owns: the process and its address.
Does not know: what is requested of it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from pensieve_jax import PensieveError

SERVE: Final = ("-c", "from pensieve_jax.commands.main import main; main()", "serve")
"""Arguments of the interpreter that run `pensieve serve`."""
_ADDRESS = re.compile(r"http://(?P<host>[^:/]+):(?P<port>\d+)")
_DRAIN_S = 1  # the results of turns that still run at the end are not needed
_STOP_S = 60.0


class ServerEndedError(PensieveError):
    """The server ended before it was ready."""


class ServedProcess:
    """Server process until `close`; a context manager.

    Attributes:
      host, port: address that it listens on.
    """

    def __init__(self, flags: Sequence[str], launcher: Sequence[str] = SERVE) -> None:
        """Start `launcher` on a free port and wait until it is ready; raises ServerEndedError."""
        command = [sys.executable, *launcher, "--port=0", f"--drain_s={_DRAIN_S}", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            self.host, self.port = self._wait()
        except BaseException:  # Ctrl-C as well: no caller has the object yet to close it
            self.close()
            raise

    @property
    def address(self) -> str:
        """Base URL of the server."""
        return f"http://{self.host}:{self.port}"

    def close(self) -> None:
        """Stop the server; a second call does nothing. A server that does not stop in time is killed."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _wait(self) -> tuple[str, int]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = _ADDRESS.search(line)
            if found:
                return found["host"], int(found["port"])
        raise ServerEndedError(
            f"The server ended with status {self.process.wait(_STOP_S)} before it was ready."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
