"""The page at three widths, in light and dark, for fingers and for screen readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pensieve_lab.serving.page_visit import Visit, visiting
from tests.server.page.conftest import PageServer
from tests.server.page.test_replies import CALLED, MARKDOWN

pytestmark = pytest.mark.browser

AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text(encoding="utf-8")
WIDTHS = [(1280, 800), (768, 1024), (390, 844)]
TARGET_PX = 40


def serious(visit: Visit) -> list[tuple[str, str]]:
    """Return the rules that the page breaks seriously or critically, with the first element of each."""
    visit.page.evaluate(f"() => {{ {AXE} }}")
    result: Any = visit.page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    assert len(result["passes"]) > 20, "axe has looked at the page"
    return [
        (rule["id"], rule["nodes"][0]["html"])
        for rule in result["violations"]
        if rule["impact"] in ("serious", "critical")
    ]


def fill(server: PageServer, visit: Visit) -> None:
    """Show a conversation with all kinds of items, and one branch in each place."""
    tool = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
    server.replies = [CALLED, MARKDOWN]
    with server.client() as client:
        first = client.responses.create(
            model="fake", input="What is a cat?", tools=[tool], instructions="Be kind."
        )
    turn_id = first.id.removeprefix("resp_")
    server.branches = [(turn_id, "2g1b1c1l1d")]
    visit.page.goto(f"{visit.page.url}#{turn_id}")
    visit.page.reload()
    visit.replies.first.wait_for()
    visit.say("Show me.")
    visit.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    visit.wait_for_chunks("host")


def drawers(visit: Visit, width: int) -> list[str]:
    """The drawers that have a button at this width."""
    return [name for name, limit in (("Conversations", 704), ("State", 992)) if width < limit]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "height"), WIDTHS)
def test_axe_finds_nothing_serious(
    server: PageServer, browser: Any, width: int, height: int, dark: bool
) -> None:
    size, touch = (width, height), width < 1000
    with visiting(server.address, browser=browser, dark=dark, size=size, touch=touch) as visit:
        assert serious(visit) == [], "the greeting"
        fill(server, visit)
        assert serious(visit) == [], "a conversation"
        for drawer in drawers(visit, width):
            visit.press(drawer)
            assert serious(visit) == [], drawer
            visit.press("Close")
        visit.page.evaluate("document.querySelector('#trees button').click()")
        visit.page.locator("#manage-name").wait_for()
        assert serious(visit) == [], "the dialog"
        visit.page.get_by_role("button", name="Delete…").click()
        assert serious(visit) == [], "the question"


def test_axe_reports_what_cannot_be_read_or_named(server: PageServer, visit: Visit) -> None:
    visit.page.evaluate(
        """() => {
            document.querySelector(".greeting").style.color = "#999";
            document.querySelector("#search").removeAttribute("aria-label");
            for (const name of ["title", "placeholder"])
                document.querySelector("#search").removeAttribute(name);
        }"""
    )
    assert {"color-contrast", "label"} <= {rule for rule, _ in serious(visit)}


@pytest.mark.parametrize(("width", "height"), WIDTHS)
def test_nothing_is_wider_than_the_window(server: PageServer, browser: Any, width: int, height: int) -> None:
    with visiting(server.address, browser=browser, size=(width, height)) as visit:
        fill(server, visit)
        server.replies = [
            "word" * 400 + "\n\n```\n" + "code " * 400 + "\n```\n\n|" + "a|" * 60 + "\n|" + "-|" * 60
        ]
        visit.say("word" * 400)
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        assert visit.page.evaluate("document.querySelector('#messages').scrollWidth") <= width
        widths = "all => all.map(one => one.scrollWidth - one.clientWidth)"
        assert max(visit.page.locator("#messages, article").evaluate_all(widths)) <= 0
        for part in ("#text", "#send", "#messages"):
            box = visit.page.locator(part).bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width, part
            assert box["y"] >= 0 and box["y"] + box["height"] <= height, part


@pytest.mark.parametrize(("width", "height"), WIDTHS[1:])
def test_fingers_have_targets_of_40_pixels(server: PageServer, browser: Any, width: int, height: int) -> None:
    with visiting(server.address, browser=browser, size=(width, height), touch=True) as visit:
        fill(server, visit)
        found = 0
        for drawer in ("", *drawers(visit, width)):
            if drawer:
                visit.press(drawer)
            small = visit.page.evaluate(
                """() => [...document.querySelectorAll("button, input, select, textarea, summary, nav a")]
                    .filter(one => one.checkVisibility())
                    .map(one => [one.outerHTML.slice(0, 80), one.getBoundingClientRect()])
                    .map(([html, box]) => [html, box.width, box.height])"""
            )
            found += len(small)
            assert [one for one in small if min(one[1:]) < TARGET_PX] == []
            if drawer:
                visit.press("Close")
        assert found > 20


def test_the_legend_has_every_colour_of_map_and_bars(server: PageServer, visit: Visit) -> None:
    fill(server, visit)
    colour = "one => [one.className, getComputedStyle(one).backgroundColor]"
    legend = dict(visit.page.locator("#legend i").evaluate_all(f"all => all.map({colour})"))
    bars = visit.page.locator(".bar span").evaluate_all(f"all => all.map({colour})")
    assert len(legend) == len(set(legend.values())) == 6
    assert {name for name, _ in bars} == {"gpu", "cpu", "dropped", "new"}
    assert all(legend[name] == shown for name, shown in bars)


def test_a_phone_shows_where_the_chunks_are_without_a_drawer(server: PageServer, browser: Any) -> None:
    with visiting(server.address, browser=browser, size=WIDTHS[-1], touch=True) as visit:
        assert not visit.page.locator("#strip").is_visible()
        fill(server, visit)
        widths = "all => all.filter(one => one.clientWidth).map(one => [one.className, one.clientWidth])"
        found = dict(visit.page.locator("#strip i").evaluate_all(widths))
        assert set(found) == {"gpu", "both", "cpu", "loading", "dropped"}
        assert found["gpu"] > 1.5 * found["cpu"], "two chunks, and one"


def test_motion_stops_for_those_who_ask_for_that(server: PageServer, visit: Visit) -> None:
    visit.hold_streams()
    visit.page.fill("#text", "So?")
    visit.page.press("#text", "Enter")
    names = "getComputedStyle(document.querySelector('.dots i')).animationName"
    visit.page.locator(".dots").wait_for()
    assert visit.page.evaluate(names) == "wait"
    visit.page.emulate_media(reduced_motion="reduce")
    assert visit.page.evaluate(names) == "none"
