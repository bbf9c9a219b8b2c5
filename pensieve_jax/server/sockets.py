"""Listening sockets: an address is bound, and refused, before anything that takes time.

Owns: the options of a listening socket, the error of an address that cannot be used, and the URL of a socket.
Does not know: HTTP, or what is served. It imports little, so that a used port is refused at once.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from pensieve_jax.core.errors import ConfigError

_POLL_S: Final = 0.2
_UNACKNOWLEDGED_MS: Final = 30_000  # longest time for which a client may leave sent data unacknowledged


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to this address. It does not listen yet, so it refuses clients.

    Bind before the minutes of loading, so that an address conflict fails early. Raises ConfigError for an
    address that is in use or not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # closes connections whose client stops reading
                bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        problem = error.strerror or str(error)
        raise ConfigError(
            "--host and --port", f"{host}:{port}", "a free address of this machine", problem
        ) from error
    return bound


async def bind_in_time(host: str, port: int, seconds: float) -> socket.socket:
    """Call `bind`, and retry for `seconds` while another process still holds the address."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + seconds
    while True:
        try:
            return bind(host, port)
        except ConfigError:
            if loop.time() > until_s:
                raise
        await asyncio.sleep(_POLL_S)


def address_of(listening: socket.socket) -> str:
    """Return the URL at which clients reach the socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
