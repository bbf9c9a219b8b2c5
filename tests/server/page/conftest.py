"""The page in a browser, on a server in this process whose replies and map a test writes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve_jax.server.http.services import Services
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.text import ChatFormat
from pensieve_lab.serving.page_visit import BROWSER, Visit, browsing, visiting
from tests.server.fakes import FakeTurn
from tests.server.live import LiveServer
from tests.server.scripted import marked_tokenizer, spoken
from tests.server.stored_engine import resolving

HAS_BROWSER = Path(BROWSER).exists() and os.environ.get("JAX_PLATFORMS") == "cpu"


class PageServer(LiveServer):
    """Server whose model says `replies`, one for each turn, with reasoning and calls in Qwen3's form.

    Attributes:
        replies: what the model says next, if the test does not set `script`.
        branches: branches of the map of chunks: pairs of a turn's id and runs of states.
    """

    def __init__(self, path: Path) -> None:
        self.replies: list[str] = []
        self.branches: list[tuple[str, str]] = []
        self.script: Callable[[FakeTurn], None] = self._say
        self._tokenizer = marked_tokenizer()
        super().__init__(path, lambda turn: self.script(turn))

    @property
    def address(self) -> str:
        return self.url.removesuffix("/v1")

    async def _services(self, stack: contextlib.AsyncExitStack) -> Services:
        services = await super()._services(stack)
        services.tokenizer = self._tokenizer
        services.chat_format = ChatFormat(self._tokenizer, parsers=ServerSettings().parsers)
        services.resolver = resolving(self._tokenizer, services.history)
        self.engine.answers = Answers(self)
        return services

    def _say(self, turn: FakeTurn) -> None:
        spoken(self._tokenizer, [self.replies.pop(0) if self.replies else "Noted."])(turn)


class Answers(dict[str, Any]):
    """What the engine answers to the server; the map is made anew for each request."""

    def __init__(self, server: PageServer) -> None:
        super().__init__(stats={}, census={}, distributions={})
        self._server = server

    def __missing__(self, name: str) -> Any:
        assert name == "chunk_map", name
        sizes = {"gpu_pages": 64, "free_gpu_pages": 40, "cpu_pages": 256, "free_cpu_pages": 250}
        branches = [
            {
                "turn_id": turn_id,
                "num_tokens": 32,
                "busy": False,
                "num_shared": 0,
                "first": 0,
                "states": states,
            }
            for turn_id, states in self._server.branches
        ]
        return {"chunk_tokens": 32, **sizes, "branches": branches}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    if not HAS_BROWSER:
        pytest.skip(f"{BROWSER} is not installed, or the tests are not on a CPU")
    with PageServer(tmp_path / "page.sqlite") as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def visit(server: PageServer, browser: Any) -> Iterator[Visit]:
    """A visit without complaints of the browser, such as scripts that its policy blocked."""
    with visiting(server.address, browser=browser) as visit:
        yield visit
        assert visit.complaints == []
