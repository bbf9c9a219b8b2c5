"""Environments of clients: a virtual environment or a folder of npm packages for each.

Owns: where they are, how they are made, and the command that runs programs in one.
Does not know: what the packages do.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from pensieve_jax import PensieveError
from pensieve_lab.client_matrix.catalogue import PROGRAMS, Client

_INSTALLED: Final = "installed.json"
_UV: Final = "uv>=0.9"
_TAIL: Final = 400


class NotInstalledError(PensieveError):
    """A client's packages could not be installed."""


class Environments:
    """Environments below one directory; one that has the wanted packages is used again."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        """Use `directory`, which is made; an installation may take `timeout_s`."""
        self._directory = directory
        self._timeout_s = timeout_s
        directory.mkdir(parents=True, exist_ok=True)

    def command(self, client: Client) -> list[str]:
        """Install a client and return the command of its programs; raises NotInstalledError."""
        if client.language == "python":
            return [str(self.python(client.slug, client.packages)), str(client.programs)]
        place = self._installed(client.slug, client.packages, self._install_javascript)
        for path in (client.programs, PROGRAMS / "trial.mjs"):
            shutil.copy(path, place)  # node looks for packages beside the file
        return ["node", str(place / client.programs.name)]

    def python(self, name: str, packages: Sequence[str]) -> Path:
        """Return the interpreter of an environment with these packages; raises NotInstalledError."""
        return self._installed(name, packages, self._install_python) / "bin" / "python"

    def _installed(
        self, name: str, packages: Sequence[str], install: Callable[[Path, Sequence[str]], None]
    ) -> Path:
        """Return the directory of an environment, which is made if it has not exactly these packages."""
        place = self._directory / name
        mark = place / _INSTALLED
        if not mark.is_file() or json.loads(mark.read_text(encoding="utf-8")) != list(packages):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            install(place, packages)
            mark.write_text(json.dumps(packages), encoding="utf-8")
        return place

    def _install_python(self, place: Path, packages: Sequence[str]) -> None:
        uv = self._uv()
        self._run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(place)], place)
        # Some packages are published as source only.
        self._run(
            [uv, "pip", "install", "--quiet", "--python", str(place / "bin" / "python"), *packages], place
        )

    def _install_javascript(self, place: Path, packages: Sequence[str]) -> None:
        (place / "package.json").write_text('{"private": true}', encoding="utf-8")
        self._run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *packages], place)

    def _uv(self) -> str:
        """Return the command `uv`, installed here if this interpreter has none beside it."""
        beside = Path(sys.executable).with_name("uv")
        own = self._directory / "uv" / "bin" / "uv"
        if beside.is_file():
            return str(beside)
        if not own.is_file():
            place = own.parents[1]
            self._run([sys.executable, "-m", "venv", str(place)], self._directory)
            self._run([str(place / "bin" / "pip"), "install", "--quiet", _UV], self._directory)
        return str(own)

    def _run(self, command: Sequence[str], place: Path) -> None:
        environment = {**os.environ, "UV_CACHE_DIR": str(self._directory / "uv-cache")}
        environment.pop("PYTHONPATH", None)
        name = Path(command[0]).name
        try:
            done = subprocess.run(
                command,
                cwd=place,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=self._timeout_s,
            )
        except FileNotFoundError as error:
            raise NotInstalledError(f"{name} is not on this machine.") from error
        except subprocess.TimeoutExpired as error:
            raise NotInstalledError(f"{name} did not end within {self._timeout_s:g} s.") from error
        if done.returncode:
            tail = " ".join((done.stderr or done.stdout)[-_TAIL:].split())
            raise NotInstalledError(f"{name} ended with status {done.returncode}: {tail}")
