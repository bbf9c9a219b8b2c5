"""A Postgres server for tests, on a Unix socket in a temporary directory.

Owns the location of Debian's programs, starting and stopping, and a fresh namespace for each test.
Does not know what is stored there. Called by the `postgres` fixture.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PASSWORD = "p%40ss:w%2Frd"  # as written in a URL: no part of it may ever be shown
_CONFIGURATION = """
listen_addresses = ''
fsync = off  # what the kernel has survives everything that tests do
max_connections = 60
autovacuum = off
"""
_WHO_MAY = """
local all locked scram-sha-256
local all all trust
"""


def programs() -> Path | None:
    """Return the newest directory of initdb and pg_ctl; None if no server is installed."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if debian:
        return debian[-1].parent
    found = shutil.which("initdb")
    return None if found is None else Path(found).resolve().parent


class PostgresServer:
    """Postgres server that the constructor starts; `stop` kills it, and `start` lets it recover."""

    def __init__(self, directory: Path) -> None:
        """Create it in a directory with a short name: the path of a socket is limited."""
        found = programs()
        assert found is not None
        self._programs = found
        self._directory, self._data = directory, directory / "data"
        self._numbers = itertools.count()
        # Postgres refuses to run as root.
        self._who = {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid} if os.geteuid() == 0 else {}
        if self._who:
            directory.chmod(0o755)
            shutil.chown(directory, "nobody")
        options = ["--auth=trust", "--username=tests", "--encoding=UTF8", "--no-locale", "--no-sync"]
        self._run("initdb", "--pgdata", str(self._data), *options)
        with (self._data / "postgresql.conf").open("a") as file:
            file.write(f"{_CONFIGURATION}unix_socket_directories = '{directory}'\n")
        (self._data / "pg_hba.conf").write_text(_WHO_MAY)
        self.start()
        self.run_sql("CREATE ROLE locked LOGIN PASSWORD 'p@ss:w/rd'")
        self.run_sql("GRANT CREATE ON DATABASE postgres TO locked")

    def url(self, namespace: str | None = None, user: str = "tests", database: str = "postgres") -> str:
        """Return the URL of a new namespace, or of the given one."""
        name = namespace or f"history_{next(self._numbers)}"
        return f"postgresql://{user}@/{database}?host={self._directory}&namespace={name}"

    def start(self) -> None:
        """Start it; return once it accepts connections."""
        log = str(self._directory / "log")
        self._run("pg_ctl", "start", "-w", "-t", "300", "-D", str(self._data), "-l", log, "-s")

    def stop(self, mode: str = "immediate") -> None:
        """Stop it and cut off sessions; with "immediate" it writes nothing more, as in a power failure."""
        self._run("pg_ctl", "stop", "-w", "-t", "300", "-D", str(self._data), "-m", mode, "-s")

    def run_sql(self, statement: str) -> list[Any]:
        """Run a statement as superuser; return its rows."""
        import psycopg

        where = f"postgresql://tests@/postgres?host={self._directory}"
        with psycopg.connect(where, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        # The server must not inherit a pipe, for whose end the caller would wait.
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/", **self._who
            )
            output.seek(0)
            text = output.read().decode()
        assert done.returncode == 0, f"{program}: {text}"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Yield a server, or skip the test."""
    pytest.importorskip("psycopg", reason="needs the extra `postgres`")
    if programs() is None:
        pytest.skip("needs Debian's postgresql")
    directory = Path(tempfile.mkdtemp(prefix="pg-"))
    try:
        server = PostgresServer(directory)
        try:
            with pytest.MonkeyPatch.context() as patch:  # a busy machine takes its time
                patch.setattr("pensieve_jax.history.postgres_connection.CONNECT_TIMEOUT_S", 120)
                yield server
        finally:
            with contextlib.suppress(AssertionError):  # a failed test may have left it stopped
                server.stop()
    finally:
        shutil.rmtree(directory)
