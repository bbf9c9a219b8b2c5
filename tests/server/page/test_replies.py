"""Replies on the page: Markdown, code, reasoning, calls, and how fast they came."""

from __future__ import annotations

import re

import pytest

from pensieve_lab.serving.page_visit import Visit
from tests.server.fakes import FakeTurn
from tests.server.page.conftest import PageServer

pytestmark = pytest.mark.browser

MARKDOWN = """# Title

Some *words*, a [link](https://example.com/) and `code`:

```python
print("<b>")
```

| a | b |
| - | - |
| 1 | 2 |
"""
DOCUMENTS = [
    "# Title\n\nSome *words*\nin two lines.\n\n> a quote\n> of two\n\n***\n\nEnd\n===\n",
    "See [it] and [that][it].\n\n1. one [it]\n\n[it]: https://example.com/\n\nAgain [it].\n",
    "1. one\n\n   more\n2. two\n   - three\n\n\n4. four\nlazy\n\n- a\n- b\n\n- c\n\nEnd",
]
HOSTILE = """<img src=x onerror="document.title='owned'"><script>document.title='owned'</script>
<b>bold</b> ![seen](http://127.0.0.1:1/seen.png) [run](javascript:document.title='owned')
[data](data:text/html,1)"""
CALL = '{"name": "look_up", "arguments": {"word": "cat"}}'
CALLED = f"<think>\nIs it so?\n</think>\n\nI look.\n<tool_call>\n{CALL}\n</tool_call>"


def test_a_reply_is_shown_as_markdown_also_after_a_reload(server: PageServer, visit: Visit) -> None:
    server.replies = [MARKDOWN]
    visit.say("Show me.")
    for _ in range(2):
        reply = visit.page.locator("article.reply")
        assert reply.locator("h1").inner_text() == "Title"
        link = reply.locator("a")
        assert (
            link.get_attribute("href") == "https://example.com/"
            and link.get_attribute("rel") == "noopener noreferrer"
        )
        assert reply.locator(".code pre").inner_text() == 'print("<b>")\n'
        assert reply.locator(".code-header span").inner_text() == "python"
        assert reply.locator(".wide td").all_inner_texts() == ["1", "2"]
        visit.page.reload()
        visit.replies.first.wait_for()


def test_a_reply_cannot_write_into_the_page_or_load_from_elsewhere(server: PageServer, visit: Visit) -> None:
    server.replies = [HOSTILE]
    asked: list[str] = []
    visit.page.on("request", lambda request: asked.append(request.url))
    visit.say("<i>Attack!</i>")
    reply = visit.page.locator("article.reply .text")
    assert reply.locator("img, script, b, i").count() == 0
    assert "<b>bold</b>" in reply.inner_text() and "<img src=x" in reply.inner_text()
    assert [link.get_attribute("href") for link in reply.locator("a").all()] == [None, None]
    assert visit.page.locator("article.user .text").inner_text() == "<i>Attack!</i>"
    assert visit.page.title() == "Pensieve"
    assert all(url.startswith(server.address) for url in asked)


@pytest.mark.parametrize("reply", [">" * 60 + "word", "- " * 1900 + "word"], ids=["quotes", "lists"])
def test_a_reply_of_deeply_nested_blocks_is_shown_as_it_is(
    server: PageServer, visit: Visit, reply: str
) -> None:
    """Models that repeat themselves write so."""
    server.replies = [reply]
    with server.client() as client:
        made = client.responses.create(model="fake", input="Quote.", temperature=0)
    visit.page.goto(f"{server.address}/#{made.id.removeprefix('resp_')}")
    visit.page.reload()
    shown = visit.page.locator("article.reply .text pre")
    shown.wait_for()
    assert shown.inner_text() == made.output_text == reply
    assert visit.page.locator("article.user .text").inner_text() == "Quote."


@pytest.mark.parametrize("document", DOCUMENTS, ids=["blocks", "named links", "lists"])
def test_a_reply_that_grows_is_shown_as_the_whole_text_would_be(visit: Visit, document: str) -> None:
    """Each step has the elements of marked's own rendering of the text so far."""
    shown, expected = visit.page.evaluate(
        """async (text) => {
            const { showMarkdown } = await import("/page/markdown.js");
            const { Marked } = await import("/page/vendor/marked.esm.js");
            const marked = new Marked({ gfm: true, breaks: true });
            const outline = (root) => [...root.querySelectorAll("*")].map((one) =>
                `${one.localName} ${one.getAttribute("href")} ${one.textContent.replace(/\\s/g, "")}`);
            const options = { RETURN_DOM_FRAGMENT: true, ALLOWED_URI_REGEXP: /^https?:/ };
            const whole = (text) => DOMPurify.sanitize(marked.parse(text), options);
            const element = document.createElement("div");
            const found = [[], []];
            for (let end = 1; end <= text.length; end++) {
                showMarkdown(element, text.slice(0, end));
                found[0].push(outline(element));
                found[1].push(outline(whole(text.slice(0, end))));
            }
            return found;
        }""",
        document,
    )
    assert len(shown) == len(document) and shown == expected


