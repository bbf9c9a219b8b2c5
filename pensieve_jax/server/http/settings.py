"""What whoever starts a server chooses about HTTP.

Owns: the fields, their defaults, and which of them do not go together.
Does not know: command lines, or what else a server is made of.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from pensieve_jax.core.errors import ConfigError

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]A-Z]+)(:\d{1,5})?\Z")
MAX_BODY_BYTES = 10 * 2**20
MAX_INDEX_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server listens, whom it lets in, and how long it waits.

    Attributes:
      host, port: where it listens; port 0 takes a free one.
      api_keys_file: lines `owner:sha256 of the key`; None asks for no key, on loopback only.
      cors_origin: pages of these origins, such as "https://chat.example.com", may read answers; "*" is any.
      allowed_hosts: names that clients may call this server by, beside those of loopback; without keys, a
        request under any other name is refused.
      served_model_name: what /v1/models calls the model; None: as it was given.
      chat_history: "memory" keeps turns of Chat Completions as long as their state, "durable" in the history.
      max_index_bytes: of turns that are remembered, to find what a request goes on from; the history has
        all durable ones.
      tools: that a request offers the model, which calls none: "refuse" refuses the request by name, "ignore"
        serves it without them. A request that demands a call is refused in either case.
      max_body_bytes: of a request; `body_timeout_s`: until it must have come in.
      max_in_flight_per_key: turns that one key may have at a time, where keys are asked for.
      queue_per_running: how many turns may wait for each that can run.
      queue_timeout_s: how long a turn waits for its place before it is refused.
      heartbeat_s: a stream that is silent for so long gets a comment.
      stall_timeout_s: a client that takes nothing for so long is let go.
      otel_endpoint: where spans of turns go, over OTLP and HTTP; None makes none.
      drain_s: how long running turns may go on when the server is told to end.
      is_routed: that there are several engines, one for each root: contexts that begin alike, and are kept in
        memory only, then have the same root.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys_file: str | None = None
    cors_origin: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    served_model_name: str | None = None
    chat_history: str = "memory"
    max_index_bytes: int = MAX_INDEX_BYTES
    tools: str = "refuse"
    max_body_bytes: int = MAX_BODY_BYTES
    body_timeout_s: float = 30.0
    max_in_flight_per_key: int = 64
    queue_per_running: int = 2
    queue_timeout_s: float = 60.0
    heartbeat_s: float = 15.0
    stall_timeout_s: float = 30.0
    otel_endpoint: str | None = None
    drain_s: float = 30.0
    is_routed: bool = False

    def __post_init__(self) -> None:
        """Raise ConfigError for what cannot be, or would let anybody in."""
        if self.chat_history not in ("memory", "durable"):
            raise ConfigError("chat_history", self.chat_history, "memory or durable")
        if self.tools not in ("refuse", "ignore"):
            raise ConfigError("tools", self.tools, "refuse or ignore")
        for origin in self.cors_origin:
            if origin != "*" and not _ORIGIN.match(origin):
                limit = "scheme://host or scheme://host:port, as browsers send it, or *"
                raise ConfigError("cors_origin", origin, limit)
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", self.port, "from 0 to 65535")
        if self.api_keys_file is None and not self.is_loopback:
            limit = "a loopback address, such as 127.0.0.1, while no keys are asked for"
            raise ConfigError("host", self.host, limit, "give --api_keys_file to serve others")
        for name in ("max_index_bytes", "max_body_bytes", "max_in_flight_per_key", "queue_per_running"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "at least 1")
        timeouts = ("body_timeout_s", "queue_timeout_s", "heartbeat_s", "stall_timeout_s")
        for name in timeouts:
            if not getattr(self, name) > 0:
                raise ConfigError(name, getattr(self, name), "above 0")
        if self.otel_endpoint is not None and not self.otel_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                "otel_endpoint", self.otel_endpoint, "a URL that begins with http:// or https://"
            )
        if not self.drain_s >= 0:
            raise ConfigError("drain_s", self.drain_s, "at least 0")

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this machine reach it."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether an address, or `localhost`, is of this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
