"""The map of chunks names its conversations and opens them, from the first view on."""

from __future__ import annotations

import pytest

from pensieve_lab.serving.page_visit import Visit
from tests.server.page.conftest import PageServer

pytestmark = pytest.mark.browser


def make_conversation(server: PageServer, text: str) -> str:
    """Create a conversation of one turn over HTTP, and return its turn's id."""
    with server.client() as client:
        return client.responses.create(model="fake", input=text, temperature=0).id.removeprefix("resp_")


def drawn_words(visit: Visit) -> str:
    """Return the texts that the page draws into its map at the next change of its size."""
    return visit.page.evaluate(
        """async () => {
            const words = [];
            const draw = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, ...where) {
                words.push(text);
                return draw.call(this, text, ...where);
            };
            const canvas = document.querySelector("#chunks");
            canvas.parentElement.style.width = "15rem";
            for (let frame = 0; frame < 60 && !words.length; frame++)
                await new Promise(requestAnimationFrame);
            CanvasRenderingContext2D.prototype.fillText = draw;
            canvas.parentElement.style.width = "";
            return words.join("\\n");
        }"""
    )


def test_after_a_load_the_map_names_conversations_and_a_click_opens_one(
    server: PageServer, visit: Visit
) -> None:
    first, second = (make_conversation(server, f"Where is {city}?") for city in ("Rome", "Oslo"))
    server.branches = [(first, "2g"), (second, "1b")]
    visit.page.reload()
    visit.page.locator("#model", has_text="tokens").wait_for(state="attached")
    visit.wait_for_chunks("device", at_least=2)
    words = drawn_words(visit)
    assert "Rome" in words and "Oslo" in words and "not in the list" not in words
    visit.page.locator("#chunks").click(position={"x": 20, "y": 12})
    visit.page.locator("article").first.wait_for()
    assert visit.texts()[0].startswith("Where is")
