"""A request whose body does not arrive, for which a server that drains waits."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from tests.deadlines import TIMEOUT_S

_HEAD = (
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: 9\r\nexpect: 100-continue\r\n\r\n"
)


@contextlib.contextmanager
def unfinished_request(host: str, port: int) -> Iterator[None]:
    """Keep such a request open; the server has asked for its body when the block is entered."""
    with socket.create_connection((host, port), TIMEOUT_S) as client:
        client.sendall(_HEAD)
        assert client.recv(1000).startswith(b"HTTP/1.1 100 ")
        yield
