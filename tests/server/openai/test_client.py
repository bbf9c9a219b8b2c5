"""The openai client, in strict mode, over a socket: both kinds of completions, models, errors."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import openai
import pytest
import uvicorn

from pensieve_jax.core.errors import StepFailedError
from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.http.settings import ServerSettings
from tests.deadlines import TIMEOUT_S
from tests.server.fakes import MODEL, FakeEngine, Harness, say

HELLO = [{"role": "user", "content": "Hello"}]


class _Server(uvicorn.Server):
    """Server that signals when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()


@contextlib.contextmanager
def serving(script=None, **settings) -> Iterator[tuple[str, Harness]]:
    """Yield the address of a server on a free port, and its harness."""
    made: list[Harness] = []

    async def run() -> None:
        harness = Harness(ROUTES, FakeEngine(script), settings=ServerSettings(**settings))
        server.config.app = harness.app
        made.append(harness)
        await server.serve(sockets=[listening])

    listening = socket.create_server(("127.0.0.1", 0))
    server = _Server(uvicorn.Config(app="", log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert server.listens.wait(TIMEOUT_S)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1", made[0]
    finally:
        server.should_exit = True
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(say("hello there", reused_gpu_tokens=3)) as (address, _):
        yield address


def client_of(url: str, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", _strict_response_validation=True, **options)


def async_client_of(url: str, **options) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="none", _strict_response_validation=True, **options)


def test_chat_whole_and_streamed(url):
    with client_of(url) as client:
        whole = client.chat.completions.create(
            model=MODEL, messages=HELLO, n=2, logprobs=True, top_logprobs=2, seed=1
        )
        assert [choice.message.content for choice in whole.choices] == ["hello there"] * 2
        assert whole.usage.prompt_tokens_details.cached_tokens == 3
        assert whole.choices[0].logprobs.content[0].top_logprobs[0].token == "h"
        with client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        ) as stream:
            chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello there"
        assert chunks[-1].usage.completion_tokens == 12
        with client.chat.completions.stream(model=MODEL, messages=HELLO) as helper:
            assert helper.get_final_completion().choices[0].message.content == "hello there"


def test_the_same_asynchronously(url):
    async def scenario():
        async with async_client_of(url) as client:
            whole = await client.chat.completions.create(model=MODEL, messages=HELLO)
            assert whole.choices[0].message.content == "hello there"
            stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            text = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(text) == "hello there"
            completion = await client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1)
            assert [choice.text for choice in completion.choices] == ["hello there"] * 2
            models = await client.models.list()
            assert [model.id for model in models.data] == [MODEL]

    asyncio.run(scenario())


def test_completions_and_models(url):
    with client_of(url) as client:
        whole = client.completions.create(model=MODEL, prompt="Hi", logprobs=2)
        assert whole.choices[0].logprobs.tokens[0] == "h"
        assert client.models.retrieve(MODEL).id == MODEL
    # The client's chunk type does not allow a null finish_reason, which OpenAI sends in all chunks but the
    # last.
    lenient = openai.OpenAI(base_url=url, api_key="none")
    with lenient, lenient.completions.create(model=MODEL, prompt="Hi", stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == "hello there"


def test_errors_have_the_clients_own_classes(url):
    with client_of(url, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="other", messages=HELLO)
        assert caught.value.code == "model_not_found" and caught.value.param == "model"
        with pytest.raises(openai.BadRequestError, match="tools") as caught:
            client.chat.completions.create(
                model=MODEL, messages=HELLO, tools=[{"type": "function", "function": {"name": "f"}}]
            )
        assert caught.value.code == "unsupported_parameter" and caught.value.request_id
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a" * 5000}])
        assert caught.value.code == "context_length_exceeded"


def test_a_failed_step_is_not_retried_and_a_full_server_is():
    def failing(turn):
        turn.feed("hel")
        turn.fail(StepFailedError("A step failed."))

    with serving(failing) as (url, harness), client_of(url, max_retries=2) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model=MODEL, messages=HELLO)
        assert caught.value.code == "step_failed" and len(harness.engine.turns) == 1
        with pytest.raises(openai.APIError, match="A step failed"):
            list(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))

    numbers = iter(["starting", "ready"])
    with serving() as (url, harness), client_of(url, max_retries=2) as client:
        check = harness.services.limits.check_ready

        def state_by_state() -> None:
            harness.engine.state = next(numbers, "ready")
            check()

        harness.services.limits.check_ready = state_by_state
        reply = client.chat.completions.create(model=MODEL, messages=HELLO)
        assert reply.choices[0].message.content == "hello there" and len(harness.engine.turns) == 1


def test_a_client_that_closes_its_stream_ends_its_turn():
    cancelled = threading.Event()

    def script(turn):
        turn.feed("hel")
        cancel = turn.cancel

        async def noted() -> None:
            await cancel()
            cancelled.set()

        turn.cancel = noted

    with serving(script) as (url, _), client_of(url) as client:
        with client.chat.completions.create(model=MODEL, messages=HELLO, stream=True) as stream:
            next(iter(stream))
        assert cancelled.wait(TIMEOUT_S)
