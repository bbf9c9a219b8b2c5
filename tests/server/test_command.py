"""`pensieve serve` at shutdown: a second signal does not wait, and unexpected errors are not quoted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pensieve_jax.server.main import EXIT_AT_ONCE
from tests.deadlines import TIMEOUT_S
from tests.server.faults import command
from tests.server.unfinished import unfinished_request

SECRET = "words of a prompt"
FAIL = f"def fail(*_): raise RuntimeError({SECRET!r})\n"
# Work that cannot be interrupted, as parsing a long body.
BUSY = (
    "import time\nfrom pensieve_jax.server import workers\n"
    f"for _ in range(8): workers._threads.submit(time.sleep, {2 * TIMEOUT_S})\n"
)


@pytest.mark.long
def test_a_second_signal_waits_for_no_thread(tmp_path: Path) -> None:
    with command.started(BUSY, env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            address = urlsplit(process.stdout.readline().split()[-1])
            with unfinished_request(address.hostname, address.port):
                process.terminate()
                lines = iter(process.stderr.readline, "")
                assert any('"draining: ' in line for line in lines), "it ended without a drain"
                process.terminate()
                assert process.wait(TIMEOUT_S) == EXIT_AT_ONCE
            assert list(tmp_path.iterdir()) == [], "the private history is still there"
        finally:
            process.kill()


@pytest.mark.long
def test_the_text_of_a_fatal_error_is_not_logged() -> None:
    status, log = _ended(FAIL + "command.serve.announce_address = fail")
    assert status == 1 and SECRET not in log
    last = json.loads(log.splitlines()[-1])
    assert (last["level"], last["error"]["kind"]) == ("critical", "builtins.RuntimeError")


@pytest.mark.long
def test_the_text_of_a_startup_error_is_printed() -> None:
    """No prompt exists yet, and the operator needs the cause."""
    status, log = _ended(FAIL + "command.serve.check_engine_flags = fail")
    assert status == 1 and log.endswith(f"RuntimeError: {SECRET}\n")


def _ended(before: str) -> tuple[int, str]:
    process = command.started(before)
    with process:
        try:
            _, log = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.send_signal(signal.SIGKILL)
    return process.returncode, log
