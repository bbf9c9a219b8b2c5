"""The page in a browser: turns, forks, where the state is, and that nothing of it comes from elsewhere."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path

import pytest
from serving.page_visit import BROWSER, visiting
from serving.served import ServedProcess

SIZES = ("--model=chat", "--gpu_pages=64", "--cpu_pages=64", "--max_num_running=4", "--token_buckets=4,64")
FIRST = "Hi! My name is Ada. I am looking for a place to eat in San Jose."
PAGE = resources.files("pensieve_jax.server.page")


@pytest.fixture(scope="module")
def server(tmp_path_factory, compilation_cache):
    history = tmp_path_factory.mktemp("page") / "chats.sqlite"
    flags = [*SIZES, f"--history={history}", f"--compilation_cache_dir={compilation_cache}"]
    with ServedProcess(flags) as served:
        yield served


@pytest.fixture
def visit(server):
    with visiting(server.address) as visit:
        yield visit
        assert visit.complaints == []


pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not Path(BROWSER).exists(), reason=f"{BROWSER} is not installed"),
    pytest.mark.skipif(os.environ.get("JAX_PLATFORMS") != "cpu", reason="a server of its own, on a CPU"),
]


def num_of(account: str, what: str) -> int:
    found = re.search(rf"(\d+) {what}", account)
    return int(found[1]) if found else 0


def test_an_answer_survives_what_is_done_to_its_state(visit):
    visit.say(FIRST)
    visit.say("Italian please, something cheap.")
    visit.press("Push out")
    visit.wait_for_chunks("host")
    assert visit.chunks()["device"] == 0
    visit.say("What is my name?")
    visit.press("forget")
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


def test_edits_and_regenerations_are_forks_that_can_be_gone_back_to(visit):
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


def test_conversations_are_listed_and_opened_again(visit):
    visit.say("Can you find me some jazz?")
    said = visit.texts()
    visit.page.reload()
    visit.page.locator("#trees button", has_text="jazz").first.click()
    visit.page.locator("article").first.wait_for()
    assert visit.texts() == said
    visit.say("Something by Miles Davis.")
    assert num_of(visit.accounts()[-1], "new") < num_of(visit.accounts()[0], "new") + 20


def test_another_conversation_while_a_reply_comes(visit):
    visit.say(FIRST)
    visit.hold_streams()  # a reply that is on its way for as long as it takes
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


def test_a_refusal_is_told_and_the_message_comes_back(visit):
    visit.page.get_by_text("Settings").click()
    visit.page.fill("#max-tokens", "0")
    long = "word " * 2000
    visit.page.fill("#text", long)
    visit.page.press("#text", "Enter")
    visit.page.locator("#notice", has_text="tokens").wait_for()
    assert visit.page.input_value("#text").strip() == long.strip() and visit.texts() == []
    (complaint,) = visit.complaints  # the browser's own note of the refusal
    assert "400" in complaint
    visit.complaints.clear()


def test_nothing_comes_from_elsewhere_or_is_written_as_html():
    for file in PAGE.iterdir():
        if file.name.endswith((".html", ".css", ".js")):
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|document\.write|eval\(", text), (
                file.name
            )
            assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|style=", text.partition("<body>")[2]), (
                file.name
            )
