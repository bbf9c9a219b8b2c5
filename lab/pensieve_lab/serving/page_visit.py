"""A browser visit to the server's page: what a person does there, and what the page then shows.

Owns: the browser, and how the page's parts are found.
Does not know: which server it visits, or what should be seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, sync_playwright

BROWSER = "/usr/bin/chromium-headless-shell"  # from Debian's package of that name
_PATIENCE_MS = 120_000
_COUNT = re.compile(r"(\d+) (device and host|device|host|on its way|dropped)")


class Visit:
    """Page in a browser.

    Attributes:
      page: playwright's page.
      complaints: errors and warnings of the browser, including what its policy blocked.
    """

    def __init__(self, page: Page, address: str) -> None:
        """Open the page and wait until it shows its model."""
        self.page = page
        self.complaints: list[str] = []
        page.set_default_timeout(_PATIENCE_MS)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(address)
        page.locator("#model", has_text="tokens").wait_for(state="attached")  # it may be in a drawer

    @property
    def replies(self) -> Locator:
        """Finished replies on the page."""
        return self.page.locator("article.reply", has=self.page.locator(".told"))

    @property
    def sibling_before(self) -> Locator:
        """Buttons of messages with siblings that show the previous sibling."""
        return self.page.get_by_role("button", name="Previous version")

    def texts(self) -> list[str]:
        """Return the texts of all messages on the page."""
        return self.page.locator("article .text").all_inner_texts()

    def accounts(self) -> list[str]:
        """Return the page's words on where the tokens of each turn came from."""
        return self.page.locator("article .told").all_inner_texts()

    def say(self, text: str) -> None:
        """Send a message and wait for its reply."""
        count = self.replies.count()
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")
        self._wait_for_replies(count + 1)

    def again(self, index: int) -> None:
        """Regenerate the reply `index`, which forks the conversation, and wait for it."""
        self.replies.nth(index).get_by_role("button", name="Again").click()
        self._wait_for_replies(index + 1)

    def edit(self, index: int, text: str) -> None:
        """Edit message `index`, which forks the conversation, and wait for its reply."""
        message = self.page.locator("article.user").nth(index)
        message.get_by_role("button", name="Edit").click()
        message.locator("textarea").fill(text)
        message.get_by_role("button", name="Send").click()
        self._wait_for_replies(index + 1)

    def press(self, button: str) -> None:
        """Press a button by its name."""
        self.page.get_by_role("button", name=button, exact=True).click()

    def open_settings(self) -> None:
        """Unfold the settings, which are folded at first."""
        self.page.locator("#settings > summary").click()

    def hold_streams(self) -> None:
        """Hold back replies until `release_streams`."""
        self.page.route("**/v1/responses", lambda route: None)

    def release_streams(self) -> None:
        """Let replies through again."""
        self.page.unroute("**/v1/responses")

    def chunks(self) -> dict[str, int]:
        """Return the number of chunks by place, from the map's label for screen readers."""
        told = self.page.get_attribute("#chunks", "aria-label") or ""
        return {name: int(count) for count, name in _COUNT.findall(told)}

    def wait_for_chunks(self, name: str, *, at_least: int = 1) -> None:
        """Wait until the map shows at least `at_least` chunks in a place."""
        self.page.wait_for_function(
            "([name, least]) => [...document.querySelectorAll('#legend li')].some(row => "
            "row.textContent.startsWith(name + ' ') && Number(row.querySelector('b')?.textContent) >= least)",
            arg=[name, at_least],
        )

    def wait_for_map(self) -> None:
        """Wait until the server has sent its map."""
        self.page.locator("#totals", has_text="pages free").wait_for(state="attached")

    def wait_for_no_state(self) -> None:
        """Wait until the map shows no chunk in either tier nor in transit."""
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('#legend li b')].slice(0, 4).every(b => b.innerText === '0')"
        )

    def wait_for_frame(self) -> None:
        """Wait until the map shows the branch of the last turn on the page."""
        self.page.locator("#chunks[data-framed=true]").wait_for()

    def picture(self, path: Path) -> None:
        self.page.screenshot(path=path)

    def _wait_for_replies(self, count: int) -> None:
        self.page.locator("#send").wait_for()  # hidden while a reply comes
        self.replies.nth(count - 1).wait_for()
        assert self.replies.count() == count, "there are replies after the requested one"

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


@contextmanager
def browsing() -> Iterator[Browser]:
    """Open a browser for several visits: starting one takes longer than most visits.

    Raises playwright's errors if the browser is missing.
    """
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visiting(
    address: str,
    *,
    browser: Browser | None = None,
    dark: bool = False,
    size: tuple[int, int] = (1280, 760),
    touch: bool = False,
) -> Iterator[Visit]:
    """Open a window with the page; it shares neither storage nor cookies with other visits.

    Args:
      address: address of the server.
      browser: browser from `browsing`; None starts one for this visit.
      dark: whether the page is told that the user prefers dark colours.
      size: width and height of the window in pixels.
      touch: whether the screen is touched, as a phone's.
    """
    width, height = size
    with nullcontext(browser) if browser is not None else browsing() as there:
        context = there.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            has_touch=touch,
            is_mobile=touch,
        )
        try:
            yield Visit(context.new_page(), address)
        finally:
            context.close()
