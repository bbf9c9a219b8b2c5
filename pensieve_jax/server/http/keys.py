"""API keys and their owners.

Owns: the file of keys, and finding the owner of a request's key.
Does not know: HTTP beyond the texts of two headers, or what owners own.
Called by the application, by `pensieve serve`, and by the Ray Serve app.

A line of the file is `owner:sha256` with the SHA-256 of the key in hexadecimal digits. Empty lines and lines
that begin with # are skipped. An owner may have several keys. The file contains no keys, only their digests.
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
    "lines of owner:sha256, where the owner has letters, digits and _.@- and the digest 64 hexadecimal digits"
)


class ApiKeys:
    """The keys of one file, which can be reloaded while the server runs."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        """Read the file; None means that no key is needed. Raises ConfigError naming `api_keys_file`."""
        self._path = None if path is None else Path(path)
        self._owners: list[tuple[bytes, str]] = []
        if self._path is not None:
            self._owners = _read(self._path)

    @property
    def are_required(self) -> bool:
        """Whether requests need a key."""
        return self._path is not None

    def reload(self) -> int:
        """Read the file again and return the number of keys; if it raises ConfigError, the old keys stay."""
        if self._path is not None:
            self._owners = _read(self._path)
            num_owners, num_keys = len({owner for _, owner in self._owners}), len(self._owners)
            _log.info(
                "keys reloaded: %s, %s",
                f"{num_owners} owner{'s' * (num_owners != 1)}",
                f"{num_keys} key{'s' * (num_keys != 1)}",
            )
        return len(self._owners)

    def owner(self, authorization: str | None, api_key: str | None = None) -> str | None:
        """Return the owner of a request's key, or None for an unknown or missing key.

        Args:
          authorization: the Authorization header. If it has a known key, the other header does not count.
          api_key: the x-api-key header, in which clients of Anthropic's API send their key.
        """
        if not self.are_required:
            return ""
        scheme, _, bearer = (authorization or "").partition(" ")
        keys = [bearer if scheme.lower() == "bearer" else None, api_key]
        owners = [self._owner_of(key) for key in keys if key is not None]
        return next((owner for owner in owners if owner is not None), None)

    def _owner_of(self, key: str) -> str | None:
        """Return the owner of a key, or None for an unknown one.

        Every digest is compared, each in constant time, so that the timing reveals nothing about the keys.
        """
        # latin-1 restores the header's bytes.
        shown = hashlib.sha256(key.strip(" \t").encode("latin-1", "replace")).digest()
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
        if match is None:  # the line is not shown: it may be a key, pasted by mistake
            raise ConfigError("api_keys_file", str(path), _WELL_FORMED, f"correct line {number}")
        owners.append((bytes.fromhex(match["digest"]), match["owner"]))
    if not owners:
        raise ConfigError(
            "api_keys_file", str(path), "a file of at least one key", "otherwise every request is rejected"
        )
    return owners