def test_blocks_that_are_finished_stay_while_a_reply_grows(visit: Visit) -> None:
    kept = visit.page.evaluate(
        """async () => {
            const { showMarkdown } = await import("/page/markdown.js");
            const element = document.createElement("div");
            showMarkdown(element, "one\\n\\ntwo");
            const before = [...element.children];
            showMarkdown(element, "one\\n\\ntwo *three*");
            return [...element.children].map((one, index) => one === before[index]);
        }"""
    )
    assert kept == [True, False]


def test_a_long_paragraph_is_shown_without_emphasis(visit: Visit) -> None:
    """The parser takes 10 s for 40,000 characters that open emphasis and do not close it."""
    line = "*a* " * 1001
    tags, text = visit.page.evaluate(
        """async (text) => {
            const { showMarkdown } = await import("/page/markdown.js");
            const element = document.createElement("div");
            showMarkdown(element, text);
            return [[...element.querySelectorAll("*")].map((one) => one.localName), element.textContent];
        }""",
        f"{line}\nb\n\n*c*",
    )
    assert tags == ["p", "br", "p", "em"]
    assert text.replace("\n", "") == f"{line}bc"


def test_the_time_of_paragraphs_is_limited(visit: Visit) -> None:
    """In this test, a millisecond passes whenever the clock is read."""
    has_emphasis = visit.page.evaluate(
        """async () => {
            const { showMarkdown } = await import("/page/markdown.js");
            let nowMs = 0;
            performance.now = () => nowMs++;
            const element = document.createElement("div");
            showMarkdown(element, "*a*\\n\\n".repeat(200));
            return [...element.children].map((one) => one.querySelector("em") !== null);
        }"""
    )
    num = has_emphasis.count(True)
    assert 10 < num < 100
    assert has_emphasis == [True] * num + [False] * (200 - num)


def test_a_reply_that_is_slow_to_draw_is_drawn_less_often(server: PageServer, visit: Visit) -> None:
    """In this test, time passes only where an element gets a block: 100 ms each."""
    turns: list[FakeTurn] = []
    server.script = turns.append
    visit.page.fill("#text", "So?")
    visit.page.press("#text", "Enter")
    visit.page.locator(".waiting").wait_for()
    visit.page.evaluate(
        """() => {
            window.nowMs = performance.now();
            performance.now = () => window.nowMs;
            const append = Element.prototype.append;
            Element.prototype.append = function (...nodes) {
                if (this.matches(".text")) window.nowMs += 100;
                append.apply(this, nodes);
            };
        }"""
    )
    text = visit.page.locator("article.reply .text")
    server.on_loop(lambda: turns[0].feed("one"))
    text.filter(has_text="one").wait_for()
    server.on_loop(lambda: turns[0].feed(" two"))
    for passed_ms in (0, 0, 0, 0, 0, 399, 0):
        visit.page.evaluate(f"window.nowMs += {passed_ms}; new Promise(requestAnimationFrame)")
    assert text.inner_text() == "one"
    visit.page.evaluate("window.nowMs += 1")
    text.filter(has_text="one two").wait_for()


def test_the_browser_refuses_inline_scripts_and_elements_made_of_text(visit: Visit) -> None:
    found = visit.page.evaluate(
        """() => {
            const script = document.createElement("script");
            try { script.append("document.title = 'owned'"); document.head.append(script); } catch {}
            try { document.createElement("div").innerHTML = "<b>x</b>"; } catch (error) { return error.name; }
            return "made";
        }"""
    )
    assert found == "TypeError" and visit.page.title() == "Pensieve"
    assert len(visit.complaints) >= 2 and all("Trusted" in one or "script" in one for one in visit.complaints)
    visit.complaints.clear()


def test_code_and_replies_are_copied(server: PageServer, visit: Visit) -> None:
    server.replies = [MARKDOWN]
    visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visit.say("Show me.")
    for name, text in (("Copy code", 'print("<b>")\n'), ("Copy reply", MARKDOWN)):
        visit.press(name)
        visit.page.get_by_role("button", name="Copied").wait_for()
        assert visit.page.evaluate("navigator.clipboard.readText()") == text
        visit.page.get_by_role("button", name=name).wait_for()  # its name comes back


def test_a_copy_that_the_browser_refuses_is_said(visit: Visit) -> None:
    """Over plain HTTP from another machine, a refused copy raises nothing."""
    visit.say("Show me.")
    visit.page.evaluate(
        """() => {
            Object.defineProperty(navigator, "clipboard", { value: undefined });
            document.execCommand = () => false;
        }"""
    )
    visit.press("Copy reply")
    visit.page.get_by_text("Not allowed").wait_for()


