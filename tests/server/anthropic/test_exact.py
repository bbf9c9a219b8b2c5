"""Anthropic's Messages and Chat Completions, alternating in one conversation: tokens are the reference's."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from tests.seeds import new_seed
from tests.server.openai.test_rewritten_history import FakeModelServer, check_turns


@pytest.mark.parametrize("number", range(2))
def test_a_conversation_has_the_tokens_of_the_dense_reference(tmp_path: Path, number: int) -> None:
    """The template writes earlier replies differently, and the history is sent whole each time."""
    rng = random.Random(new_seed() + number)
    path = tmp_path / "history.sqlite"
    ids: list[str] = []
    num_cached: list[int] = []
    with FakeModelServer(path) as server, httpx2.Client(base_url=server.url) as client:
        services = server.harness.services
        services.settings = replace(services.settings, chat_history="durable")
        history: list[dict[str, str]] = []
        for turn in range(6):
            history.append({"role": "user", "content": f"question {turn} " * rng.randrange(1, 6)})
            sent = {"model": "fake", "messages": history, "temperature": 0, "max_tokens": 12}
            if rng.random() < 0.4:
                reply = client.post("/chat/completions", json=sent).json()
                ids.append(reply["id"].removeprefix("chatcmpl-"))
                text = reply["choices"][0]["message"]["content"]
                cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            else:
                message = client.post("/messages", json=sent).json()
                ids.append(message["id"].removeprefix("msg_"))
                text = "".join(block["text"] for block in message["content"])
                cached = message["usage"]["cache_read_input_tokens"]
            num_cached.append(cached)
            history.append({"role": "assistant", "content": text})
    check_turns(path, ids)
    assert num_cached[0] == 0 and all(num_cached[1:])
