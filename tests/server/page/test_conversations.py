"""The list of conversations: search, names, deletion, and all of it with the keyboard."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator

from pensieve_lab.serving.page_visit import Visit
from tests.server.page.conftest import PageServer

pytestmark = pytest.mark.browser


def fill(server: PageServer, *texts: str) -> list[str]:
    """Create conversations of one turn; return their ids of responses."""
    with server.client() as client:
        return [client.responses.create(model="fake", input=text, temperature=0).id for text in texts]


def reload(visit: Visit) -> None:
    visit.page.reload()
    visit.page.locator("#model", has_text="tokens").wait_for(state="attached")


def listed(visit: Visit) -> list[str]:
    return visit.page.locator("#trees a").all_inner_texts()


def row(visit: Visit, name: str) -> Locator:
    return visit.page.locator("#trees .row", has=visit.page.get_by_role("link", name=name, exact=True))


def manage(visit: Visit, name: str) -> Locator:
    row(visit, name).hover()
    row(visit, name).get_by_role("button").click()
    return visit.page.locator("#manage")


def test_a_conversation_is_renamed_for_every_visitor_and_gets_its_first_words_back(
    server: PageServer, visit: Visit
) -> None:
    (first,) = fill(server, "Where is Rome?")
    server.branches = [(first.removeprefix("resp_"), "2g")]
    reload(visit)
    dialog = manage(visit, "Where is Rome?")
    dialog.locator("#manage-name").fill("My trip")
    dialog.locator("#manage-name").press("Enter")
    row(visit, "My trip").wait_for()
    assert visit.page.evaluate("document.activeElement.textContent") == "My trip"
    visit.page.evaluate("sessionStorage.clear()")
    reload(visit)
    dialog = manage(visit, "My trip")
    assert dialog.locator("#manage-name").input_value() == "My trip"
    dialog.locator("#manage-name").fill("")
    dialog.get_by_role("button", name="Save").click()
    row(visit, "Where is Rome?").wait_for()


def test_a_conversation_is_deleted_with_all_branches_once_that_is_confirmed(
    server: PageServer, visit: Visit
) -> None:
    fill(server, "Where is Oslo?")
    reload(visit)
    visit.say("Where is Rome?")
    visit.say("And Pisa?")
    visit.edit(1, "And Siena?")
    visit.page.locator("#trees a", has_text="Rome").wait_for()
    dialog = manage(visit, "Where is Rome?")
    dialog.locator("#manage-name").fill("My trip")
    dialog.get_by_role("button", name="Save").click()
    dialog = manage(visit, "My trip")
    dialog.get_by_role("button", name="Delete…").click()
    assert "its 3 turns" in dialog.inner_text()
    dialog.get_by_role("button", name="Keep").click()
    assert dialog.locator("#manage-name").is_visible()
    dialog.get_by_role("button", name="Delete…").click()
    dialog.get_by_role("button", name="Delete", exact=True).click()
    dialog.wait_for(state="hidden")
    assert listed(visit) == ["Where is Oslo?"] and visit.texts() == []
    reload(visit)
    assert listed(visit) == ["Where is Oslo?"] and visit.texts() == []
    with server.client() as client:
        stored = client.get("/pensieve/stored", cast_to=object)
    assert stored["num_responses"] == 1 and stored["num_conversations"] == 0


def test_a_failed_deletion_says_why_and_can_be_repeated(server: PageServer, visit: Visit) -> None:
    fill(server, "Where is Rome?")
    reload(visit)
    failure = {"error": {"message": "The history is locked."}}
    visit.page.route("**/v1/responses/*", lambda route: route.fulfill(status=503, json=failure))
    dialog = manage(visit, "Where is Rome?")
    dialog.get_by_role("button", name="Delete…").click()
    dialog.get_by_role("button", name="Delete", exact=True).click()
    dialog.get_by_role("alert").get_by_text("locked").wait_for()
    visit.page.unroute("**/v1/responses/*")
    dialog.get_by_role("button", name="Delete", exact=True).click()
    visit.page.locator("#trees a").wait_for(state="detached")
    dialog.wait_for(state="hidden")
    visit.complaints.clear()  # the browser's own message about the 503


def test_a_search_finds_names_and_first_messages_beyond_the_shown_ones(
    server: PageServer, visit: Visit
) -> None:
    fill(server, "A cat in Rome")
    server.on_loop(lambda: server.harness.clock.advance(60.0))
    fill(server, *(f"Message {number}" for number in range(55)))
    reload(visit)
    assert len(listed(visit)) == 50 and "A cat in Rome" not in listed(visit)
    visit.page.fill("#search", "rome CAT")
    visit.page.locator("#found", has_text="1 conversation found").wait_for()
    assert listed(visit) == ["A cat in Rome"]
    visit.page.fill("#search", "no such words")
    visit.page.locator("#found", has_text="No conversations found").wait_for()
    visit.page.fill("#search", "")
    visit.page.locator("#trees a >> nth=49").wait_for()
    assert not visit.page.locator("#found").is_visible()


def test_the_list_is_managed_with_the_keyboard(server: PageServer, visit: Visit) -> None:
    fill(server, "Where is Rome?", "Where is Oslo?")
    reload(visit)
    visit.page.locator("#search").press("Tab")
    keyboard = visit.page.keyboard

    def focused(what: str) -> object:
        return visit.page.evaluate(f"document.activeElement.{what}")

    names = listed(visit)
    assert focused("textContent") == names[0]
    keyboard.press("ArrowDown")
    keyboard.press("ArrowRight")
    assert focused("ariaLabel") == f"Rename or delete: {names[1]}"
    keyboard.press("ArrowLeft")
    keyboard.press("F2")
    assert focused("id") == "manage-name"
    keyboard.press("Escape")
    visit.page.locator("#manage").wait_for(state="hidden")
    assert focused("textContent") == names[1]
    keyboard.press("F2")
    keyboard.type("Trip")
    keyboard.press("Enter")
    row(visit, "Trip").wait_for()
    assert focused("textContent") == "Trip"


def test_the_delete_key_asks_before_it_deletes(server: PageServer, visit: Visit) -> None:
    fill(server, "Where is Rome?", "Where is Oslo?")
    reload(visit)
    visit.page.locator("#search").press("Delete")
    assert not visit.page.locator("#manage").is_visible(), "in a field it deletes text"
    visit.page.locator("#search").press("Tab")
    kept = listed(visit)[1]
    keyboard = visit.page.keyboard
    for answer in ("Escape", "Enter"):
        keyboard.press("Delete")
        assert visit.page.evaluate("document.activeElement.id") == "manage-name"
        visit.page.locator("#manage-delete").press("Enter")
        assert visit.page.evaluate("document.activeElement.id") == "manage-keep"
        (visit.page.locator("#manage-confirm") if answer == "Enter" else keyboard).press(answer)
        visit.page.locator("#manage").wait_for(state="hidden")
        expected = 1 if answer == "Enter" else 2
        visit.page.wait_for_function(f"document.querySelectorAll('#trees a').length === {expected}")
    assert listed(visit) == [kept]
