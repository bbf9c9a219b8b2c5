"""Clients that race: each sends random requests for what it shares with the other clients of its owner.

Owns: the requests, and what is recorded of their answers.
Does not know: which answers are right.

The clients of an owner share conversations and responses, and choose among them at random, deleted ones
included. Now and then a client asks for what another owner has. A writer has long items and no turns, so that
the bytes that it stores are known exactly.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import httpx2

from pensieve_jax.history.stored_amounts import ROW_BYTES
from pensieve_lab.races.record import (
    TERMINAL,
    Amounts,
    Append,
    Change,
    Listing,
    Record,
    Refusal,
    Span,
    Status,
    Thing,
    Turn,
)
from pensieve_lab.serving.owner_keys import key_of

_PATIENCE_S: Final = 120.0
_LEFT_S: Final = 10.0
"""How long a turn may still hold its conversation after its client left."""
_MAX_ITEMS: Final = 24
"""Items after which a conversation is deleted, so that its turns stay short."""
_MAX_ITEM_BYTES: Final = ROW_BYTES + 600
"""More than an item counts with beside its text."""
_PAGE: Final = 100
_MAX_PREFIX: Final = 100
_RUSH: Final = 3
_STORED: Final = re.compile(r"stores ([\d,]+) (conversations|responses|bytes) of at most")


class Answer(NamedTuple):
    """A server's answer; status 0 if the client left before it came."""

    status: int
    code: str
    body: dict[str, Any]
    span: Span


@dataclass
class Shared:
    """What the clients of one round share.

    Attributes:
      record: what they did and saw.
      num_left: operations that are still to be done.
      conversations, responses, background: ids by owner that are known to clients.
    """

    record: Record
    num_left: int
    conversations: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    responses: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    background: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    num_texts: int = 0

    def take(self) -> bool:
        """Take an operation; return False if none is left."""
        self.num_left -= 1
        return self.num_left >= 0

    def new_text(self, length: int = 0) -> str:
        """Return a text that no other item has."""
        self.num_texts += 1
        return f"u{self.num_texts}x".ljust(length, "y")


