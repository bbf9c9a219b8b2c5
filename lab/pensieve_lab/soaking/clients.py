"""Soak clients, which mostly follow the API's documentation and sometimes disconnect without notice.

Owns: what a client does from its first request to its last, and what is counted.
Does not know: the server's process, or what is sampled of it.

A client that ends a conversation deletes what it created and knows the id of. If it disconnected before it
got an id, the object stays in the history, as with any server.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2

_WORDS = [
    "hello",
    "i",
    "am",
    "ada",
    "and",
    "need",
    "a",
    "place",
    "to",
    "eat",
    "in",
    "san",
    "jose",
    "something",
    "cheap",
    "italian",
    "please",
    "is",
    "there",
    "one",
    "in",
    "oakland",
    "what",
    "time",
    "does",
    "it",
    "open",
    "can",
    "you",
    "book",
    "a",
    "table",
    "for",
    "two",
    "at",
    "seven",
    "thank",
    "you",
    "where",
    "is",
    "the",
    "next",
    "train",
    "to",
    "berkeley",
]
_PATIENCE_S = 120.0
_AS_EXPECTED = (200, 404, 409, 429, 503)  # 404: a sibling fork deleted it


class UnexpectedAnswerError(Exception):
    """The server sent an unexpected status or broke off a stream."""


class SoakClient:
    """Client with its own connection."""

    def __init__(self, address: str, seed: int, *, pause_s: float, counts: Counter[str]) -> None:
        """Connect to `address`; `pause_s` is the mean pause between two requests."""
        self._random = random.Random(seed)
        self._pause_s = pause_s
        self._counts = counts
        self._http = httpx2.AsyncClient(base_url=address, timeout=_PATIENCE_S, trust_env=False)
        self._kinds: tuple[Callable[[], Awaitable[None]], ...] = (
            *(self._responses, self._responses, self._conversation, self._chat, self._chat),
            *(self._completions, self._background, self._others),
        )

    async def run(self, until: asyncio.Event) -> None:
        """Run random scenarios until `until` is set."""
        async with self._http:
            while not until.is_set():
                await self._random.choice(self._kinds)()
                await self._pause()

    # Scenarios

    async def _responses(self) -> None:
        """Build a tree of responses: chains, and forks from an earlier response."""
        known: list[str] = []
        for _ in range(self._random.randint(1, 5)):
            body: dict[str, Any] = {"input": self._text(), **self._sampling("max_output_tokens")}
            if known:
                is_fork = self._random.random() < 0.25
                body["previous_response_id"] = self._random.choice(known) if is_fork else known[-1]
                self._counts["forks"] += is_fork
            said = await self._ask("/v1/responses", body, "responses")
            if said is not None:
                known.append(said["id"])
            await self._pause()
        for response_id in reversed(known):
            await self._send("DELETE", f"/v1/responses/{response_id}")

    async def _conversation(self) -> None:
        """Take turns by conversation id; sometimes delete an item before the conversation."""
        made = await self._send("POST", "/v1/conversations", {"metadata": {"of": "soak"}})
        if made is None:
            return
        where, responses = f"/v1/conversations/{made['id']}", []
        for _ in range(self._random.randint(1, 4)):
            body = {"input": self._text(), "conversation": made["id"], **self._sampling("max_output_tokens")}
            said = await self._ask("/v1/responses", body, "conversation turns")
            if said is not None:
                responses.append(said["id"])
            await self._pause()
        listed = await self._send("GET", f"{where}/items?limit=100")
        if listed is not None and listed["data"] and self._random.random() < 0.5:
            item = self._random.choice(listed["data"])
            await self._send("DELETE", f"{where}/items/{item['id']}")
        await self._send("DELETE", where)
        for response_id in responses:
            await self._send("DELETE", f"/v1/responses/{response_id}")

    async def _chat(self) -> None:
        """Send all messages again in each request, and sometimes edit the last one."""
        messages: list[dict[str, Any]] = []
        for _ in range(self._random.randint(1, 5)):
            if len(messages) >= 2 and self._random.random() < 0.2:
                messages[-1] = {"role": "assistant", "content": self._text()}
                self._counts["edits"] += 1
            messages.append({"role": "user", "content": self._text()})
            body = {"messages": messages, "n": self._random.choice((1, 1, 2)), **self._sampling("max_tokens")}
            said = await self._ask("/v1/chat/completions", body, "chat")
            if said is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": said["text"]})
            await self._pause()

    async def _completions(self) -> None:
        """Complete a single prompt."""
        await self._ask(
            "/v1/completions", {"prompt": self._text(), **self._sampling("max_tokens")}, "completions"
        )

    async def _background(self) -> None:
        """Create a background response, then cancel it, replay its stream, or neither; then delete it."""
        body = {"input": self._text(), "background": True, **self._sampling("max_output_tokens")}
        body["stream"] = False
        said = await self._send("POST", "/v1/responses", body)
        if said is None:
            return
        self._counts["background"] += 1
        where = f"/v1/responses/{said['id']}"
        await self._pause()
        what = self._random.randrange(3)
        if what == 0:
            self._counts["cancels"] += 1
            await self._send("POST", f"{where}/cancel")
        elif what == 1:
            await self._stream("GET", f"{where}?stream=true", None)
        await self._send("GET", where)
        await self._send("DELETE", where)

    async def _others(self) -> None:
        """Send requests that need no engine turn, and an invalid one."""
        await self._send("GET", "/v1/models")
        await self._send("GET", "/v1/responses/resp_" + "0" * 32)
        await self._send("POST", "/v1/responses/input_tokens", {"input": self._text()})
        await self._send("POST", "/tokenize", {"prompt": self._text()})
        answer = await self._http.post("/v1/responses", json={"input": 5})
        if answer.status_code != 400:
            raise UnexpectedAnswerError(f"input 5: {answer.status_code} {answer.text[:200]}")

    # Requests

    async def _ask(self, path: str, body: dict[str, Any], kind: str) -> dict[str, Any] | None:
        """Send a turn, streamed or not; return its id and text, or None if it was abandoned or refused."""
        leave_s = self._random.expovariate(1 / 0.3) if self._random.random() < 0.15 else None
        try:
            async with asyncio.timeout(leave_s):
                if body["stream"]:
                    said = await self._stream("POST", path, body)
                else:
                    answer = await self._send("POST", path, body)
                    said = None if answer is None else {"id": answer["id"], "text": _text_of(answer)}
        except TimeoutError:
            self._counts["vanished"] += 1
            return None
        if said is not None:
            self._counts[kind] += 1
        return said

    async def _send(self, method: str, path: str, body: Any = None) -> dict[str, Any] | None:
        """Send a request; return its answer, or None for an expected status other than 200."""
        answer = await self._http.request(method, path, json=body)
        if answer.status_code not in _AS_EXPECTED:
            raise UnexpectedAnswerError(f"{method} {path} {body}: {answer.status_code} {answer.text[:500]}")
        self._counts[f"status {answer.status_code}"] += 1
        found: dict[str, Any] = answer.json()
        return found if answer.status_code == 200 else None

    async def _stream(self, method: str, path: str, body: Any) -> dict[str, Any] | None:
        """Read a stream to its end; return None if this client abandons it or it was refused."""
        has_enough = self._random.random() < 0.1
        async with self._http.stream(method, path, json=body) as answer:
            if answer.status_code not in _AS_EXPECTED:
                raise UnexpectedAnswerError(f"{method} {path} {body}: {answer.status_code}")
            self._counts[f"status {answer.status_code}"] += 1
            if answer.status_code != 200:
                return None
            response_id, text, has_ended = "", "", False
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    has_ended = True
                    continue
                event = json.loads(line.removeprefix("data: "))
                response_id = response_id or event.get("id") or event.get("response", {}).get("id", "")
                piece = _piece_of(event)
                text += piece
                if piece and has_enough and self._random.random() < 0.3:
                    self._counts["left streams"] += 1
                    return None
        if not has_ended:
            raise UnexpectedAnswerError(f"{method} {path} {body}: the stream broke off after {text!r}")
        self._counts["streams"] += 1
        return {"id": response_id, "text": text}

    def _sampling(self, limit: str) -> dict[str, Any]:
        draw = self._random
        return {
            "stream": draw.random() < 0.5,
            "temperature": draw.choice((0, 1)),
            limit: draw.randint(1, 24),
        }

    def _text(self) -> str:
        return " ".join(self._random.choices(_WORDS, k=self._random.randint(1, 30)))

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.expovariate(1 / self._pause_s))


def _text_of(answer: dict[str, Any]) -> str:
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"]) if answer["output"] else ""
    choice = answer["choices"][0]
    return str(choice.get("text") or choice.get("message", {}).get("content") or "")


def _piece_of(event: dict[str, Any]) -> str:
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    choices = event.get("choices") or [{"index": 1}]
    if choices[0]["index"] != 0:
        return ""
    return str(choices[0].get("text") or choices[0].get("delta", {}).get("content") or "")