def test_reasoning_and_calls_are_folded_also_after_a_reload(server: PageServer, visit: Visit) -> None:
    server.replies = [CALLED]
    tool = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
    with server.client() as client:
        made = client.responses.create(model="fake", input="What is a cat?", tools=[tool], temperature=0)
    visit.page.goto(f"{server.address}/#{made.id.removeprefix('resp_')}")
    visit.page.reload()
    reply = visit.page.locator("article.reply")
    reply.locator("details").nth(1).wait_for()
    assert reply.locator("summary").all_inner_texts() == ["Reasoning", "Called look_up"]
    assert not reply.locator("pre").first.is_visible() and not reply.locator("pre").last.is_visible()
    assert reply.locator(".text").inner_text() == "I look."
    reply.locator("summary").first.click()
    reply.locator("summary").last.press("Enter")
    assert reply.locator(".thought").inner_text().strip() == "Is it so?"
    assert re.sub(r"\s", "", reply.locator(".arguments").inner_text()) == '{"word":"cat"}'


def test_results_of_tools_that_a_client_sent_are_shown(server: PageServer, visit: Visit) -> None:
    server.replies = [CALLED, "A small animal."]
    tool = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
    common = {"model": "fake", "tools": [tool], "temperature": 0}
    with server.client() as client:
        first = client.responses.create(input="What is a cat?", **common)
        call = next(item for item in first.output if item.type == "function_call")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "It <b>purrs</b>."}
        client.responses.create(input=[result], previous_response_id=first.id, **common)
    visit.page.goto(f"{server.address}/#{first.id.removeprefix('resp_')}")
    visit.page.reload()
    visit.page.get_by_text("Result of a tool").click()
    assert visit.page.locator("article.user pre").inner_text() == "It <b>purrs</b>."
    assert visit.texts() == ["What is a cat?", "I look.", "A small animal."]
    assert visit.page.get_by_role("button", name="Edit").count() == 1


def test_a_streamed_reply_waits_then_reasons_then_speaks(server: PageServer, visit: Visit) -> None:
    turns: list[FakeTurn] = []
    server.script = turns.append
    visit.page.fill("#text", "So?")
    visit.page.press("#text", "Enter")
    visit.page.get_by_text("Waiting for the first token").wait_for()
    assert visit.page.locator("#messages").get_attribute("aria-busy") == "true"
    for text, seen in (
        ("<think>\nIs it", "Reasoning…"),
        (" so?\n</think>\n\nYes,", "Yes,"),
        (" it *is*.", "Yes, it is."),
    ):
        server.on_loop(lambda text=text: turns[0].feed(text))
        visit.page.locator("article.reply", has_text=seen).wait_for()
        assert visit.page.get_by_text("Waiting for the first token").count() == 0
    server.on_loop(lambda: (turns[0].feed("", (257,)), turns[0].finish()))
    visit.replies.first.wait_for()
    assert visit.page.locator("article.reply summary").inner_text() == "Reasoning"
    assert visit.texts() == ["So?", "Yes, it is."]


def test_each_reply_says_how_fast_it_came_also_after_a_reload(server: PageServer, visit: Visit) -> None:
    turns: list[FakeTurn] = []
    server.script = turns.append
    visit.page.clock.install()
    visit.page.fill("#text", "Count.")
    visit.page.press("#text", "Enter")
    visit.page.locator(".waiting").wait_for()
    for ms, text in ((500, "uno "), (1000, "due "), (1000, "tre")):
        visit.page.clock.run_for(ms)
        server.on_loop(lambda text=text: turns[0].feed(text, (1, 2)))
        visit.page.clock.run_for(50)
        visit.page.locator("article.reply .text", has_text=text.strip()).wait_for()
    server.on_loop(lambda: turns[0].finish())
    visit.replies.first.wait_for()
    for _ in range(2):
        words = visit.page.locator(".speed").inner_text()
        found = re.fullmatch(r"first token after ([\d.]+) s, then ([\d.]+) tokens/s", words)
        assert found and 0.4 < float(found[1]) < 1.5 and 1 < float(found[2]) < 3.5, words
        visit.page.reload()
        visit.page.clock.run_for(50)
        visit.replies.first.wait_for()


def test_a_reply_that_comes_in_one_piece_says_how_long_it_took(server: PageServer, visit: Visit) -> None:
    visit.page.clock.install()
    visit.page.clock.pause_at(visit.page.evaluate("Date.now()") + 1000)
    visit.page.fill("#text", "Count.")
    visit.page.press("#text", "Enter")
    visit.page.locator(".speed").wait_for()
    assert re.fullmatch(r"\d+ tokens within 0.\d+ s", visit.page.locator(".speed").inner_text())
