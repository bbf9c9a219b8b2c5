"""Who may ask, and whose are the things that they ask for.

Owns: the file of keys, and finding the owner of the key that a request shows.
Does not know: HTTP beyond the Authorization header's text, or what owners own.

A line of the file is `owner:sha256` with the SHA-256 of the key in hexadecimal digits; empty lines and those
that begin with # are skipped. An owner may have several keys. Keys themselves are nowhere.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from pathlib import Path

from pensieve_jax.core.errors import ConfigError

_LINE = re.compile(r"(?P<owner>[A-Za-z0-9_.@-]{1,64}):(?P<digest>[0-9a-fA-F]{64})\Z")
_log = logging.getLogger(__name__)
_WELL_FORMED = (
    "lines of owner:sha256, with the owner's name of letters, digits, _.@- and 64 hexadecimal digits"
)


class ApiKeys:
    """The keys of one file, which can be read again while requests come in."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        """Read the file; None asks nobody for a key. Raises ConfigError naming `api_keys_file`."""
        self._path = None if path is None else Path(path)
        self._owners: list[tuple[bytes, str]] = []
        if self._path is not None:
            self._owners = _read(self._path)

    @property
    def are_asked_for(self) -> bool:
        """Whether a request needs one."""
        return self._path is not None

    def reload(self) -> int:
        """Read the file again and return how many keys there are; ConfigError leaves the old ones."""
        if self._path is not None:
            self._owners = _read(self._path)
            num_owners, num_keys = len({owner for _, owner in self._owners}), len(self._owners)
            _log.info(
                "keys read again: %s, %s",
                f"{num_owners} owner{'s' * (num_owners != 1)}",
                f"{num_keys} key{'s' * (num_keys != 1)}",
            )
        return len(self._owners)

    def owner(self, authorization: str | None) -> str | None:
        """Whose key an Authorization header shows; None for no known one.

        All digests are compared, each in constant time, so that time tells nothing of a key.
        """
        if not self.are_asked_for:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        shown = hashlib.sha256(key.strip(" \t").encode("latin-1", "replace")).digest()  # a header's own bytes
        found = None
        for digest, owner in self._owners:
            if hmac.compare_digest(digest, shown):
                found = owner
        return found


def _read(path: Path) -> list[tuple[bytes, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("api_keys_file", str(path), f"a readable file ({error})") from error
    owners = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.match(line.strip())
        if match is None:  # the line itself may be a key that somebody put there: it is not shown
            raise ConfigError("api_keys_file", str(path), _WELL_FORMED, f"correct line {number}")
        owners.append((bytes.fromhex(match["digest"]), match["owner"]))
    if not owners:
        raise ConfigError("api_keys_file", str(path), "a file of at least one key", "or nobody could ask")
    return owners
