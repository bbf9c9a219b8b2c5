"""A background response with reasoning and calls has the same events, live and when it is retrieved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pensieve_jax.server.http.services import Services
from pensieve_jax.text import ChatFormat
from pensieve_jax.text.token_texts import TokenTexts
from tests.server.live import LiveServer
from tests.server.openai.test_tools import FLAT, ONE
from tests.server.scripted import marked_tokenizer, spoken
from tests.server.stored_engine import resolving

REPLY = "<think>\nHm.\n</think>\n\nI look.\n" + ONE


class ScriptedLiveServer(LiveServer):
    """Server on a socket whose model says given replies."""

    def __init__(self, path: Path, replies: Iterable[str]) -> None:
        self._tokenizer = marked_tokenizer()
        super().__init__(path, spoken(self._tokenizer, replies))

    async def _services(self, stack: contextlib.AsyncExitStack) -> Services:
        services = await super()._services(stack)
        services.tokenizer = self._tokenizer
        services.chat_format = ChatFormat(self._tokenizer)
        services.token_texts = TokenTexts(self._tokenizer)
        services.resolver = resolving(self._tokenizer, services.history)
        return services


def events_of(stream: Any) -> list[dict[str, Any]]:
    return [event.model_dump() for event in stream]


def test_events_of_a_background_response_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    asked: dict[str, Any] = {"input": "what?", "tools": FLAT}
    with ScriptedLiveServer(path, [REPLY] * 3) as server, server.client() as client:
        live = events_of(client.responses.create(**asked, background=True, stream=True))
        foreground = events_of(client.responses.create(**asked, stream=True))
        response = client.responses.retrieve(live[-1]["response"]["id"])
        kinds = [event["type"] for event in live if event["type"] != "response.queued"]
        assert kinds == [event["type"] for event in foreground]
        assert [event["sequence_number"] for event in live] == list(range(len(live)))
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        key = {"Idempotency-Key": "k"}
        first = client.responses.create(**asked, extra_headers=key)
        assert client.responses.create(**asked, extra_headers=key) == first
    with ScriptedLiveServer(path, []) as server, server.client() as client:
        for starting_after in (0, 9, len(live) // 2, len(live) - 2):
            again = client.responses.retrieve(response.id, stream=True, starting_after=starting_after)
            assert events_of(again) == live[starting_after + 1 :]
        assert client.responses.retrieve(response.id) == response
        assert client.responses.create(**asked, extra_headers=key) == first
