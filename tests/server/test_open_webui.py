"""A recording of Open WebUI, replayed: chats reuse their KV cache, and small tasks are one-off turns."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pensieve_lab.serving.served import ServedProcess
from tests.server.conftest import SIZES

TRAFFIC = Path(__file__).with_name("traffic") / "open_webui.jsonl"
_COUNTER = re.compile(
    r'pensieve:context_(?P<name>\w+)_total\{.*(?:kind|result)="(?P<label>\w+)".*\} (?P<value>\S+)'
)


@pytest.fixture(scope="module")
def client(compilation_cache) -> Iterator[httpx2.Client]:
    flags = [*SIZES, f"--compilation_cache_dir={compilation_cache}", "--tools=ignore"]
    with ServedProcess(flags) as served, httpx2.Client(base_url=served.address, timeout=120) as client:
        yield client


def recorded() -> list[dict[str, Any]]:
    lines = TRAFFIC.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[1:]]


def counters(client: httpx2.Client) -> Counter[str]:
    lines = client.get("/metrics").text.splitlines()
    found = [match for line in lines if (match := _COUNTER.match(line))]
    return Counter({f"{match['name']} {match['label']}": int(float(match["value"])) for match in found})


def reply_of(answer: httpx2.Response) -> str:
    if answer.headers["content-type"] == "application/json":
        return answer.json()["choices"][0]["message"]["content"]
    parts = [part for part in answer.text.split("\n\n") if part.startswith("data: {")]
    return "".join(
        choice["delta"].get("content") or "" for part in parts for choice in json.loads(part[6:])["choices"]
    )


def replay(client: httpx2.Client) -> Iterator[tuple[dict[str, Any], Counter[str]]]:
    """Yield each request with what it counted; quoted replies are replaced by this server's."""
    said: dict[str, str] = {}
    before = counters(client)
    for one in recorded():
        request = one["request"]
        for message in request["messages"]:
            if message["role"] == "assistant":
                message["content"] = said[message["content"]]
        # The replies to its small tasks are never continued, so they may be short.
        sent = request if "tools" in request else {**request, "max_tokens": 8}
        answer = client.post("/v1/chat/completions", json=sent)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-ignored-fields") == ("tools" if "tools" in request else None)
        said[one["reply"]] = reply_of(answer)
        after = counters(client)
        yield request, after - before
        before = after


@pytest.mark.long
def test_every_continued_turn_reuses_all_of_its_history(client):
    kinds = {"message": 0, "chunk": 0, "none": 0}
    found = missed = 0
    for request, counted in replay(client):
        goes_on = len(request["messages"]) > 1
        assert counted["match message"] == (1 if goes_on else 0)
        for kind in kinds:
            kinds[kind] += counted[f"match {kind}"]
        found, missed = found + counted["tokens found"], missed + counted["tokens missed"]
        assert (counted["tokens found"] > 0) == goes_on
    # Two more messages, a regenerated reply, an edited message; the first message, title, tags and ideas.
    assert kinds["message"] == 4 and kinds["chunk"] + kinds["none"] == 1 + 7
    assert found > 0 and missed == 0
