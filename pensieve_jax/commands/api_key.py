"""The only key of a server, from a flag or the environment.

Owns: where the key may come from, what it may look like, and that only its digest goes on.
Does not know: the file of keys, or HTTP.
"""

from __future__ import annotations

import hashlib
import os
from typing import Final

from absl import flags

from pensieve_jax import ConfigError

flags.disclaim_key_flags()
VARIABLE: Final = "PENSIEVE_API_KEY"
_FLAG: Final = "--api_key"
_HIDDEN: Final = "(not shown)"


def define_api_key_flag() -> None:
    """Define `--api_key`, whose help advises against it."""
    flags.DEFINE_string(
        "api_key",
        None,
        f"The only key of this server. Other users of the machine can read a command line, so rather set "
        f"{VARIABLE} in the environment, or give --api_keys_file.",
    )


def take_api_key() -> str | None:
    """Return the SHA-256 of the key in hexadecimal digits, or None without one.

    The variable is removed from the environment, so that no other process inherits it.

    Raises:
      ConfigError: two keys, a key beside `--api_keys_file`, or one that a header cannot hold. The message
        shows no key.
    """
    given = {_FLAG: flags.FLAGS.api_key, VARIABLE: os.environ.pop(VARIABLE, None)}
    keys = {name: key for name, key in given.items() if key is not None}
    if not keys:
        return None
    if len(keys) > 1:
        raise ConfigError(_FLAG, _HIDDEN, f"left out while {VARIABLE} is set")
    ((name, key),) = keys.items()
    if flags.FLAGS.api_keys_file is not None:
        hint = "add the key's digest to the file"
        raise ConfigError(name, _HIDDEN, "left out beside --api_keys_file", hint)
    if not key or not all("!" <= character <= "~" for character in key):
        limit = "at least one character, all of them ASCII and none of them blank"
        raise ConfigError(name, _HIDDEN, limit, "openssl rand -hex 24 makes a key")
    return hashlib.sha256(key.encode("ascii")).hexdigest()