class RacingClient:
    """Client of one owner, with connections of its own; an asynchronous context manager."""

    def __init__(
        self, address: str, owner: str, others: list[str], seed: int, *, is_writer: bool = False
    ) -> None:
        self.owner = owner
        self._others = others
        self._random = random.Random(seed)
        self._is_writer = is_writer
        headers = {"authorization": f"Bearer {key_of(owner)}"}
        self._http = httpx2.AsyncClient(
            base_url=address, timeout=_PATIENCE_S, trust_env=False, headers=headers
        )
        self._shared = Shared(Record(), 0)

    async def __aenter__(self) -> RacingClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def race(self, shared: Shared) -> None:
        """Send random requests until the round has had its share."""
        self._shared = shared
        items: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            *((6, self.append), (4, self.delete_item), (4, self.list_items), (2, self.new_conversation)),
            *((1, self.update_conversation), (1, self.delete_conversation), (2, self.look_up_amounts)),
            *((1, self.read_conversation), (1, self.intrude), (1, self.rush)),
        ]
        turns: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            *((6, self.turn), (3, self.queue), (2, self.cancel), (2, self.continue_response)),
            *((4, self.read_response), (4, self.delete_response)),
        ]
        kinds = items if self._is_writer else items + turns
        weights = [weight for weight, _ in kinds]
        while shared.take():
            ((_, kind),) = self._random.choices(kinds, weights)
            await kind()
            await asyncio.sleep(self._random.random() * 0.02)

    # Conversations

    async def new_conversation(self) -> None:
        """Create a conversation with up to two items; sometimes send the request twice with one key."""
        texts = [self._new_text() for _ in range(self._random.randrange(3))]
        body = {"metadata": {"of": "races"}, "items": [_item(text) for text in texts]}
        own_bytes = sum(_MAX_ITEM_BYTES + len(text) for text in texts) + 2 * ROW_BYTES
        answer, key = await self._once_or_twice("new conversation", "/v1/conversations", body, own_bytes)
        if answer.status != 200:
            return
        name, record = answer.body["id"], self.record
        size = ROW_BYTES + len(name) + len(json.dumps(answer.body["metadata"]))
        record.add(Thing("conversation", self.owner, name, answer.span, num_bytes=(size, size)))
        for text in texts:
            self._add_item(name, text, answer.span)
        if texts:
            record.appends.append(Append(name, answer.span, tuple(texts)))
        self._add_key(name, key, answer.span)
        self._shared.conversations[self.owner].append(name)

    async def rush(self) -> None:
        """Create several conversations at a time."""
        await asyncio.gather(*(self.new_conversation() for _ in range(_RUSH)))

    async def append(self) -> None:
        """Append items; sometimes send the request twice at a time with one key."""
        name = await self._some_conversation()
        if name is None:
            return
        texts = [self._new_text() for _ in range(self._random.choice((1, 1, 2, 3)))]
        items = [self._add_item(name, text, Span(time.monotonic(), is_certain=False)) for text in texts]
        own_bytes = sum(_MAX_ITEM_BYTES + len(text) for text in texts) + 2 * ROW_BYTES
        path = f"/v1/conversations/{name}/items"
        body = {"items": [_item(text) for text in texts]}
        answer, key = await self._once_or_twice("append", path, body, own_bytes)
        self._note_change(name, answer, texts[0])
        for index, item in enumerate(items):
            item.created = answer.span if answer.status == 200 else None
            if answer.status == 200:
                stored = answer.body["data"][index]
                size = ROW_BYTES + len(stored["id"]) + len(json.dumps(stored, separators=(",", ":")))
                item.num_bytes = (size, size)
        if answer.status == 200:
            self.record.appends.append(Append(name, answer.span, tuple(texts)))
            self._add_key(name, key, answer.span)

    async def delete_item(self) -> None:
        """Delete an item that a list of the conversation shows, unless it is of a turn."""
        name = self._one_of(self._shared.conversations)
        listed = [one for one in self.record.listings if one.conversation == name]
        turns = {one.text for one in self.record.turns}
        users = [row for one in listed[-3:] for row in one.items if row[1] == "user" and row[2] not in turns]
        if name is None or not users:
            return
        item_id, _, text = self._random.choice(users)
        answer = await self._ask("delete item", "DELETE", f"/v1/conversations/{name}/items/{item_id}")
        self._note_change(name, answer, f"delete {text[:40]} {answer.span.began_s}")
        item = self.record.things.get(("item", text))
        if item is None:
            return
        if answer.status == 200:
            item.removed.append(answer.span)
        elif answer.status == 404 and "conversation" not in answer.body["error"]["message"].lower():
            self.record.see(self.owner, "item", text, answer.span, is_present=False)

    async def list_items(self) -> None:
        """List the items of a conversation; delete one that has become long."""
        name = await self._some_conversation()
        if name is not None and await self.listed(name) > _MAX_ITEMS:
            await self._delete_conversation(name)

    async def listed(self, name: str) -> int:
        """Record the items of a conversation and return their number; 0 if it is gone."""
        path = f"/v1/conversations/{name}/items?limit={_PAGE}&order=asc"
        answer = await self._ask("list items", "GET", path)
        if answer.status in (200, 404):
            self.record.see(self.owner, "conversation", name, answer.span, is_present=answer.status == 200)
        if answer.status != 200:
            return 0
        rows = tuple((one["id"], one["role"], _text_of(one)) for one in answer.body["data"])
        self.record.listings.append(Listing(name, answer.span, rows, not answer.body["has_more"]))
        return len(rows)

    async def read_conversation(self) -> None:
        """Look a conversation up."""
        name = await self._some_conversation()
        if name is not None:
            answer = await self._ask("read conversation", "GET", f"/v1/conversations/{name}")
            self.record.see(self.owner, "conversation", name, answer.span, is_present=answer.status == 200)

    async def update_conversation(self) -> None:
        """Replace the metadata by others of the same length."""
        name = await self._some_conversation()
        if name is None:
            return
        body = {"metadata": {"of": f"{self._random.randrange(10**5):05}"}}
        answer = await self._ask("update conversation", "POST", f"/v1/conversations/{name}", body)
        if answer.status in (200, 404):
            self.record.see(self.owner, "conversation", name, answer.span, is_present=answer.status == 200)

    async def delete_conversation(self) -> None:
        """Delete a conversation, which others may use at the time."""
        name = self._one_of(self._shared.conversations)
        if name is not None:
            await self._delete_conversation(name)

    async def _delete_conversation(self, name: str) -> None:
        answer = await self._ask("delete conversation", "DELETE", f"/v1/conversations/{name}")
        self._note_change(name, answer, f"delete {answer.span.began_s}")
        if answer.status == 200:
            self.record.things["conversation", name].removed.append(answer.span)
        elif answer.status == 404:
            self.record.see(self.owner, "conversation", name, answer.span, is_present=False)

    # Responses

    async def turn(self) -> None:
        """Take a turn of a conversation; sometimes leave before its end."""
        name = await self._some_conversation()
        if name is None:
            return
        turn = self._new_turn(name)
        leave_s = self._random.random() * 0.6 if self._random.random() < 0.15 else None
        body = {"input": turn.text, "conversation": name, **self._sampling()}
        answer = await self._ask("turn", "POST", "/v1/responses", body, leave_s=leave_s)
        self._end_turn(turn, answer)

    async def queue(self) -> None:
        """Queue a turn of a conversation, or a response without one, in the background."""
        name = await self._some_conversation() if self._random.random() < 0.6 else ""
        turn = self._new_turn(name or "", is_background=True)
        where = {"conversation": name} if name else {}
        body = {"input": turn.text, "background": True, **where, **self._sampling()}
        answer = await self._ask("background", "POST", "/v1/responses", body)
        self._end_turn(turn, answer)
        if answer.status == 200:
            self._shared.background[self.owner].append(answer.body["id"])

    async def continue_response(self) -> None:
        """Continue a foreground response, which may be deleted at the same time."""
        before = self._one_of(self._shared.responses)
        if before is None:
            return
        turn = self._new_turn("")
        body = {"input": turn.text, "previous_response_id": before, **self._sampling()}
        answer = await self._ask("continue response", "POST", "/v1/responses", body)
        self._end_turn(turn, answer)
        if answer.status in (200, 404):
            self.record.see(self.owner, "response", before, answer.span, is_present=answer.status == 200)

    async def read_response(self) -> None:
        """Look a response up."""
        name = self._one_of(self._shared.background) or self._one_of(self._shared.responses)
        if self._random.random() < 0.4:
            name = self._one_of(self._shared.responses)
        if name is not None:
            await self.read(name)

    async def read(self, name: str) -> str:
        """Record a response as it is now, and return its status; "" if it is gone."""
        answer = await self._ask("read response", "GET", f"/v1/responses/{name}")
        self.record.see(self.owner, "response", name, answer.span, is_present=answer.status == 200)
        if answer.status != 200:
            return ""
        return self._note_status(answer)

    async def cancel(self) -> None:
        """Cancel a background response, which has ended afterwards."""
        name = self._one_of(self._shared.background)
        if name is None:
            return
        answer = await self._ask("cancel", "POST", f"/v1/responses/{name}/cancel")
        if answer.status in (200, 404):
            self.record.see(self.owner, "response", name, answer.span, is_present=answer.status == 200)
        if answer.status == 200 and self._note_status(answer) not in TERMINAL:
            self.record.problems.append(f"response {name} is {answer.body['status']} after it was cancelled")

    async def delete_response(self) -> None:
        """Delete a response, which may still run."""
        pool = self._shared.background if self._random.random() < 0.4 else self._shared.responses
        name = self._one_of(pool)
        if name is None:
            return
        answer = await self._ask("delete response", "DELETE", f"/v1/responses/{name}")
        if answer.status == 200:
            self.record.things["response", name].removed.append(answer.span)
        elif answer.status == 404:
            self.record.see(self.owner, "response", name, answer.span, is_present=False)

    # What an owner stores, and what others have

    async def look_up_amounts(self) -> None:
        """Record what the owner stores: its amounts, and the ids of its conversations and responses."""
        answer = await self._ask("amounts", "GET", "/v1/pensieve/stored?limit=1000")
        if answer.status != 200:
            return
        record, body = self.record, answer.body
        amounts = (body["num_conversations"], body["num_responses"], body["num_bytes"])
        record.amounts.append(Amounts(self.owner, answer.span, *amounts))
        for kind, rows in (("conversation", body["conversations"]), ("response", body["responses"])):
            there = {row["id"] for row in rows}
            for thing in list(record.of(self.owner, kind)):  # type: ignore[arg-type]
                record.see(self.owner, thing.kind, thing.name, answer.span, is_present=thing.name in there)
            known = {thing.name for thing in record.of(self.owner, kind)}  # type: ignore[arg-type]
            for name in there - known:
                record.see(self.owner, kind, name, answer.span, is_present=True)  # type: ignore[arg-type]

    async def intrude(self) -> None:
        """Ask for what another owner has; the server must say that it does not exist."""
        other = self._random.choice(self._others)
        conversation = self._one_of(self._shared.conversations, other)
        response = self._one_of(self._shared.responses, other)
        requests: list[tuple[str, str, Any]] = []
        if conversation is not None:
            path = f"/v1/conversations/{conversation}"
            requests += [("GET", path, None), ("DELETE", path, None), ("GET", f"{path}/items", None)]
            requests += [("POST", f"{path}/items", {"items": [_item("intruder")]})]
            requests += [("POST", "/v1/responses", {"input": "intruder", "conversation": conversation})]
        if response is not None:
            path = f"/v1/responses/{response}"
            requests += [("GET", path, None), ("DELETE", path, None), ("POST", f"{path}/cancel", None)]
            requests += [("POST", "/v1/responses", {"input": "intruder", "previous_response_id": response})]
        if not requests:
            return
        method, path, body = self._random.choice(requests)
        answer = await self._ask("intrude", method, path, body)
        is_refused = answer.status == 404 or answer.code == "insufficient_quota"
        if not is_refused:
            self.record.problems.append(f"{self.owner} got {answer.status} for {method} {path} of {other}")

    # Private methods

    @property
    def record(self) -> Record:
        """What the clients of this round did."""
        return self._shared.record

    def _one_of(self, pool: dict[str, list[str]], owner: str = "") -> str | None:
        """Choose an id, recent ones more often; return None for an empty pool."""
        names = pool[owner or self.owner]
        if not names:
            return None
        return self._random.choice(names[-4:] if self._random.random() < 0.8 else names)

    async def _some_conversation(self) -> str | None:
        """Choose a conversation; create the first one."""
        if not self._shared.conversations[self.owner]:
            await self.new_conversation()
        return self._one_of(self._shared.conversations)

    def _new_text(self) -> str:
        length = self._random.choice((10, 300, 2000, 4000)) if self._is_writer else 0
        return self._shared.new_text(length)

    def _sampling(self) -> dict[str, Any]:
        return {"temperature": 0, "max_output_tokens": self._random.choice((3, 6, 16))}

    def _add_item(self, conversation: str, text: str, span: Span) -> Thing:
        most = _MAX_ITEM_BYTES + len(text)
        return self.record.add(Thing("item", self.owner, text, span, conversation, (0, most)))

    def _add_key(self, conversation: str, key: str, span: Span) -> None:
        if key:
            size = ROW_BYTES + len(key)  # the history puts the conversation's id before it
            bounds = (size, size + _MAX_PREFIX)
            self.record.add(Thing("key", self.owner, key, span, conversation, bounds))

    def _new_turn(self, conversation: str, *, is_background: bool = False) -> Turn:
        span = Span(time.monotonic(), is_certain=False)
        turn = Turn(self.owner, self._shared.new_text(), span, conversation, "", is_background)
        self.record.turns.append(turn)
        if conversation:
            item = Thing("item", self.owner, turn.text, span, conversation)
            self.record.add(item)
        return turn

    def _end_turn(self, turn: Turn, answer: Answer) -> None:
        """Record how a turn ended, or that its background response was queued."""
        record = self.record
        item = record.things.get(("item", turn.text))
        if turn.conversation and not (turn.is_background and answer.status == 200):
            self._note_change(turn.conversation, answer, turn.text)
        if not answer.status:  # it may be stored or not
            return
        turn.span = answer.span
        if answer.status != 200:
            record.turns.remove(turn)
            if item is not None:
                item.created = None
            return
        turn.response = answer.body["id"]
        size = (ROW_BYTES, 0)  # `quota_rules` counts the most for the whole turn
        record.add(Thing("response", self.owner, turn.response, answer.span, num_bytes=size))
        self._note_status(answer)
        if not turn.is_background:
            self._shared.responses[self.owner].append(turn.response)
            if item is not None:
                item.created = answer.span

    def _note_status(self, answer: Answer) -> str:
        body = answer.body
        error = body.get("error") or {}
        code = error.get("pensieve_code") or error.get("code") or ""
        text = "".join(_text_of(one) for one in body["output"] if one["type"] == "message")
        self.record.statuses[body["id"]].append(Status(answer.span, body["status"], text, code))
        return str(body["status"])

    def _note_change(self, conversation: str, answer: Answer, name: str) -> None:
        span = answer.span
        if not answer.status:
            span = Span(span.began_s, time.monotonic() + _LEFT_S)
        change = Change(name, span, is_refused=answer.status == 409)
        self.record.changes[conversation].append(change)

    async def _once_or_twice(self, kind: str, path: str, body: Any, own_bytes: int) -> tuple[Answer, str]:
        """Send a request that creates something, sometimes twice with one key.

        Returns the answer, a successful one if there is one, and the key.
        """
        if self._random.random() < 0.6:
            return await self._ask(kind, "POST", path, body, own_bytes=own_bytes), ""
        key = f"key {self._shared.new_text()}"
        number = self._random.choice((1, 2))
        asked = [self._ask(kind, "POST", path, body, own_bytes=own_bytes, key=key) for _ in range(number)]
        answers = await asyncio.gather(*asked)
        done = [one for one in answers if one.status == 200]
        if len({json.dumps(one.body) for one in done}) > 1:
            self.record.problems.append(f"{path} answered one key with {[one.body for one in done]}")
        began_s, ended_s = min(one.span.began_s for one in answers), max(one.span.ended_s for one in answers)
        return (done or answers)[0]._replace(span=Span(began_s, ended_s)), key

    async def _ask(
        self,
        kind: str,
        method: str,
        path: str,
        body: Any = None,
        *,
        leave_s: float | None = None,
        own_bytes: int = 1,
        key: str = "",
    ) -> Answer:
        """Send a request and return its answer; record one that no request should get."""
        record, began_s = self.record, time.monotonic()
        headers = {"idempotency-key": key} if key else {}
        try:
            async with asyncio.timeout(leave_s):
                got = await self._http.request(method, path, json=body, headers=headers)
        except TimeoutError:
            record.counts[f"{kind}: left"] += 1
            return Answer(0, "", {}, Span(began_s, is_certain=False))
        except httpx2.TransportError as error:
            record.problems.append(f"{method} {path} got no answer: {error!r}")
            return Answer(0, "", {}, Span(began_s, is_certain=False))
        span = Span(began_s, time.monotonic())
        found: dict[str, Any] = got.json()
        refusal = found.get("error") if got.status_code != 200 else None
        code = str(refusal["code"]) if refusal else ""
        record.counts[f"{kind}: {got.status_code} {code}".rstrip()] += 1
        answer = Answer(got.status_code, code, found, span)
        if code == "insufficient_quota":
            self._note_refusal(answer, own_bytes)
        elif (got.status_code, code) not in _EXPECTED:
            record.problems.append(f"{method} {path} got {got.status_code}: {got.text[:300]}")
        return answer

    def _note_refusal(self, answer: Answer, own_bytes: int) -> None:
        message = answer.body["error"]["message"]
        found = _STORED.search(message)
        if answer.status != 429 or found is None:
            self.record.problems.append(f"a quota refused with {answer.status}: {message}")
            return
        stored = int(found[1].replace(",", ""))
        self.record.refusals.append(Refusal(self.owner, answer.span, found[2], stored, own_bytes))


_EXPECTED: Final = (
    *((200, ""), (404, "not_found"), (404, "previous_response_not_found"), (409, "conversation_locked")),
    *((400, "context_length_exceeded"), (503, "overloaded"), (429, "rate_limit_exceeded")),
)


def _item(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def _text_of(item: dict[str, Any]) -> str:
    content = item.get("content") or ()
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
