"""The clients of the matrix, read from `clients.toml`.

Owns: the file's format.
Does not know: how packages are installed.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pensieve_jax import ConfigError

CLIENTS_FILE: Final = Path(__file__).with_name("clients.toml")
PROGRAMS: Final = Path(__file__).with_name("client_programs")

type Language = Literal["python", "javascript"]


@dataclass(frozen=True, slots=True)
class Client:
    """One client.

    Attributes:
      name: its usual name.
      packages: what pip or npm installs; the first one is the client itself, with its version.
      programs: file of its programs.
    """

    name: str
    packages: tuple[str, ...]
    programs: Path

    @property
    def language(self) -> Language:
        """Language of its programs."""
        return "javascript" if self.programs.suffix == ".mjs" else "python"

    @property
    def version(self) -> str:
        """Version of the first package."""
        return self.packages[0].rpartition("@" if self.language == "javascript" else "==")[2]

    @property
    def slug(self) -> str:
        """Name of its environment's directory."""
        return self.programs.stem.removesuffix("_programs")


def load_clients(names: list[str] | None = None, path: Path = CLIENTS_FILE) -> list[Client]:
    """Return all clients, or those with these names or slugs; raises ConfigError for an unknown one."""
    found = [
        Client(one["name"], tuple(one["packages"]), PROGRAMS / one["programs"])
        for one in tomllib.loads(path.read_text(encoding="utf-8"))["client"]
    ]
    if not names:
        return found
    known = {key: client for client in found for key in (client.name, client.slug)}
    for name in names:
        if name not in known:
            raise ConfigError("--clients", name, f"some of {', '.join(client.slug for client in found)}")
    return [client for client in found if client in [known[name] for name in names]]
