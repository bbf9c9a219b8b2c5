"""The race checker on real processes with a fake engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from pensieve_lab.programs.check_races import QUOTAS
from pensieve_lab.races.rounds import OWNERS
from pensieve_lab.serving.owner_keys import key_lines
from tests.seeds import enough, new_seed
from tests.server.faults import command
from tests.server.faults.served import TIMEOUT_S


@pytest.fixture(params=["file", pytest.param("postgres", marks=pytest.mark.long)])
def history(request, tmp_path) -> str:
    """Return the place of a new history."""
    return request.getfixturevalue("postgres").url() if request.param == "postgres" else str(tmp_path / "h")


@pytest.fixture(params=[pytest.param(False, marks=pytest.mark.long), True], ids=["no quotas", "quotas"])
def address(request, history, tmp_path) -> Iterator[str]:
    """Yield the address of a server of two processes."""
    keys = tmp_path / "keys"
    keys.write_text(key_lines(OWNERS))
    given = QUOTAS if request.param else ()
    with (tmp_path / "log").open("w") as log:
        server = command.started("", f"--api_keys_file={keys}", f"--history={history}", *given, log=log)
        with server:
            try:
                assert server.stdout is not None
                found = re.search(r"http://\S+", server.stdout.readline())
                assert found, (tmp_path / "log").read_text()
                yield found[0]
            finally:
                server.terminate()
                assert server.wait(TIMEOUT_S) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_racing_requests_are_answered_as_in_some_order(launch, address, history, tmp_path):
    document = tmp_path / "found.json"
    flags = {
        "num_operations": enough(240, 2000),
        "round_operations": 120,
        "clients_per_owner": 3,
        "seed": new_seed(),
    }
    status = launch(
        "pensieve_lab.programs.check_races",
        shared_llm=False,
        address=address,
        history=history,
        json=document,
        **flags,
    )
    found = json.loads(document.read_text())["results"]
    assert found["violations"] == [] and status == 0
    outcomes = found["outcomes"]
    assert sum(outcomes.values()) > flags["num_operations"]
    expected = ["append: 200", "background: 200", "turn: 200", "intrude: 404 not_found"]
    if found["quota"]["num_responses"] is not None:
        expected += ["conversations filled", "responses filled", "bytes filled"]
    assert all(outcomes.get(one) for one in expected), outcomes
