"""A server on its own socket in a thread: a fake engine with a real history, and the openai client."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import openai
import uvicorn

from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.history.reader import HistoryReader
from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.http.app import make_app
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.openai.responses.conversations import Conversations
from pensieve_jax.server.openai.responses.routes import Responses
from pensieve_jax.text.loading import byte_tokenizer
from tests.deadlines import TIMEOUT_S
from tests.server.fakes import FakeTurn, Harness
from tests.server.stored_engine import FINGERPRINT, StoredEngine, resolving

START_S = 1_790_000_000.0


class LiveServer:
    """Server that its thread creates and runs; the test's thread uses `on_loop` and `wait_for`.

    Attributes:
        engine, harness, responses: set once it has started.
        url: base URL of its API.
    """

    patience_s = TIMEOUT_S
    engine: StoredEngine
    harness: Harness
    responses: Responses

    def __init__(
        self,
        path: Path,
        script: Callable[[FakeTurn], None] | None = None,
        *,
        start_s: float = START_S,
        **options: Any,
    ) -> None:
        self._path = path
        self._script = script
        self._start_s = start_s
        self._options = options
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._started.wait(self.patience_s)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def on_loop[T](self, work: Callable[[], T]) -> T:
        """Run a function in the server's thread."""

        async def run() -> T:
            return work()

        return self.wait_for(run())

    def wait_for[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def client(self, **options: Any) -> openai.OpenAI:
        options = {"max_retries": 0, "api_key": "none", "_strict_response_validation": True} | options
        return openai.OpenAI(base_url=self.url, **options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        options = {"max_retries": 0, "api_key": "none", "_strict_response_validation": True} | options
        return openai.AsyncOpenAI(base_url=self.url, **options)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            services = await self._services(stack)
            self.responses = Responses(services)
            conversations = Conversations(services, self.responses.locks)
            routes = [*ROUTES, *self.responses.routes, *conversations.routes]
            app = make_app(services, routes, [self.responses.background.lifespan])
            self.harness.app = app
            config = uvicorn.Config(
                app, port=0, log_level="critical", access_log=False, timeout_graceful_shutdown=1
            )
            self._server = uvicorn.Server(config)
            serving = asyncio.ensure_future(self._server.serve())
            while not self._server.started:
                await asyncio.sleep(0.005)
            self._port = self._server.servers[0].sockets[0].getsockname()[1]
            self._started.set()
            await serving

    async def _services(self, stack: contextlib.AsyncExitStack) -> Services:
        """Return the server's services; the stack closes them."""
        clock = VirtualClock(self._start_s)
        self.engine = StoredEngine(self._path, clock, self._script)
        if self._script is None:
            self.engine.script = None  # the test feeds turns itself
        stack.callback(self.engine.store.close)
        reader = stack.enter_context(HistoryReader(self._path, fingerprint=FINGERPRINT))
        tokenizer = byte_tokenizer()
        self.harness = Harness(
            [], self.engine, history=reader, resolver=resolving(tokenizer, reader), **self._options
        )
        self.harness.clock = clock
        self.harness.services.now_s = clock.now
        return self.harness.services
