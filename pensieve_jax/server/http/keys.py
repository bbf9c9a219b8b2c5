"""API keys and their owners.

Owns: the file of keys, the only key of a server without one, finding the owner of a request's key, which keys
are operators', and telling requests in progress that their key was revoked.
Does not know: HTTP beyond the texts of two headers, or what owners own.
Called by the application, by `pensieve serve`, and by the Ray Serve app.

A line of the file is `owner:sha256` with the SHA-256 of the key in hexadecimal digits. A key whose line ends
with `:operator` may also read numbers about all owners. Empty lines and lines that begin with # are skipped.
An owner may have several keys, but a key has one owner. The file contains no keys, only their digests.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pensieve_jax.core.errors import ConfigError

_LINE = re.compile(r"(?P<owner>[A-Za-z0-9_.@-]{1,64}):(?P<digest>[0-9a-fA-F]{64})(?P<operator>:operator)?\Z")
_log = logging.getLogger(__name__)
_WELL_FORMED = (
    "lines of owner:sha256 or owner:sha256:operator, where the owner has letters, digits and _.@- and the "
    "digest 64 hexadecimal digits"
)


class Key(NamedTuple):
    """One line of the file."""

    digest: bytes
    owner: str
    is_operator: bool


class ApiKeys:
    """The keys of one file, which can be reloaded while the server runs, or one key without a file."""

    def __init__(self, path: str | os.PathLike[str] | None, sha256: str | None = None) -> None:
        """Read the file; raises ConfigError naming `api_keys_file`. Without either no key is needed.

        Args:
          path: the file, or None.
          sha256: SHA-256 of the only key, in hexadecimal digits, in place of a file. Its owner is the one of
            all clients without keys, so that a server finds their conversations again.
        """
        self._path = None if path is None else Path(path)
        self._keys: list[Key] = []
        if sha256 is not None:
            self._keys = [Key(bytes.fromhex(sha256), "", is_operator=True)]
        self._watches: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._on_change: list[Callable[[], object]] = []
        if self._path is not None:
            self._keys = _read(self._path)

    @property
    def are_required(self) -> bool:
        """Whether requests need a key."""
        return self._path is not None or bool(self._keys)

    def reload(self) -> int:
        """Read the file again and return the number of keys; if it raises ConfigError, the old keys stay.

        Requests whose key is gone are told; see `revocation`. Call it in the event loop's thread.
        """
        if self._path is not None:
            self._keys = _read(self._path)
            num_owners, num_keys = len({key.owner for key in self._keys}), len(self._keys)
            _log.info(
                "keys reloaded: %s, %s",
                f"{num_owners} owner{'s' * (num_owners != 1)}",
                f"{num_keys} key{'s' * (num_keys != 1)}",
            )
            for revoked, is_valid in self._watches.items():
                if not revoked.done() and not is_valid():
                    revoked.set_result(None)
            for told in self._on_change:
                told()
        return len(self._keys)

    def on_change(self, told: Callable[[], object]) -> None:
        """Call `told` after every successful reload."""
        self._on_change.append(told)

    def has_owner(self, owner: str) -> bool:
        """Return whether an owner has a key; without keys, all clients are one owner."""
        return not self.are_required or any(key.owner == owner for key in self._keys)

    def is_operator(self, headers: Mapping[str, str]) -> bool:
        """Return whether a request may read numbers about all owners: without keys, any may."""
        if not self.are_required:
            return True
        key = self._key(headers.get("authorization"), headers.get("x-api-key"))
        return key is not None and key.is_operator

    @contextmanager
    def revocation(
        self, headers: Mapping[str, str], owner: str | None
    ) -> Iterator[asyncio.Future[None] | None]:
        """Yield a future that is done once the key of a request no longer belongs to `owner`.

        Without keys, it yields None.
        """
        if not self.are_required:
            yield None
            return
        texts = headers.get("authorization"), headers.get("x-api-key")
        revoked = asyncio.get_running_loop().create_future()
        self._watches[revoked] = lambda: self.owner(*texts) == owner
        try:
            yield revoked
        finally:
            del self._watches[revoked]

    def owner(self, authorization: str | None, api_key: str | None = None) -> str | None:
        """Return the owner of a request's key, or None for an unknown or missing key.

        Args:
          authorization: the Authorization header. If it has a known key, the other header does not count.
          api_key: the x-api-key header, in which clients of Anthropic's API send their key.
        """
        if not self.are_required:
            return ""
        key = self._key(authorization, api_key)
        return None if key is None else key.owner

    def _key(self, authorization: str | None, api_key: str | None) -> Key | None:
        """Return the line of a request's key, or None for an unknown or missing key; see `owner`."""
        found = [self._line(text) for text in _texts(authorization, api_key)]
        return next((key for key in found if key is not None), None)

    def _line(self, text: str) -> Key | None:
        """Return the line of a key, or None for an unknown one.

        Every digest is compared, each in constant time, so that the timing reveals nothing about the keys.
        """
        # latin-1 restores the header's bytes.
        shown = hashlib.sha256(text.strip(" \t").encode("latin-1", "replace")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, shown):
                found = key
        return found


def _texts(authorization: str | None, api_key: str | None) -> list[str]:
    """Return the keys that two headers hold, the one that counts first."""
    scheme, _, bearer = (authorization or "").partition(" ")
    keys = [bearer if scheme.lower() == "bearer" else None, api_key]
    return [key for key in keys if key is not None]


def _read(path: Path) -> list[Key]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("api_keys_file", str(path), f"a readable file ({error})") from error
    keys: dict[bytes, Key] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.match(line.strip())
        if match is None:  # the line is not shown: it may be a key, pasted by mistake
            raise ConfigError("api_keys_file", str(path), _WELL_FORMED, f"correct line {number}")
        key = Key(bytes.fromhex(match["digest"]), match["owner"], match["operator"] is not None)
        before = keys.setdefault(key.digest, key)
        if before != key:
            limit = "a file in which each key has one owner and one form"
            raise ConfigError(
                "api_keys_file", str(path), limit, f"correct line {number}, which repeats a digest"
            )
    if not keys:
        raise ConfigError(
            "api_keys_file", str(path), "a file of at least one key", "otherwise every request is rejected"
        )
    return list(keys.values())
