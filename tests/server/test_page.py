"""The page in a browser: turns, forks, the map of the KV cache, and that it loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from pensieve_lab.serving.page_visit import BROWSER, browsing, visiting
from pensieve_lab.serving.served import ServedProcess
from tests.server.conftest import SIZES
from tests.server.processes import engine_of

FIRST = "Hi! My name is Ada. I am looking for a place to eat in San Jose."


@pytest.fixture(scope="module")
def server(tmp_path_factory, compilation_cache):
    history = tmp_path_factory.mktemp("page") / "chats.sqlite"
    flags = [*SIZES, f"--history={history}", f"--compilation_cache_dir={compilation_cache}"]
    with ServedProcess(flags) as served:
        yield served


@pytest.fixture(scope="module")
def browser():
    with browsing() as browser:
        yield browser


@pytest.fixture
def visit(server, browser):
    with visiting(server.address, browser=browser) as visit:
        yield visit
        assert visit.complaints == []


pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.skipif(not Path(BROWSER).exists(), reason=f"{BROWSER} is not installed"),
    pytest.mark.skipif(os.environ.get("JAX_PLATFORMS") != "cpu", reason="a server of its own, on a CPU"),
]


def told_of(visit, what: str) -> str:
    """Return the notice once it contains `what`."""
    visit.page.locator("#notice", has_text=what).wait_for()
    return visit.page.locator("#notice").inner_text()


def list_many(visit, num: int) -> None:
    """Pretend that `num` more conversations exist, an hour apart, the oldest from last year."""
    now_s = time.time()
    rows = [
        {
            "root": f"{n:016x}",
            "num_turns": 1 + n % 2,
            "first_text": f"Conversation {n}, of which the title is too long for the list",
            "last_active": now_s - n * 3600 if n < num - 1 else now_s - 366 * 86_400,
        }
        for n in range(num)
    ]

    def answer(route):
        limit = int(re.search(r"limit=(\d+)", route.request.url)[1])
        route.fulfill(json={"data": (route.fetch().json()["data"] + rows)[:limit]})

    visit.page.route("**/v1/pensieve/trees?*", answer)


def reload(visit) -> None:
    visit.page.reload()
    visit.page.locator("#model", has_text="tokens").wait_for(state="attached")


def num_of(account: str, what: str) -> int:
    found = re.search(rf"(\d+) {what}", account)
    return int(found[1]) if found else 0


def test_an_answer_is_the_same_after_its_kv_cache_was_moved(visit):
    visit.say(FIRST)
    visit.say("Italian please, something cheap.")
    visit.press("Push out")
    visit.page.wait_for_function(
        "() => document.querySelector('#chunks').ariaLabel.match(/ 0 device, .*[1-9]\\d* host/)"
    )
    visit.say("What is my name?")
    visit.press("Drop")
    visit.page.wait_for_function(
        "() => !document.querySelector('#chunks').ariaLabel.match(/[1-9]\\d* (device|host)/)"
    )
    visit.again(2)
    *_, before = visit.texts()
    pushed, forgotten = visit.accounts()[2], visit.accounts()[-1]
    assert "Ada" in before
    assert num_of(forgotten, "computed again") > 0 == num_of(forgotten, "found on the device")
    visit.sibling_before.last.click()
    assert visit.texts()[-1] == before, "the same answer, from state in host memory"
    pushed = visit.accounts()[-1]
    assert num_of(pushed, "copied back") > 0 == num_of(pushed, "computed again")


def test_edits_and_regenerations_are_forks_that_can_be_reopened(visit):
    visit.say(FIRST)
    visit.say("Italian please, something cheap.")
    visit.say("What is my name?")
    whole = visit.texts()
    visit.edit(1, "Mexican please, something cheap.")
    assert visit.texts()[:2] == whole[:2] and len(visit.texts()) == 4
    assert visit.page.get_by_text("2 of 2").count() == 1
    assert num_of(visit.accounts()[1], "found on the device") >= 32, "the full chunks before the edit"
    visit.sibling_before.click()
    assert visit.texts() == whole
    visit.again(0)
    assert visit.texts()[0] == FIRST and len(visit.texts()) == 2


def test_conversations_are_listed_and_reopened(visit):
    visit.say("Can you find me some jazz?")
    said = visit.texts()
    visit.page.reload()
    visit.press("New conversation")
    assert visit.texts() == []
    visit.page.locator("#trees a", has_text="jazz").first.click()
    visit.page.locator("article").first.wait_for()
    assert visit.texts() == said
    visit.say("Something by Miles Davis.")
    assert num_of(visit.accounts()[-1], "new") < num_of(visit.accounts()[0], "new") + 20


def test_another_conversation_can_start_while_a_reply_streams(visit):
    visit.say(FIRST)
    visit.hold_streams()  # a reply that streams until the test releases it
    visit.page.fill("#text", "Italian please, something cheap.")
    visit.page.press("#text", "Enter")
    visit.page.locator("#stop").wait_for()
    visit.press("New conversation")
    visit.page.locator("#send").wait_for()
    visit.release_streams()
    assert visit.texts() == []
    visit.say("Can you find me some jazz?")
    assert visit.texts()[0] == "Can you find me some jazz?" and len(visit.texts()) == 2
    assert num_of(visit.accounts()[0], "found on the device") == 0, "a conversation of its own"


def test_a_model_cannot_write_into_the_page(visit):
    visit.say("<img src=x onerror=\"document.title='owned'\"><b>bold</b>")
    assert visit.texts()[0].startswith("<img") and visit.page.locator("article img, article b").count() == 0
    assert visit.page.title() == "Pensieve"


def test_a_refusal_is_shown_and_the_message_returns_to_the_composer(visit):
    long = "word " * 2000
    visit.page.fill("#text", long)
    visit.page.press("#text", "Enter")
    visit.page.locator("#notice", has_text="tokens").wait_for()
    assert visit.page.input_value("#text").strip() == long.strip() and visit.texts() == []
    (complaint,) = visit.complaints  # the browser's own message about the refusal
    assert "400" in complaint
    visit.complaints.clear()


@pytest.mark.parametrize(
    ("width", "height"),
    [(1024, 768), (400, 780), (1440, 900)],
)
def test_messages_and_composer_are_visible_at_any_window_size(visit, width, height):
    visit.page.set_viewport_size({"width": width, "height": height})
    list_many(visit, 100)
    reload(visit)
    visit.say(FIRST)
    visit.say("Italian please, something cheap. " * 15)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    assert visit.page.evaluate("document.documentElement.scrollHeight") <= height
    for part, least in (("#text", 40), ("#send", 20), ("#messages", height / 2)):
        box = visit.page.locator(part).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width, part
        assert box["y"] >= 0 and box["y"] + box["height"] <= height, part
        assert box["height"] >= least, part
    latest, messages = (visit.page.locator(name).bounding_box() for name in (".told >> nth=-1", "#messages"))
    assert messages["y"] <= latest["y"] < messages["y"] + messages["height"], "the latest reply is seen"
    if width == 400:
        visit.press("State")
        visit.page.locator("#chunks").wait_for()
        visit.press("Close")
        visit.page.locator("#chunks").wait_for(state="hidden")
        visit.press("Conversations")
    assert visit.page.locator("#trees a").count() == 50
    visit.page.locator("#trees a[aria-current]").click()
    if width == 400:
        visit.page.locator("#trees").wait_for(state="hidden")
        visit.press("Conversations")
    visit.press("New conversation")
    visit.page.locator("#trees").wait_for(state="hidden" if width == 400 else "visible")
    assert visit.texts() == []


def test_the_list_is_grouped_by_day_and_loads_more(visit):
    list_many(visit, 100)
    reload(visit)
    visit.page.locator("#trees h2", has_text=re.compile("^(Today|Yesterday)$")).first.wait_for()
    visit.press("Show more")
    visit.page.locator("#trees a >> nth=99").wait_for(state="attached")
    visit.page.wait_for_function("() => document.activeElement.textContent.startsWith('Conversation')")
    visit.press("Show more")
    visit.page.locator("#trees a", has_text="Conversation 99").wait_for(state="attached")
    last_year = time.localtime(time.time() - 366 * 86_400).tm_year
    assert visit.page.locator("#trees h2").last.inner_text().endswith(str(last_year))
    titles = visit.page.locator("#trees a", has_text=re.compile("Conversation [01],"))
    assert [title.get_attribute("title").partition(",")[0] for title in titles.all()] == ["1 turn", "2 turns"]


def test_a_system_message_stays_with_its_conversation_after_a_reload(visit):
    system = "You help to find places to eat, and you are brief."
    visit.open_settings()
    visit.page.fill("#instructions", system)
    visit.say(FIRST)
    assert visit.texts()[0] == system
    visit.page.goto("about:blank")
    visit.page.go_back()
    visit.page.locator("article.system", has_text=system).wait_for()
    assert visit.page.input_value("#instructions") == system
    visit.say("Italian please, something cheap.")
    found = visit.accounts()[-1]
    assert num_of(found, "found on the device") >= 32 and num_of(found, "new") < 30
    visit.page.locator("#settings").evaluate("details => { details.open = true; }")
    visit.page.fill("#instructions", "")
    visit.say("What is my name?")
    assert "No system message from here on" in visit.page.locator("#messages").inner_text()
    visit.press("New conversation")
    assert visit.page.input_value("#instructions") == system, "what was typed before a first turn"


def test_a_reload_shows_the_same_branch_with_the_same_settings(visit):
    visit.open_settings()
    visit.page.fill("#max-tokens", "7")
    visit.say(FIRST)
    visit.say("Can you find me some jazz?")
    visit.edit(1, "Italian please, something cheap.")
    visit.sibling_before.click()
    said = visit.texts()
    assert said[2] == "Can you find me some jazz?"
    reload(visit)
    visit.page.locator("article").first.wait_for()
    assert visit.texts() == said and visit.page.input_value("#max-tokens") == "7"
    visit.press("New conversation")
    assert visit.texts() == []
    visit.page.go_back()
    visit.page.locator("article").first.wait_for()
    assert visit.texts() == said


def test_an_unknown_address_is_reported(visit):
    visit.page.evaluate("() => { location.hash = 'f'.repeat(32); }")
    told_of(visit, "There is no conversation")
    visit.page.wait_for_function("() => document.querySelector('.greeting')")
    visit.complaints.clear()  # the browser's own message about the 404


def test_a_stopped_reply_leaves_its_message(visit):
    visit.say(FIRST)
    said = visit.texts()
    visit.hold_streams()
    visit.page.fill("#text", "What is my name?")
    visit.page.press("#text", "Enter")
    visit.press("Stop")
    assert "nothing was kept" in told_of(visit, "Stopped")
    assert visit.page.input_value("#text") == "What is my name?" and visit.texts() == said
    visit.release_streams()


def test_the_page_works_with_the_keyboard_alone(visit):
    list_many(visit, 100)
    reload(visit)
    visit.say(FIRST)
    message = visit.page.locator("article.user").first
    message.get_by_role("button", name="Edit").press("Enter")
    message.locator("textarea").fill("something else")
    message.locator("textarea").press("Escape")
    assert visit.texts()[0] == FIRST
    assert visit.page.evaluate("document.activeElement.textContent") == "Edit"
    visit.page.keyboard.press("Enter")
    message.locator("textarea").fill("Can you find me some jazz?")
    message.locator("textarea").press("Enter")
    visit.page.get_by_text("2 of 2").wait_for()
    visit.page.locator("#send").wait_for()
    visit.sibling_before.press("Enter")
    assert visit.texts()[0] == FIRST
    assert visit.page.evaluate("document.activeElement.ariaLabel") == "Next version"
    visit.page.locator("#trees a[aria-current]").wait_for()
    visit.page.locator("#search").focus()
    visit.page.keyboard.press("Tab")
    assert visit.page.evaluate("document.activeElement.ariaCurrent") == "page"
    visit.page.keyboard.press("ArrowDown")
    assert visit.page.evaluate("document.activeElement.closest('#trees .row + .row') !== null")
    visit.page.keyboard.press("Tab")
    assert visit.page.evaluate("document.activeElement.tagName") == "SUMMARY", "past all others"


def test_dropped_chunks_are_shown_as_dropped_cells_of_their_row(visit):
    visit.say(FIRST)
    visit.say("Italian please, something cheap.")
    visit.wait_for_frame()
    before = visit.chunks()
    assert sum(before.values()) > before["dropped"]
    visit.press("Drop")
    visit.wait_for_chunks("dropped", at_least=before["dropped"] + 2)
    visit.page.locator("#chunks[data-framed=true]").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_map_uses_the_colours_of_its_legend(visit, scheme):
    visit.page.emulate_media(color_scheme=scheme)
    visit.say(FIRST)
    visit.press("Drop")
    visit.wait_for_chunks("dropped")
    visit.press("New conversation")
    visit.say("Can you find me some jazz?")
    visit.wait_for_chunks("device")
    drawn, legend = visit.page.evaluate(  # of one map
        """() => {
            const canvas = document.querySelector("#chunks");
            const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const seen = new Set();
            for (let at = 0; at < data.length; at += 4) seen.add(`rgb(${data.slice(at, at + 3).join(", ")})`);
            const rows = [...document.querySelectorAll("#legend li")];
            const counted = rows.filter((row) => row.querySelector("b"));
            const shown = counted.filter((row) => row.querySelector("b").textContent !== "0");
            return [[...seen], shown.map((row) => getComputedStyle(row.querySelector("i")).backgroundColor)];
        }"""
    )
    assert legend and set(legend) <= set(drawn)


def test_a_click_on_the_map_opens_the_conversation(visit):
    visit.say("Can you find me some jazz?")
    said = visit.texts()
    visit.wait_for_frame()
    visit.press("New conversation")
    visit.page.locator("#chunks").click(position={"x": 20, "y": 12})  # the latest is the first
    visit.page.locator("article").first.wait_for()
    assert visit.texts() == said


def test_without_a_key_the_page_asks_for_one(visit):
    def guard(route):
        if route.request.headers.get("authorization") == "Bearer mine":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "as the API says"}})

    visit.page.route("**/v1/**", guard)
    visit.page.reload()
    assert "enter yours" in told_of(visit, "key")
    assert visit.page.evaluate("document.activeElement.id") == "key"
    visit.page.fill("#key", "another")
    visit.page.keyboard.press("Enter")
    assert "does not know" in told_of(visit, "another one")
    visit.page.fill("#key", "mine")
    visit.page.keyboard.press("Enter")
    visit.page.locator("#model", has_text="tokens").wait_for()
    visit.page.wait_for_function("() => document.querySelector('#notice').textContent === ''")
    visit.wait_for_map()
    assert len(visit.complaints) < 10, "a key that is not there is not asked for again and again"
    visit.complaints.clear()


def test_a_killed_engine_is_reported_until_it_is_back(visit, server):
    visit.say(FIRST)
    said = visit.texts()
    front = server.process.pid
    os.kill(engine_of(front), signal.SIGKILL)
    told = told_of(visit, "engine")
    assert "reached" not in told
    visit.page.wait_for_function(
        "() => document.querySelector('#notice').textContent === ''", timeout=120_000
    )
    visit.complaints.clear()  # the browser's own messages about the refusals
    visit.say("What is my name?")
    assert visit.texts()[:2] == said and "Ada" in visit.texts()[-1]
