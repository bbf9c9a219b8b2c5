"""A proxy between clients and a server that records both sides.

Owns: its sockets, forwarding of requests and answers, and the list of exchanges.
Does not know: what the bodies mean.
Called by `programs.check_clients`.

Answers are forwarded chunk by chunk, so that streams stay streams.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

_PIECE_BYTES = 65536
_TIMEOUT_S = 600.0
_OF_ONE_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its answer.

    Attributes:
      request, answer: their bodies as text; "" for none. If the client disconnected, the part of the answer
        that it received.
      kind: the answer's content type, without parameters.
      headers: of the answer, with names in lower case.
    """

    method: str
    path: str
    request: str
    status: int
    kind: str
    headers: Mapping[str, str]
    answer: str


class Recorder(ThreadingHTTPServer):
    """Recording proxy that listens from construction until `close`; a context manager.

    Attributes:
      exchanges: in the order in which they ended.
    """

    daemon_threads = True

    def __init__(self, target: str, *, port: int = 0, path: Path | None = None) -> None:
        """Forward to `target`, such as http://127.0.0.1:8000; append JSON lines to `path` if given."""
        found = urlsplit(target)
        self.target = (found.hostname or "127.0.0.1", found.port or 80)
        self.exchanges: list[Exchange] = []
        self._path = path
        self._changed = threading.Condition()
        self._num_open = 0
        super().__init__(("127.0.0.1", port), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """URL to which clients connect."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def wait_for_all(self, timeout_s: float = _TIMEOUT_S) -> None:
        """Wait until all exchanges are recorded; a client may have its last byte before that."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._num_open, timeout_s):
                raise TimeoutError(f"{self._num_open} exchanges have not ended after {timeout_s:g} s")

    @contextmanager
    def open_exchange(self) -> Iterator[None]:
        """Count an exchange as open within the context."""
        with self._changed:
            self._num_open += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_open -= 1
                self._changed.notify_all()

    def keep(self, exchange: Exchange) -> None:
        """Add an exchange to the list."""
        with self._changed:
            self.exchanges.append(exchange)
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(exchange)) + "\n")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect; report any other error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def close(self) -> None:
        """Stop listening and join the thread."""
        self.shutdown()
        self._thread.join()
        self.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    """Handler that forwards one request and its answer."""

    server: Recorder

    def log_message(self, *_: object) -> None:
        """Override the default, which writes each request to standard error."""

    def _pass_on(self) -> None:
        with self.server.open_exchange():
            self._exchange()

    def _exchange(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length) if length else None
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_ONE_HOP}
        headers["accept-encoding"] = "identity"
        connection = HTTPConnection(*self.server.target, timeout=_TIMEOUT_S)
        try:
            connection.request(self.command, self.path, body, headers)
            self._answer(connection, (body or b"").decode())
        except HTTPException as error:
            self.send_error(502, str(error))
        finally:
            connection.close()

    do_GET = do_POST = do_DELETE = do_HEAD = _pass_on

    def _answer(self, connection: HTTPConnection, request: str) -> None:
        answer = connection.getresponse()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        self.send_response_only(answer.status)
        for name, value in headers.items():
            if name not in _OF_ONE_HOP:
                self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        pieces = []
        try:
            while piece := answer.read1(_PIECE_BYTES):
                pieces.append(piece)
                self.wfile.write(piece)
        finally:
            kind = headers.get("content-type", "").partition(";")[0]
            text = b"".join(pieces).decode(errors="replace")
            self.server.keep(Exchange(self.command, self.path, request, answer.status, kind, headers, text))


def main() -> None:
    """`recorder.py TARGET PORT FILE`, until it is interrupted."""
    target, port, path = sys.argv[1:]
    with Recorder(target, port=int(port), path=Path(path)) as recorder:
        print(f"recording {target} at {recorder.address}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
