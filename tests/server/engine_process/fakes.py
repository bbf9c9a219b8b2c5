"""An engine on the fake runner, in a thread behind a socket pair: everything between event loop and device.

Tests of code that serves requests need neither a model nor a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.engine import Engine
from pensieve_jax.server.async_engine import EngineInfo
from pensieve_jax.server.engine_process.async_llm import AsyncEngine
from pensieve_jax.server.engine_process.engine_server import EngineServer
from pensieve_jax.server.engine_process.messages import Failed, Ready, Start
from pensieve_jax.server.engine_process.spawn import EngineHandle
from pensieve_jax.server.engine_process.supervisor import RestartPolicy
from pensieve_jax.server.engine_process.wire import FrameReader, FrameWriter
from pensieve_jax.text import Tokenizer, byte_tokenizer
from tests.deadlines import TIMEOUT_S
from tests.engine.harness import Harness, small_config
from tests.engine.oracles import TurnFacts

TOKENIZER = byte_tokenizer()


def info_of(harness: Harness, history: str = "") -> EngineInfo:
    return EngineInfo(
        model_name="fake",
        source="fake",
        fingerprint="test",
        history=history,
        limits=harness.engine.limits,
        max_num_running=harness.config.scheduler.running_limit,
        chunk_tokens=harness.config.cache.chunk_tokens,
        description={"model": {"name": "fake"}},
    )


class Brake:
    """Gate that holds the engine's thread before each step until more are allowed."""

    def __init__(self, harness: Harness, num_steps: int) -> None:
        """Create it with `num_steps` steps allowed."""
        self._steps = threading.Semaphore(num_steps)
        self._launch = harness.runner.launch
        harness.runner.launch = self._held  # type: ignore[method-assign]

    def let(self, num_steps: int) -> None:
        """Allow `num_steps` more steps."""
        self._steps.release(num_steps)

    def _held(self, plan: Any) -> Any:
        assert self._steps.acquire(timeout=TIMEOUT_S), "no further step was allowed"
        return self._launch(plan)


type Parts = tuple[Engine, Tokenizer | None, EngineInfo]
"""Server and engine of one thread."""


class ThreadHandle:
    """An engine in a thread of this process, which shares the GIL with the event loop."""

    def __init__(self, make: Callable[[], Parts]) -> None:
        """Start the thread, which creates the engine itself."""
        self.front, self._engine_end = socket.socketpair()
        self.greeting: Start | None = None
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        threading.Thread(target=self._run, daemon=True, name="engine").start()

    async def wait(self) -> str:
        """Return after the thread has ended."""
        await self._ended.wait()
        return "ended"

    def kill(self) -> None:
        """Close the socket, on which the thread ends: a thread cannot be killed."""
        with contextlib.suppress(OSError):
            self._engine_end.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            engine, tokenizer, info = self._make()
            EngineServer(engine, tokenizer, self._engine_end, info=info).run()
        finally:
            self._engine_end.close()
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._ended.set)


class FakeEngines:
    """Starts engines in threads, each with its own harness over one shared history file, if any."""

    def __init__(self, path: Path | None = None, **config: Any) -> None:
        self.path = path
        self.config = config
        self.harnesses: list[Harness] = []
        self.handles: list[ThreadHandle] = []
        self.prepare: Callable[[Harness], None] = lambda harness: None

    async def begin(self) -> EngineHandle:
        handle = ThreadHandle(self._make)
        self.handles.append(handle)
        return handle

    @property
    def harness(self) -> Harness:
        """The harness of the latest engine."""
        return self.harnesses[-1]

    def _make(self) -> Parts:
        harness = Harness(small_config(**self.config), path=self.path, tokenizer=TOKENIZER)
        self.prepare(harness)
        self.harnesses.append(harness)
        return harness.engine, TOKENIZER, info_of(harness, str(self.path or ""))


class ScriptedHandle:
    """An engine handle that sends one message, then neither writes nor reads; it ends when it is killed."""

    def __init__(
        self, first: Ready | Failed, *, has_ended: bool = False, greeting: Start | None = None
    ) -> None:
        """Create it; `has_ended` makes it a process that reports why it cannot serve, and exits."""
        self.front, self._engine = socket.socketpair()
        self.greeting = greeting
        self.killed = asyncio.Event()
        self._engine.sendall(FrameWriter().frame(first))
        if has_ended:
            self.kill()

    def heard(self) -> Start:
        """First message that it received, once the other side knows that it is ready."""
        (start,) = FrameReader(Start).feed(self._engine.recv(1 << 16))
        assert isinstance(start, Start)
        return start

    async def wait(self) -> str:
        await self.killed.wait()
        return "ended"

    def hang(self) -> None:
        """Close the socket and keep running."""
        self._engine.close()

    def kill(self) -> None:
        self._engine.close()
        self.killed.set()


@contextlib.asynccontextmanager
async def fake_engine(engines: FakeEngines | None = None, **config: Any) -> AsyncIterator[AsyncEngine]:
    """Yield an engine that is ready."""
    engines = engines or FakeEngines(**config)
    async with AsyncEngine(engines.begin, restarts=RestartPolicy(first_delay_s=0.0)) as engine:
        yield engine


def run[T](work: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine with a time limit, since no test may hang."""

    async def limited() -> T:
        async with asyncio.timeout(TIMEOUT_S):
            return await work

    return asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that another thread or process fulfils."""
    while not condition():
        await asyncio.sleep(0)


def spec(
    prompt: list[int], *, conversation_id: str | None = None, max_tokens: int = 6, **params: Any
) -> TurnSpec:
    params = {"ignore_eos": True, "seed": 1} | params
    return TurnSpec(prompt, SamplingParams(max_tokens=max_tokens, **params), conversation_id)


def expected(harness: Harness, turn: TurnSpec, history: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the reply of the fake reference to a turn with seed 1."""
    prompt = tuple(turn.prompt_token_ids)
    return harness.expected(TurnFacts(history, prompt, turn.params, 1, harness.max_context_tokens))
