"""Rounds of racing operations on one server, each with a check of all answers and an empty server at its end.

Owns: the clients of all owners, the order of a round, and the checks while nothing else happens.
Does not know: the rules on answers (`rules`, `quota_rules`), or how a server starts.

A round races, waits until nothing runs, and looks at everything once more. Then one owner after the other
deletes everything: what the others store stays as it is, and the owner stores nothing. With quotas, each
owner then stores exactly as much as the quota says, and again as much as a deletion gives back.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any, Final

import httpx2

from pensieve_lab.races import quota_rules, rules
from pensieve_lab.races.amounts import read_amounts
from pensieve_lab.races.clients import RacingClient, Shared
from pensieve_lab.races.quota_rules import Quota
from pensieve_lab.races.record import Record
from pensieve_lab.serving.owner_keys import OPERATOR, key_of
from pensieve_lab.soaking.samples import table_figures

OWNERS: Final = ("alice", "bob", "carol")
"""The last one is a writer: it has no turns, so its bytes are known exactly."""
_SETTLED_S: Final = 60.0
_IN_FLIGHT: Final = (
    *("front_turns_in_engine", "front_turns_in_queue", "front_owners_in_flight", "engine_running"),
    "front_background_responses",
)
_COMPARED: Final = 2  # conversations of each owner whose contexts are compared
_PAUSE_S: Final = 0.05
_TOO_MANY: Final = 4  # requests beyond the room that a quota has


class Races:
    """All rounds against one server; an asynchronous context manager.

    Attributes:
      counts: answers by operation and outcome, of all rounds.
      violations: a sentence for each.
    """

    def __init__(
        self, address: str, *, history: str | None, num_clients: int, seed: int, quota: Quota
    ) -> None:
        """Take a server whose owners store nothing.

        Args:
          address: its base URL.
          history: where its history is, for a recount of its rows; None for no recount.
          num_clients: clients of each owner.
          seed: seed of the clients' choices.
          quota: what the server allows each owner.
        """
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self._address, self._history, self._quota = address, history, quota
        self._num_clients, self._seed = num_clients, seed
        self._stack = AsyncExitStack()
        self._clients: dict[str, list[RacingClient]] = {}
        self._http = {owner: _client(address, owner) for owner in (*OWNERS, OPERATOR)}

    async def __aenter__(self) -> Races:
        for place, owner in enumerate(OWNERS):
            others = [one for one in OWNERS if one != owner]
            self._clients[owner] = [
                await self._stack.enter_async_context(
                    RacingClient(
                        self._address,
                        owner,
                        others,
                        self._seed * 1000 + place * self._num_clients + number,
                        is_writer=owner == OWNERS[-1],
                    )
                )
                for number in range(self._num_clients)
            ]
        for http in self._http.values():
            await self._stack.enter_async_context(http)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self, num_operations: int) -> None:
        """Run a round of `num_operations`, and record its violations."""
        shared = Shared(Record(), num_operations)
        ending = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch(shared, ending))
            async with asyncio.TaskGroup() as racing:
                for clients in self._clients.values():
                    for client in clients:
                        racing.create_task(client.race(shared))
            ending.set()
            await watching
        await self._settle()
        await self._look_at_everything(shared)
        self.counts += shared.record.counts
        self.violations += rules.find_violations(shared.record)
        self.violations += quota_rules.find_violations(shared.record, self._quota)
        self._recount()
        await self._empty(shared)
        self._recount()

    # Private methods

    async def _watch(self, shared: Shared, ending: asyncio.Event) -> None:
        """Look up what each owner stores, again and again."""
        async with AsyncExitStack() as stack:
            watchers = []
            for owner in OWNERS:
                watcher = RacingClient(self._address, owner, [], 0)
                watcher._shared = shared
                watchers.append(await stack.enter_async_context(watcher))
            while not ending.is_set():
                await asyncio.gather(*(watcher.look_up_amounts() for watcher in watchers))
                await asyncio.sleep(_PAUSE_S)

    async def _settle(self) -> None:
        """Wait until no turn runs or waits."""
        deadline_s = time.monotonic() + _SETTLED_S
        while True:
            answer = await self._http[OPERATOR].get("/v1/pensieve/stats")
            figures = table_figures(answer.raise_for_status().json())
            left = {name: figures[name] for name in _IN_FLIGHT if figures[name]}
            if not left:
                return
            if time.monotonic() > deadline_s:
                self.violations.append(f"{left} remain {_SETTLED_S:g} s after the last request")
                return
            await asyncio.sleep(_PAUSE_S)

    async def _look_at_everything(self, shared: Shared) -> None:
        """See every conversation, item and response once more while nothing changes."""
        for owner, (client, *_) in self._clients.items():
            for name in shared.conversations[owner]:
                await client.listed(name)
            for name in [*shared.responses[owner], *shared.background[owner]]:
                status = await client.read(name)
                if status in ("queued", "in_progress"):
                    self.violations.append(f"response {name} is {status}, but nothing runs")
            await client.look_up_amounts()

    def _recount(self) -> None:
        """Compare the amounts that the history keeps with its rows."""
        if self._history is None:
            return
        found = read_amounts(self._history)
        if found.counted != found.recounted:
            self.violations.append(f"the history counts {found.counted}; its rows are {found.recounted}")

    async def _empty(self, shared: Shared) -> None:
        """Let one owner after the other delete everything, and fill its quota and empty it again."""
        for owner in OWNERS:
            others = {one: await self._amounts(one) for one in OWNERS if one != owner}
            await self._delete(owner, "responses")
            await self._compare_contexts(owner)
            await self._delete_all(owner)
            if self._quota.num_conversations is not None:
                await self._fill(owner, "conversations", self._quota.num_conversations)
            if self._quota.num_responses is not None:
                await self._fill(owner, "responses", self._quota.num_responses)
            if self._quota.num_bytes is not None:
                await self._fill_bytes(owner, self._quota.num_bytes)
            await self._delete_all(owner)
            for other, before in others.items():
                if (after := await self._amounts(other)) != before:
                    self.violations.append(f"{other} stored {before}, and after {owner} had gone {after}")

    async def _amounts(self, owner: str) -> tuple[int, ...]:
        body = await self._stored(owner)
        return body["num_conversations"], body["num_responses"], body["num_bytes"]

    async def _stored(self, owner: str) -> dict[str, Any]:
        answer = await self._http[owner].get("/v1/pensieve/stored?limit=1000")
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    async def _delete(self, owner: str, kind: str) -> None:
        """Delete all conversations or responses of an owner."""
        while rows := (await self._stored(owner))[kind]:
            for row in rows:
                (await self._http[owner].delete(f"/v1/{kind}/{row['id']}")).raise_for_status()

    async def _delete_all(self, owner: str) -> None:
        """Delete everything of an owner, who then stores nothing."""
        await self._delete(owner, "responses")
        await self._delete(owner, "conversations")
        if any(left := await self._amounts(owner)):
            self.violations.append(f"{owner} deleted everything, and stores {left}")

    async def _compare_contexts(self, owner: str) -> None:
        """Continue some conversations: the reply is that to their items, sent as messages."""
        http = self._http[owner]
        compared = 0
        for row in (await self._stored(owner))["conversations"]:
            answer = await http.get(f"/v1/conversations/{row['id']}/items?limit=100&order=asc")
            items = answer.raise_for_status().json()["data"]
            if owner == OWNERS[-1] or not items or compared == _COMPARED:
                continue
            compared += 1
            messages = [{"role": one["role"], "content": one["content"][0]["text"]} for one in items]
            asked = {"role": "user", "content": "And now?"}
            turn = {"conversation": row["id"], "input": asked["content"], "max_output_tokens": 16}
            chat = {"messages": [*messages, asked], "max_tokens": 16}
            one = await http.post("/v1/responses", json={**turn, "temperature": 0})
            other = await http.post("/v1/chat/completions", json={**chat, "temperature": 0})
            if {one.status_code, other.status_code} != {200}:
                if one.json()["error"]["code"] not in ("context_length_exceeded", "insufficient_quota"):
                    self.violations.append(f"a context was refused: {one.text[:200]} {other.text[:200]}")
                continue
            self.counts["contexts compared"] += 1
            there, here = _reply(one.json()), other.json()["choices"][0]["message"]["content"] or ""
            tokens = (one.json()["usage"]["input_tokens"], other.json()["usage"]["prompt_tokens"])
            if there.strip() != here.strip() or tokens[0] != tokens[1]:
                self.violations.append(f"a conversation says {there!r}, and its items {here!r}: {tokens}")

    async def _fill(self, owner: str, kind: str, limit: int) -> None:
        """Create conversations or responses up to the limit; a deleted one gives room for exactly one."""
        body = {"input": "Fill", "max_output_tokens": 1, "background": True} if kind == "responses" else {}
        made = await self._rush(owner, kind, body, limit)
        if made:
            (await self._http[owner].delete(f"/v1/{kind}/{made[0]}")).raise_for_status()
            await self._rush(owner, kind, body, 1)
        await self._delete_all(owner)

    async def _rush(self, owner: str, kind: str, body: dict[str, Any], expected: int) -> list[str]:
        """Send more requests at a time than the quota has room for; return the ids, `expected` many."""
        asked = [self._http[owner].post(f"/v1/{kind}", json=body) for _ in range(expected + _TOO_MANY)]
        answers = await asyncio.gather(*asked)
        for answer in answers:
            if answer.status_code != 200 and answer.json()["error"]["code"] != "insufficient_quota":
                self.violations.append(f"{owner} fills its {kind}: {answer.text[:300]}")
        made = [str(one.json()["id"]) for one in answers if one.status_code == 200]
        self._check_filled(owner, kind, len(made), expected)
        return made

    async def _fill_bytes(self, owner: str, limit: int) -> None:
        """Append items of one size up to the limit: as many as fit, and no more."""
        created = await self._http[owner].post("/v1/conversations", json={})
        name = created.raise_for_status().json()["id"]
        path, empty = f"/v1/conversations/{name}/items", (await self._amounts(owner))[2]
        body = {"items": [{"type": "message", "role": "user", "content": "z" * (limit // 20)}]}
        (await self._http[owner].post(path, json=body)).raise_for_status()
        size = (await self._amounts(owner))[2] - empty
        expected, made = (limit - empty) // size - 1, 0
        while (answer := await self._http[owner].post(path, json=body)).status_code == 200:
            made += 1
        if answer.json()["error"]["code"] != "insufficient_quota":
            self.violations.append(f"{owner} fills its bytes: {answer.text[:300]}")
        self._check_filled(owner, "bytes", made, expected)
        await self._delete_all(owner)

    def _check_filled(self, owner: str, amount: str, made: int, expected: int) -> None:
        self.counts[f"{amount} filled"] += 1
        if made != expected:
            self.violations.append(
                f"{owner} filled {amount} with {made} requests, and had room for {expected}"
            )


def _client(address: str, owner: str) -> httpx2.AsyncClient:
    headers = {"authorization": f"Bearer {key_of(owner)}"}
    return httpx2.AsyncClient(base_url=address, timeout=120.0, trust_env=False, headers=headers)


def _reply(response: dict[str, Any]) -> str:
    found = [part["text"] for one in response["output"] for part in one.get("content", ())]
    return "".join(found)
