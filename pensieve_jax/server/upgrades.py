"""Requests that offer another protocol: they are read in HTTP/1.1, as if they had not.

Owns: reading on behind the head of such a request.
Does not know: limits, connections, or which protocols there are: whoever reads a connection says.

Some clients offer HTTP/2 with whatever they ask (`Upgrade: h2c`, as Java's own does), and a server without it
is to answer in HTTP/1.1. The parser stops behind such a head, and takes the body for the other protocol's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import httptools


def head_without_upgrade(
    method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]
) -> bytes:
    """A request's head as it would be without its offer; names of `headers` are in lower case."""
    fields = [b"%b: %b\r\n" % field for field in headers if field[0] != b"upgrade"]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version.encode(), b"".join(fields))


class StayingParser:
    """The parser of one connection; what it lacks here it has from httptools."""

    def __init__(
        self, parser: httptools.HttpRequestParser, protocol: object, declined: Callable[[], bytes | None]
    ) -> None:
        """In place of `parser`, whose callbacks are `protocol`'s.

        `declined` is the head to be read in place of the one behind which the parser has stopped; None where
        that offered nothing, but asked for a tunnel: what comes with it is dropped.
        """
        self._parser = parser
        self._protocol = protocol
        self._declined = declined

    def feed_data(self, data: bytes) -> None:
        """Parse; raises what httptools raises, but no HttpParserUpgrade."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                head = self._declined()
                if head is None:
                    return
                data = head + data[stopped.args[0] :]
            # One that has stopped never reads on.
            self._parser = httptools.HttpRequestParser(cast(Any, self._protocol))
            with suppress(AttributeError):  # as uvicorn has it, for those that have it
                self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def __getattr__(self, name: str) -> Any:
        """What is known of the request."""
        return getattr(self._parser, name)
