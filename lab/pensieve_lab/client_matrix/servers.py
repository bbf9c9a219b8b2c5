"""Servers that programs of clients run against: started for them, or running already.

Owns: the flags that name a running server, the check that it answers, and the start of another one.
Does not know: what runs against a server.
"""

from __future__ import annotations

import contextlib
import shlex
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from absl import flags

from pensieve_jax import ConfigError
from pensieve_lab.serving.served import ServedProcess

FLAGS = flags.FLAGS
SCRIPTED: Final = ("-m", "pensieve_lab.programs.serve_scripted")
"""The launcher of a scripted model's server, for `started`."""
_ANSWER_S: Final = 30.0


class Target(NamedTuple):
    """A server that answers: its address without /v1, its model's name, and its tokenizer's directory."""

    address: str
    model: str
    tokenizer: Path


def define_server_flags() -> None:
    """Define `--url`, the flags beside it, and `--server_flags`."""
    flags.DEFINE_string("url", None, "Address of a running server; default: start one.")
    flags.DEFINE_string("model_name", "chat", "Name of the model at --url.")
    flags.DEFINE_string("tokenizer", None, "Directory of the tokenizer of the model at --url.")
    flags.DEFINE_string("server_flags", "", "Further flags of a server that is started.")


def given(directory: Path) -> Target:
    """Return the server at `--url`; `directory` stands for a tokenizer that was not named."""
    return Target(given_address(FLAGS.url), FLAGS.model_name, Path(FLAGS.tokenizer or directory))


def given_address(url: str) -> str:
    """Return the address of a running server, without /v1; raises ConfigError if none answers there."""
    address = url.rstrip("/").removesuffix("/v1")
    try:
        with urllib.request.urlopen(f"{address}/v1/models", timeout=_ANSWER_S):
            return address
    except urllib.error.HTTPError:  # it answers, if only to a key
        return address
    except (OSError, ValueError) as error:
        raise ConfigError("--url", url, "the address of a running server", str(error)) from error


@contextlib.contextmanager
def started(launcher: Sequence[str], own_flags: Sequence[str]) -> Iterator[str]:
    """Yield the address of a server with these flags, those of `--server_flags`, and a history of its own."""
    others = shlex.split(FLAGS.server_flags)
    with (
        tempfile.TemporaryDirectory() as private,
        ServedProcess([*own_flags, f"--history={private}/chats.sqlite", *others], launcher) as served,
    ):
        yield served.address
