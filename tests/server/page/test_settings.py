"""What a request has beside the message, and notices that go once their cause is gone."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve_jax import model_source
from pensieve_lab.serving.page_visit import Visit
from tests.server.page.conftest import PageServer

pytestmark = pytest.mark.browser


def sent(visit: Visit, text: str) -> Any:
    """Send a message; return the request that the page made."""
    with visit.page.expect_request("**/v1/responses") as found:
        visit.say(text)
    return found.value.post_data_json


def test_a_request_has_the_fields_that_are_filled_in(server: PageServer, visit: Visit) -> None:
    assert sent(visit, "hi") == {
        "model": "fake",
        "input": "hi",
        "stream": True,
        "temperature": 0,
        "max_output_tokens": 200,
    }
    visit.press("New conversation")
    visit.open_settings()
    values = {
        "instructions": "Be brief.",
        "temperature": "",
        "max-tokens": "64",
        "top-p": "0.9",
        "top-k": "40",
        "seed": "7",
        "presence-penalty": "-0.5",
        "frequency-penalty": "0.25",
        "repetition-penalty": "1.1",
    }
    for name, value in values.items():
        visit.page.fill(f"#{name}", value)
    visit.page.select_option("#effort", "low")
    visit.page.reload()  # the tab keeps them
    visit.page.locator("#model", has_text="tokens").wait_for(state="attached")
    visit.page.route("**/v1/responses", lambda route: route.abort())
    visit.page.fill("#text", "ho")
    with visit.page.expect_request("**/v1/responses") as found:
        visit.page.press("#text", "Enter")
    assert found.value.post_data_json == {
        "model": "fake",
        "input": "ho",
        "stream": True,
        "instructions": "Be brief.",
        "max_output_tokens": 64,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 7,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
        "reasoning": {"effort": "low"},
    }
    visit.complaints.clear()  # the browser's own message about the aborted request


def test_a_wrong_setting_is_named_and_the_notice_goes_once_it_is_mended(
    server: PageServer, visit: Visit
) -> None:
    visit.open_settings()
    visit.page.fill("#temperature", "3")
    visit.page.fill("#text", "hi")
    visit.page.press("#text", "Enter")
    assert visit.page.locator("#notice").inner_text() == "Temperature is 3; it must be a number from 0 to 2."
    assert visit.page.input_value("#text") == "hi" and visit.texts() == [] and server.engine.turns == []
    visit.page.fill("#temperature", "1")
    assert visit.page.locator("#notice").inner_text() == ""
    visit.page.fill("#max-tokens", "1.5")
    visit.page.press("#text", "Enter")
    words = visit.page.locator("#notice").inner_text()
    assert words == "Maximum reply tokens is 1.5; it must be a whole number of at least 1."


def test_a_refusal_goes_once_the_message_is_changed(server: PageServer, visit: Visit) -> None:
    visit.page.fill("#text", "word " * 2000)
    visit.page.press("#text", "Enter")
    visit.page.locator("#notice.wrong", has_text="tokens").wait_for()
    visit.page.fill("#text", "word")
    assert visit.page.locator("#notice").inner_text() == ""
    visit.complaints.clear()  # the browser's own message about the 400


def test_the_page_says_what_the_included_model_is_for(server: PageServer, visit: Visit) -> None:
    assert visit.page.locator("#description").inner_text() == ""
    assert visit.page.locator(".greeting p").count() == 1
    source = model_source.resolve_model(model_source.DEFAULT_MODEL)
    info = server.engine.info
    server.engine.info = type(info)(
        **{name: getattr(info, name) for name in info.__slots__} | {"source": source}
    )
    visit.page.reload()
    visit.page.locator(".greeting", has_text="restaurants, hotels").wait_for()
    visit.page.locator("#description", has_text="restaurants, hotels").wait_for()
