"""Responses of a real engine: resent messages find their turn, and the KV cache's history survives both
processes.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from pensieve_jax import LLM, AsyncEngine, SamplingParams
from pensieve_jax.history.reader import HistoryReader
from pensieve_jax.server.context.resolver import Resolver
from pensieve_jax.server.context.turn_index import HistoryTurns, TurnIndex
from pensieve_jax.server.http.services import Services
from pensieve_jax.text import ReplyReader
from pensieve_jax.text.loading import load_tokenizer
from tests.server.conftest import engine_config
from tests.server.fakes import Harness
from tests.server.live import LiveServer

GREEDY = {"temperature": 0, "max_output_tokens": 12}
ASKED = ("Who are you?", "Say it again.", "And why?")


class RealServer(LiveServer):
    """The chat model in the package, in float32, behind HTTP."""

    patience_s = 300.0

    def __init__(self, path: Path, compilation_cache: str) -> None:
        super().__init__(path)
        self._compilation_cache = compilation_cache

    async def _services(self, stack: contextlib.AsyncExitStack) -> Services:
        config = engine_config(self._compilation_cache)
        engine = AsyncEngine.start("chat", dtype="float32", history=self._path, config=config, progress=False)
        self.real = await stack.enter_async_context(engine)
        info = self.real.info
        reader = stack.enter_context(HistoryReader(self._path, fingerprint=info.fingerprint))
        tokenizer = load_tokenizer(info.source)
        index = TurnIndex(HistoryTurns(reader, ReplyReader(tokenizer)))
        resolver = Resolver(tokenizer, info.fingerprint, index)
        parts: dict[str, Any] = {"tokenizer": tokenizer, "resolver": resolver, "history": reader}
        self.harness = Harness([], engine, **parts)
        self.harness.services.now_s = time.time
        return self.harness.services


@pytest.fixture(scope="module")
def replies(compilation_cache: str) -> list[str]:
    """Return the library's replies to the same messages in one conversation."""
    with LLM("chat", dtype="float32", config=engine_config(compilation_cache)) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        return [
            llm.chat([{"role": "user", "content": asked}], params, conversation_id="a").text
            for asked in ASKED
        ]


@pytest.mark.long  # two starts of the chat model beside a third
def test_state_is_found_by_id_by_messages_and_after_a_restart(tmp_path, compilation_cache, replies):
    path = tmp_path / "history.sqlite"
    with RealServer(path, compilation_cache) as server, server.client() as client:
        first = client.responses.create(input=ASKED[0], **GREEDY)
        assert first.output_text == replies[0]
        by_id = client.responses.create(input=ASKED[1], previous_response_id=first.id, **GREEDY)
        assert by_id.output_text == replies[1]
        found = by_id.usage.input_tokens_details.cached_tokens
        assert 0 < found < by_id.usage.input_tokens
        resent = [
            {"role": "user", "content": ASKED[0]},
            {"role": "assistant", "content": replies[0]},
            {"role": "user", "content": ASKED[1]},
        ]
        by_messages = client.responses.create(input=resent, **GREEDY)
        assert by_messages.output_text == replies[1]
        assert by_messages.usage.input_tokens == by_id.usage.input_tokens
        # A sibling of `by_id`: it shares whole chunks with it, and recomputes the rest of the path.
        sources = by_messages.usage.to_dict()["pensieve"]
        assert sources["new_tokens"] == by_id.usage.to_dict()["pensieve"]["new_tokens"]
        assert sources["recomputed_tokens"] < 32
        events = list(
            client.responses.create(
                input=ASKED[2], previous_response_id=by_messages.id, stream=True, background=True, **GREEDY
            )
        )
        assert events[-1].response.output_text == replies[2]
    with RealServer(path, compilation_cache) as server, server.client() as client:
        again = client.responses.create(input=ASKED[2], previous_response_id=by_id.id, **GREEDY)
        assert again.output_text == replies[2]
        assert again.usage.to_dict()["pensieve"]["recomputed_tokens"] > 0
        replayed = list(client.responses.retrieve(events[0].response.id, stream=True))
        assert [event.to_dict() for event in replayed] == [event.to_dict() for event in events]
