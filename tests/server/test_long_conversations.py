"""The page in a browser: a conversation longer than the server returns, and a refused map.

The server is in this process, over a fake engine, so that its limits can be small.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pensieve_jax.history import trees
from pensieve_lab.serving.page_visit import BROWSER, browsing, visiting
from tests.server.fakes import say
from tests.server.live import LiveServer

CUT = "Earlier turns are not shown"
MAP = {
    **{"branches": [], "chunk_tokens": 32, "gpu_pages": 8, "free_gpu_pages": 8},
    **{"cpu_pages": 8, "free_cpu_pages": 8},
}

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not Path(BROWSER).exists(), reason=f"{BROWSER} is not installed"),
]


@pytest.fixture
def server(tmp_path):
    with LiveServer(tmp_path / "history.sqlite", say("ok")) as running:
        running.engine.answers["chunk_map"] = MAP
        yield running


@pytest.fixture(scope="module")
def browser():
    with browsing() as browser:
        yield browser


@pytest.fixture
def visit(server, browser):
    with visiting(server.url.removesuffix("v1"), browser=browser) as visit:
        yield visit
        assert visit.complaints == []


def turn_ids(server) -> list[str]:
    """Return the ids of all turns that were computed."""
    return [turn.turn_id for turn in server.engine.turns]


def last_parent(server) -> str | None:
    """Return the id of the turn that the latest one continued."""
    return server.engine.turns[-1].spec.node.parent_id


def reload(visit) -> None:
    visit.page.reload()
    visit.page.locator("article").first.wait_for()


def tell_only(monkeypatch, num_turns: int) -> None:
    """Limit a tree to `num_turns` turns: each has five characters and two of its reply."""
    monkeypatch.setattr(trees, "MAX_TREE_CHARACTERS", 7 * num_turns)


def test_turns_that_are_left_out_are_indicated_and_can_be_continued(visit, server, monkeypatch):
    for text in ("one__", "two__", "three", "four_"):
        visit.say(text)
    _, second, *_ = turn_ids(server)
    assert visit.page.get_by_text(CUT).count() == 0
    tell_only(monkeypatch, 2)
    reload(visit)
    assert visit.texts() == ["three", "ok", "four_", "ok"]
    assert visit.page.get_by_text(CUT).count() == 1
    visit.edit(0, "3rd__")
    assert last_parent(server) == second, "not a conversation of its own"
    assert visit.texts() == ["3rd__", "ok"] and visit.page.get_by_text(CUT).count() == 1
    visit.page.get_by_text("2 of 2").wait_for()
    visit.again(0)
    assert last_parent(server) == second
    visit.page.get_by_text("3 of 3").wait_for()
    visit.say("and__")
    assert last_parent(server) == turn_ids(server)[-2]


def test_turns_whose_parents_are_left_out_are_not_shown_as_versions_of_each_other(visit, server, monkeypatch):
    for text in ("one__", "two__", "three"):
        visit.say(text)
    visit.edit(1, "2nd__")
    assert visit.page.get_by_text("2 of 2").count() == 1
    tell_only(monkeypatch, 2)  # "three" behind "two__", and "2nd__" behind "one__"
    reload(visit)
    assert visit.texts() == ["2nd__", "ok"] and visit.page.get_by_text(CUT).count() == 1
    assert visit.page.get_by_text(" of 2").count() == 0


@pytest.mark.long
def test_the_address_of_a_turn_that_is_left_out_is_reported(visit, server, monkeypatch):
    visit.say("one__")
    visit.say("two__")
    tell_only(monkeypatch, 1)
    address = visit.page.url.partition("#")[0]
    visit.page.goto("about:blank")
    visit.page.goto(f"{address}#{turn_ids(server)[0]}")
    visit.page.locator("#notice", has_text="not shown").wait_for()
    assert visit.texts() == ["two__", "ok"]


@pytest.mark.long
def test_a_later_change_of_the_system_message_does_not_split_a_conversation(visit, server):
    visit.say("one__")
    visit.page.locator("summary").click()
    visit.page.fill("#instructions", "Be brief.")
    visit.say("two__")
    (first, second) = turn_ids(server)
    assert first[:16] != second[:16], "other tokens from the first on"
    reload(visit)
    assert visit.texts() == ["Be brief.", "two__", "ok"] and visit.page.get_by_text(CUT).count() == 1
    visit.again(0)
    said = [message["content"] for message in server.engine.turns[-1].spec.messages]
    assert said == ["Be brief.", "one__", "ok", "two__"], "with what came before"


@pytest.mark.long
def test_a_deleted_earlier_turn_is_indicated(visit, server):
    visit.say("one__")
    visit.say("two__")
    with server.client() as client:
        client.responses.delete(f"resp_{turn_ids(server)[0]}")
    reload(visit)
    assert visit.texts() == ["two__", "ok"] and visit.page.get_by_text(CUT).count() == 1
    visit.replies.nth(0).get_by_role("button", name="Again").click()
    visit.page.locator("#notice.wrong", has_text="no response").wait_for()
    assert len(turn_ids(server)) == 2
    visit.complaints.clear()  # the browser's own message about the 404


@pytest.mark.long
def test_a_refused_map_is_requested_again_when_the_server_says(visit):
    asked: list[str] = []

    def refuse(route):
        asked.append(route.request.url)
        error = {"message": "A key may watch 8 maps at a time; close one of them."}
        route.fulfill(status=429, headers={"Retry-After": "30"}, json={"error": error})

    visit.page.route("**/v1/pensieve/chunks?stream=true", refuse)
    visit.page.clock.install()
    visit.page.reload()
    visit.page.locator("#notice", has_text="8 maps").wait_for()
    for seconds, times in ((20, 1), (11, 2)):
        visit.page.clock.run_for(seconds * 1000)
        visit.page.evaluate("async () => { await (await fetch('v1/models')).json(); }")  # behind any map
        assert len(asked) == times
    visit.complaints.clear()  # the browser's own messages about the refusals
