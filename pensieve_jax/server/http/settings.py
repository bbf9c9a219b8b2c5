"""HTTP settings of a server.

Owns: the fields, their defaults, and the checks of their values and combinations.
Does not know: command lines, or the other parts of a server.
Called by `pensieve serve` and the Ray Serve app.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, get_args

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.history.server_tables.changes import StorageQuota
from pensieve_jax.server.http.bodies import Offers
from pensieve_jax.server.http.ledger import Budget, Resource, budgets_of
from pensieve_jax.text.tool_formats import AUTO, Parsers, reasoning_format, tool_format

TOOLS: Final = get_args(Offers.__value__)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@:\[\]A-Z]+)(:\d{1,5})?\Z")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}\Z")
_DATE = re.compile(r"\d{4}-\d\d-\d\d\Z")
_DATE_S: Final = 36 * 3600.0  # from its beginning in UTC to its end in the last time zone
MAX_BODY_BYTES = 10 * 2**20
MAX_INDEX_BYTES = 256 * 2**20
DEFAULT_QUOTA: Final = StorageQuota(bytes=10 * 2**30, conversations=100_000, responses=100_000)
"""What one key may store by default, if there are keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Addresses, access rules, limits and timeouts of a server.

    Attributes:
      host, port: the address to listen on; port 0 chooses a free port.
      api_keys_file: file with lines `owner:sha256 of the key`. Without it and `api_key_sha256`, requests need
        no key, and only a loopback address is allowed.
      api_key_sha256: SHA-256, in hexadecimal digits, of the only key, in place of a file. All of its clients
        are one owner, as without keys.
      cors_origin: origins, such as "https://chat.example.com", whose pages may read responses; "*" is any.
      allowed_hosts: Host names that clients may use besides those of loopback; without keys, requests with
        any other name are rejected.
      served_model_name: the model name in /v1/models; None uses the name that the server was started with.
      chat_history: "memory" keeps turns of Chat Completions as long as their KV cache, "durable" stores them
        in the history.
      max_index_bytes: memory for the index that finds the turn a request continues from; the history has all
        durable turns.
      tools: how to treat tools in requests: "auto" renders them, and rejects the request if the model's chat
        template takes none, or if some are not functions; "functions" serves the request without those that
        are not functions; "ignore" serves it without tools. A request that demands a call of a tool that is
        left out is always rejected.
      tool_call_parser, reasoning_parser: as in `EngineConfig`.
      max_body_bytes: size limit of a request body.
      body_timeout_s: time limit for receiving a body.
      max_in_flight_per_key: turns that one key may have at a time, if there are keys.
      budgets, key_budgets: how much all clients together, and one key, may hold of a resource; names and
        defaults are in `server.http.ledger`.
      max_stored_bytes_per_key, max_conversations_per_key, max_responses_per_key: what one key may store; 0
        does not limit. None is a default of `DEFAULT_QUOTA` if there are keys, and otherwise does not limit.
      idle_conversation_days: time after which an idle stored conversation is deleted; None keeps it.
      confirm_clock: a date, such as 2026-11-30, until whose end the system clock is right although far ahead
        of the history; None confirms nothing.
      queue_per_running: length of a key's queue, as a multiple of the turns that can run at a time.
      queue_timeout_s: time after which a queued turn is rejected.
      heartbeat_s: a stream that is silent for this long gets a comment.
      stall_timeout_s: a client that takes no data for this long is disconnected.
      otel_endpoint: where spans of turns are sent, over OTLP and HTTP; None makes none.
      drain_s: how long running turns may continue when the server is told to stop.
      is_routed: whether there are several engines, and all turns of one root run on one of them. Contexts
        that are not durable then have the same root if they begin with the same messages.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys_file: str | None = None
    api_key_sha256: str | None = None
    cors_origin: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    served_model_name: str | None = None
    chat_history: str = "memory"
    max_index_bytes: int = MAX_INDEX_BYTES
    tools: Offers = "auto"
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    max_body_bytes: int = MAX_BODY_BYTES
    body_timeout_s: float = 30.0
    max_in_flight_per_key: int = 64
    budgets: Mapping[str, int] = field(default_factory=dict)
    key_budgets: Mapping[str, int] = field(default_factory=dict)
    max_stored_bytes_per_key: int | None = None
    max_conversations_per_key: int | None = None
    max_responses_per_key: int | None = None
    idle_conversation_days: int | None = None
    confirm_clock: str | None = None
    queue_per_running: int = 2
    queue_timeout_s: float = 60.0
    heartbeat_s: float = 15.0
    stall_timeout_s: float = 30.0
    otel_endpoint: str | None = None
    drain_s: float = 30.0
    is_routed: bool = False

    def __post_init__(self) -> None:
        """Raise ConfigError for invalid values, and for a public address without keys."""
        if self.chat_history not in ("memory", "durable"):
            raise ConfigError("chat_history", self.chat_history, "memory or durable")
        if self.tools not in TOOLS:
            raise ConfigError("tools", self.tools, f"one of {', '.join(TOOLS)}")
        tool_format(self.tool_call_parser, None)
        reasoning_format(self.reasoning_parser, None)
        for origin in self.cors_origin:
            if origin != "*" and not _ORIGIN.match(origin):
                limit = "scheme://host or scheme://host:port, as browsers send it, or *"
                raise ConfigError("cors_origin", origin, limit)
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", self.port, "from 0 to 65535")
        if self.api_keys_file is not None and self.api_key_sha256 is not None:
            limit = "left out beside one key: give PENSIEVE_API_KEY or --api_key, or the file"
            raise ConfigError("api_keys_file", self.api_keys_file, limit)
        if self.api_key_sha256 is not None and not _SHA256.match(self.api_key_sha256):
            # The value is not shown: it may be a key, given by mistake.
            raise ConfigError("api_key_sha256", "(not shown)", "64 hexadecimal digits")
        if not self.needs_keys and not self.is_loopback:
            limit = "a loopback address, such as 127.0.0.1, if there are no keys"
            advice = "set PENSIEVE_API_KEY or give --api_keys_file to serve other machines"
            raise ConfigError("host", self.host, limit, advice)
        for name in ("max_index_bytes", "max_body_bytes", "max_in_flight_per_key", "queue_per_running"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "at least 1")
        self.resource_budgets()
        if self.key_budgets and self.api_keys_file is None:
            hint = "give --api_keys_file, or --budgets for all clients"
            raise ConfigError("key_budgets", ", ".join(self.key_budgets), "empty without keys", hint)
        for name in ("max_stored_bytes_per_key", "max_conversations_per_key", "max_responses_per_key"):
            number = getattr(self, name)
            if number is not None and number < 0:
                raise ConfigError(name, number, "at least 1, or 0 for no limit")
        if self.idle_conversation_days is not None and self.idle_conversation_days < 1:
            raise ConfigError("idle_conversation_days", self.idle_conversation_days, "at least 1")
        if self.confirm_clock is not None:
            _end_of_date_s(self.confirm_clock)
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
    def needs_keys(self) -> bool:
        """Whether requests need a key."""
        return self.api_keys_file is not None or self.api_key_sha256 is not None

    def resource_budgets(self) -> dict[Resource, Budget]:
        """Return the budget of each resource; raise ConfigError for one that is unknown or below 1."""
        return budgets_of(self.budgets, self.key_budgets, max_body_bytes=self.max_body_bytes)

    @property
    def confirmed_until_s(self) -> float | None:
        """The time until which the system clock is right, in seconds since the epoch."""
        return None if self.confirm_clock is None else _end_of_date_s(self.confirm_clock)

    @property
    def storage_quota(self) -> StorageQuota:
        """The most that each key may store."""
        default = StorageQuota() if self.api_keys_file is None else DEFAULT_QUOTA

        def limit(given: int | None, default: int | None) -> int | None:
            return default if given is None else given or None

        return StorageQuota(
            bytes=limit(self.max_stored_bytes_per_key, default.bytes),
            conversations=limit(self.max_conversations_per_key, default.conversations),
            responses=limit(self.max_responses_per_key, default.responses),
        )

    @property
    def parsers(self) -> Parsers:
        """How replies are read."""
        return Parsers(self.tool_call_parser, self.reasoning_parser)

    @property
    def is_loopback(self) -> bool:
        """Whether only programs on this machine can reach the server."""
        return is_loopback(self.host)


def _end_of_date_s(text: str) -> float:
    """Return when a date has ended everywhere on Earth; raise ConfigError for another text."""
    try:
        if not _DATE.match(text):
            raise ValueError(text)
        return datetime.fromisoformat(f"{text}T00:00:00+00:00").timestamp() + _DATE_S
    except ValueError:
        raise ConfigError("confirm_clock", text, "today's date, such as 2026-11-30") from None


def is_loopback(host: str) -> bool:
    """Return whether a host is `localhost` or a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
