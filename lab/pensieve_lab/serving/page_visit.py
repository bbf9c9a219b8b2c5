"""A visit to the server's page with a browser: what a person does there, and what it shows then.

Owns: the browser, and how the page's parts are found.
Does not know: which server, or what should be seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, sync_playwright

BROWSER = "/usr/bin/chromium-headless-shell"  # Debian's, of the package of that name
_PATIENCE_MS = 30_000
_COUNT = re.compile(r"(\d+) (device and host|device|host|on its way|dropped)")


class Visit:
    """One page in one browser.

    Attributes:
      page: playwright's.
      complaints: what the browser said against the page: errors, and what its policy kept from loading.
    """

    def __init__(self, page: Page, address: str) -> None:
        """Open the page and wait until it knows its model."""
        self.page = page
        self.complaints: list[str] = []
        page.set_default_timeout(_PATIENCE_MS)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(address)
        page.locator("#model", has_text="tokens").wait_for(state="attached")  # it may be in a drawer

    @property
    def replies(self) -> Locator:
        """Replies on the page that have ended."""
        return self.page.locator("article.reply", has=self.page.locator(".told"))

    @property
    def sibling_before(self) -> Locator:
        """Of each message with siblings, the button that shows the one before."""
        return self.page.get_by_role("button", name="Previous version")

    def texts(self) -> list[str]:
        """What stands on the page, message by message."""
        return self.page.locator("article .text").all_inner_texts()

    def accounts(self) -> list[str]:
        """Where the tokens of each turn came from, in the page's words."""
        return self.page.locator("article .told").all_inner_texts()

    def say(self, text: str) -> None:
        """Send a message and wait for its reply."""
        count = self.replies.count()
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")
        self._wait_for_replies(count + 1)

    def again(self, index: int) -> None:
        """Have the reply `index` said again, which is a fork, and wait for it."""
        self.replies.nth(index).get_by_role("button", name="Again").click()
        self._wait_for_replies(index + 1)

    def edit(self, index: int, text: str) -> None:
        """Send message `index` in other words, which is a fork, and wait for its reply."""
        message = self.page.locator("article.user").nth(index)
        message.get_by_role("button", name="Edit").click()
        message.locator("textarea").fill(text)
        message.get_by_role("button", name="Send").click()
        self._wait_for_replies(index + 1)

    def press(self, button: str) -> None:
        """Press a button of the page by its name."""
        self.page.get_by_role("button", name=button, exact=True).click()

    def hold_streams(self) -> None:
        """From here on no reply comes, until `release_streams`."""
        self.page.route("**/v1/responses", lambda route: None)

    def release_streams(self) -> None:
        """Replies come again."""
        self.page.unroute("**/v1/responses")

    def chunks(self) -> dict[str, int]:
        """Chunks by where they are, as the map says to those who cannot see it."""
        told = self.page.get_attribute("#chunks", "aria-label") or ""
        return {name: int(count) for count, name in _COUNT.findall(told)}

    def wait_for_chunks(self, name: str, *, at_least: int = 1) -> None:
        """Until the map shows so many chunks there."""
        self.page.wait_for_function(
            "([name, least]) => [...document.querySelectorAll('#legend li')].some(row => "
            "row.textContent.startsWith(name + ' ') && Number(row.querySelector('b').textContent) >= least)",
            arg=[name, at_least],
        )

    def wait_for_map(self) -> None:
        """Until the server has told its map."""
        self.page.locator("#totals", has_text="pages free").wait_for(state="attached")

    def wait_for_no_state(self) -> None:
        """Until the map shows no chunk in either tier, nor on its way."""
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('#legend li b')].slice(0, 4).every(b => b.innerText === '0')"
        )

    def wait_for_frame(self) -> None:
        """Until the map shows the branch of the turn that stands last on the page."""
        self.page.locator("#chunks[data-framed=true]").wait_for()

    def picture(self, path: Path) -> None:
        """Keep what is seen."""
        self.page.screenshot(path=path)

    def _wait_for_replies(self, count: int) -> None:
        self.page.locator("#send").wait_for()  # hidden while a reply comes
        self.replies.nth(count - 1).wait_for()
        assert self.replies.count() == count, "replies behind the one that was asked for"

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser for several visits: starting one takes longer than most of them do.

    Raises playwright's errors where there is no browser.
    """
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visiting(
    address: str, *, browser: Browser | None = None, dark: bool = False, size: tuple[int, int] = (1280, 760)
) -> Iterator[Visit]:
    """A window of so many pixels at the page, which shares neither storage nor cookies with other visits.

    Args:
      address: of the server.
      browser: that of `browsing`; None starts one for this visit.
      dark: what the page is told that people like.
      size: of the window.
    """
    width, height = size
    with nullcontext(browser) if browser is not None else browsing() as there:
        context = there.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        try:
            yield Visit(context.new_page(), address)
        finally:
            context.close()
