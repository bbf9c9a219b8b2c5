"""The location of a history in Postgres: a URL, parsed so that its password is never shown.

Owns: which URLs are accepted, which parts may be shown, and the name of the schema of a history's tables.
Does not know: psycopg, or how to connect.

A URL is libpq's, `postgresql://USER@HOST/DATABASE?sslmode=require`, with one additional parameter:
`namespace`, the schema of the tables. A password belongs in a file (`~/.pgpass`) or the environment
(PGPASSWORD), since other users can read command lines. If a URL has one, it is only passed to libpq.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard
from urllib.parse import unquote

from pensieve_jax.core.errors import ConfigError

_SCHEMES: Final = ("postgresql://", "postgres://")
_NAMESPACE: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}\Z")
_UNQUOTED: Final = re.compile(r"%(?![0-9a-fA-F]{2})|%00|[\s#]")
_HOSTS: Final = re.compile(r"(?:(?:\[[^\]]*\]|[^:,]*)(?::\d*)?(?:,|\Z))*\Z")
DEFAULT_NAMESPACE: Final = "pensieve"
_SHOWN: Final = ("host", "port", "user", "dbname", "namespace")  # of the parameters
_HIDDEN: Final = "postgresql://..."


@dataclass(frozen=True, slots=True)
class PostgresLocation:
    """A parsed URL.

    Attributes:
      url: the URL for libpq; it may contain a password.
      namespace: the schema of the tables.
      shown: the URL for messages, without a password.
      secret: the password as written in the URL, which must not be shown; "" for none.
    """

    url: str = field(repr=False)
    namespace: str
    shown: str
    secret: str = field(repr=False, default="")

    def without_secret(self, text: str) -> str:
        """Return `text` with every occurrence of the password removed."""
        for secret in {self.secret, unquote(self.secret)} - {""}:
            text = text.replace(secret, "***")
        return text


def is_postgres(history: Any) -> TypeGuard[str]:
    """Return whether `history` is a URL of Postgres."""
    return isinstance(history, str) and history.startswith(_SCHEMES)


def parse(url: str) -> PostgresLocation:
    """Parse a URL; raise ConfigError, which shows nothing of it."""
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    server, slash, database = rest.partition("/")
    who, at, where = server.rpartition("@")
    user, _, password = who.partition(":")
    # A password that contains one of these characters unescaped could end up in a part that is shown.
    if _UNQUOTED.search(url) or "@" in who + database + query or not _HOSTS.match(where):
        limit = "postgresql://USER:PASSWORD@HOST:PORT/DATABASE?NAME=VALUE"
        hint = "write every character of a part except letters and digits as % and two hexadecimal digits"
        raise ConfigError("history", _HIDDEN, limit, hint)
    parameters = [part.partition("=")[::2] for part in query.split("&") if part]
    namespace = dict(parameters).get("namespace", DEFAULT_NAMESPACE)
    if not _NAMESPACE.match(namespace) or namespace.startswith("pg_"):
        limit = "the name of a schema: lower-case letters, digits and _"
        raise ConfigError("history's namespace", namespace, limit)
    others = "&".join(f"{name}={value}" for name, value in parameters if name != "namespace")
    told = "&".join(f"{name}={value}" for name, value in parameters if name in _SHOWN)
    return PostgresLocation(
        url=f"{scheme}://{rest}" + (f"?{others}" if others else ""),
        namespace=namespace,
        shown=f"{scheme}://{user}{at}{where}{slash}{database}" + (f"?{told}" if told else ""),
        secret=dict(parameters).get("password", password),
    )
