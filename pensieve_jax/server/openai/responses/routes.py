"""The routes of /v1/responses.

Owns: what each of them does, and which of its answers a repeated request gets.
Does not know: how turns run, what is kept, or how events are written.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.history.server_tables.changes import DeleteResponse, ResponseRecord
from pensieve_jax.server.context.resolver import Memory
from pensieve_jax.server.http.errors import (
    ApiError,
    as_api_error,
    internal_error,
    invalid_value,
    renamed_fields,
)
from pensieve_jax.server.http.pagination import page_of_items
from pensieve_jax.server.http.replies import Events, Reply, json_reply
from pensieve_jax.server.http.request import Call, ClientGoneError
from pensieve_jax.server.http.routes import Route
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.openai.responses.background import BackgroundResponses
from pensieve_jax.server.openai.responses.context import reading, request_context
from pensieve_jax.server.openai.responses.events import Begun, ReplyTexts, kept_events, run_events
from pensieve_jax.server.openai.responses.foreground import ForegroundResponse
from pensieve_jax.server.openai.responses.plan import ENGINE_FIELDS, ResponsePlan
from pensieve_jax.server.openai.responses.response import head_of, kept_response
from pensieve_jax.server.openai.responses.retries import Repeats, idempotency_key, is_retry
from pensieve_jax.server.openai.responses.run import ResponseRun
from pensieve_jax.server.openai.responses.schemas import (
    CountTokens,
    CreateResponse,
    check_context,
    check_create,
)
from pensieve_jax.server.turns.checks import check_model


class Responses:
    """The handlers of one server, and what they know together. Used by the event loop's thread only.

    Attributes:
      background: enter its `lifespan`.
      locks: the conversations, by owner and id, of which a turn runs.
    """

    def __init__(self, services: Services) -> None:
        """Of a server that starts now."""
        self._services = services
        self.locks: set[tuple[str, str]] = set()
        self.background = BackgroundResponses(services, self.locks)
        self._repeats = Repeats(services.history, services.now_s(), self.background.current)
        services.tables |= {
            "locked_conversations": lambda: len(self.locks),
            "background_responses": lambda: self.background.num_running,
            "requests_with_keys": lambda: self._repeats.num_running,
            "responses_undelivered": lambda: self._repeats.num_undelivered,
        }

    @property
    def routes(self) -> list[Route]:
        """Their rows."""
        one = "/v1/responses/{response_id}"
        return [
            Route("POST", "/v1/responses", self.create),
            Route("POST", "/v1/responses/input_tokens", self.count_tokens),
            Route("GET", one, self.retrieve),
            Route("DELETE", one, self.delete),
            Route("GET", f"{one}/input_items", self.input_items),
            Route("POST", f"{one}/cancel", self.cancel, has_body=False),
        ]

    async def create(self, call: Call) -> Reply:
        """A response, whole, as a stream, or queued."""
        body = await call.decode(CreateResponse)
        check_create(body)
        check_model(call.services, body.model)
        sha256 = hashlib.sha256(call.body).hexdigest()
        key = idempotency_key(call.headers)
        if key is not None and not body.stores:
            sentence = "Idempotency-Key needs store: what is not kept cannot be given again."
            raise invalid_value("Idempotency-Key", sentence)
        known = await self._known(call, key, sha256)
        if known is not None:
            return await self._repeated(call, body, known, sha256)
        unlock = self._lock(call.owner, body.conversation_id)
        planned = False
        try:
            thought = reading(call.services, call.owner, body, len(call.body))
            plan = await call.services.think(
                call.owner, thought, ResponsePlan, call.services, call.owner, body, sha256, key
            )
            known = await self._known(call, key, sha256)  # the same may have come in the meantime
            planned = known is None
        finally:
            if not planned:
                unlock()
        if known is not None:
            return await self._repeated(call, body, known, sha256)
        call.notes.ignored_fields += plan.context.ignored_fields
        if body.background or key is not None:
            run = self._run(plan, unlock)
            return await self._follow(call, body, run)
        response = ForegroundResponse(call.services, plan, self._repeats, unlock, call.notes.counts)
        started = False
        try:
            await call.unless_gone(response.start())
            started = True
        finally:
            if not started:
                await response.close()
        if body.stream:
            return self._events(response.stream(), response.close)
        try:
            answer = await call.unless_gone(response.whole())
            response.delivered()
            return json_reply(answer, undelivered=response.missed)
        finally:
            await response.close()

    async def retrieve(self, call: Call) -> Reply:
        """A response, or with `stream=true` its events from the one after `starting_after` on."""
        response_id = call.path["response_id"]
        starting_after = _starting_after(call.query.get("starting_after"))
        streams = call.query.get("stream", "false").lower() == "true"
        if not streams and call.query.get("starting_after") is not None:
            raise invalid_value("starting_after", "starting_after needs stream=true.")
        run = self.background.find(call.owner, response_id)
        if run is None or run.head is None or run.has_ended:
            history = call.services.history
            record: ResponseRecord = await self.background.current(
                call.owner, history.response, call.owner, response_id
            )
            run = self.background.adopt(record)
        if run is not None and run.head is not None and not run.has_ended:
            if streams:
                return self._events(run_events(run, run.head, self._texts, starting_after))
            return json_reply(run.head.object("in_progress" if run.is_started else "queued"))
        if streams:
            return self._events(await self._kept_events(record, starting_after))
        return json_reply(kept_response(record))

    async def delete(self, call: Call) -> Reply:
        """Forget a response; one that runs is cancelled first."""
        services, response_id = call.services, call.path["response_id"]
        record: ResponseRecord = await call.read(services.history.response, call.owner, response_id)
        if record.status == "queued":
            await self.background.cancel(call.owner, record)
        await services.engine.apply(DeleteResponse(owner=call.owner, response_id=response_id))
        if record.turn_id is not None:
            services.resolver.index.forget(call.owner, record.turn_id)
        return json_reply({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, call: Call) -> Reply:
        """The items of a response's own request."""
        return await page_of_items(call, call.services.history.input_items, call.path["response_id"])

    async def cancel(self, call: Call) -> Reply:
        """End a response in the background; one that has ended is answered as it is."""
        response_id = call.path["response_id"]
        record: ResponseRecord = await call.read(call.services.history.response, call.owner, response_id)
        if not record.background:
            sentence = f"Response {response_id!r} does not run in the background: only its client ends it."
            raise invalid_value("response_id", sentence)
        return json_reply(await self.background.cancel(call.owner, record))

    async def count_tokens(self, call: Call) -> Reply:
        """How many tokens a context has."""
        body = await call.decode(CountTokens)
        check_context(body)
        check_model(call.services, body.model)
        services, owner = call.services, call.owner
        thought = reading(services, owner, body, len(call.body))
        context = await services.think(owner, thought, request_context, services, owner, body, durable=True)
        with renamed_fields(ENGINE_FIELDS):
            resolved = await services.think(owner, context.thought, context.find, Memory.ALL)
        return json_reply({"object": "response.input_tokens", "input_tokens": resolved.num_context_tokens})

    # Inside

    @property
    def _texts(self) -> ReplyTexts:
        tokenizer = self._services.tokenizer
        assert tokenizer is not None, "without one there are no responses"
        services = self._services
        return ReplyTexts(tokenizer, services.engine.info.limits.eos_token_ids, services.token_texts)

    def _events(self, events: AsyncGenerator[bytes], on_end: Any = None) -> Reply:
        settings = self._services.settings
        return Events(
            events,
            heartbeat_s=settings.heartbeat_s,
            stall_timeout_s=settings.stall_timeout_s,
            on_end=on_end,
        )

    async def _kept_events(self, record: ResponseRecord, starting_after: int = -1) -> AsyncGenerator[bytes]:
        token_ids: tuple[int, ...] = ()
        if record.turn_id is not None:
            turn = await self._services.read(
                record.owner, self._services.history.turn, record.owner, record.turn_id
            )
            token_ids = turn.output_token_ids
        response = kept_response(record)
        return kept_events(head_of(record), response, token_ids, self._texts, starting_after)

    async def _known(self, call: Call, key: str | None, sha256: str) -> ResponseRun | ResponseRecord | None:
        """What an earlier request with the same key or body became, once that is certain.

        Nothing happens between its last look and its return.
        """
        if key is None and not is_retry(call.headers):
            return None
        while True:
            now_s = self._services.now_s()
            if key is not None:
                known = await self._repeats.by_key(call.owner, key, sha256, now_s)
            else:
                known = await self._repeats.by_body(call.owner, sha256, now_s)
            if known is not None or not self.background.is_in_doubt:
                return known
            await call.unless_gone(self.background.settle())  # the earlier one may be queued only now

    async def _repeated(
        self, call: Call, body: CreateResponse, known: ResponseRun | ResponseRecord, sha256: str
    ) -> Reply:
        """The answer to a request that was sent before."""
        if isinstance(known, ResponseRecord):
            run = self.background.adopt(known)
            if run is None or run.has_ended:
                missed = self._missed(call, sha256, known.response_id)
                if body.stream:
                    return self._told(await self._kept_events(known), missed)
                return json_reply(kept_response(known), undelivered=missed)
            known = run
        return await self._follow(call, body, known)

    async def _follow(self, call: Call, body: CreateResponse, run: ResponseRun) -> Reply:
        """The answer to a request whose response runs by itself."""
        try:
            head = await call.unless_gone(run.known())
        except ClientGoneError:
            run.is_abandoned = True
            raise
        missed = self._missed(call, run.body_sha256, head.response_id) if run.background else None
        if body.stream:
            return self._told(run_events(run, head, self._texts), missed)
        if run.background:
            return json_reply(run.response or head.object("queued"), undelivered=missed)
        return json_reply(await call.unless_gone(run.result()))

    def _missed(self, call: Call, sha256: str, response_id: str) -> Callable[[], None] | None:
        """What to call where a response does not reach its client; one with a key asks for it by that."""
        if idempotency_key(call.headers) is not None:
            return None
        return lambda: self._repeats.missed(call.owner, sha256, response_id, self._services.now_s())

    def _told(self, events: AsyncGenerator[bytes], missed: Callable[[], None] | None) -> Reply:
        """A stream of a response; nobody repeats a request of which he has got an event."""
        if missed is None:
            return self._events(events)
        begun = Begun(events)

        async def end() -> None:
            if not begun.has_begun:
                missed()

        return self._events(begun.events(), end)

    def _lock(self, owner: str, conversation_id: str | None) -> Callable[[], None]:
        """Lock a conversation for a turn; what unlocks it. Raises ApiError 409 where one runs already."""
        if conversation_id is None:
            return lambda: None
        lock = (owner, conversation_id)
        check_unlocked(self.locks, owner, conversation_id)
        self.locks.add(lock)
        return lambda: self.locks.discard(lock)

    def _run(self, plan: ResponsePlan, unlock: Callable[[], None]) -> ResponseRun:
        """Have a response run by itself."""
        run = ResponseRun(plan.owner, plan.body_sha256, background=bool(plan.body.background))
        if plan.key is not None:
            self._repeats.start(plan.owner, plan.key, run)
        run.task = asyncio.ensure_future(self._drive(plan, run, unlock))
        return run

    async def _drive(self, plan: ResponsePlan, run: ResponseRun, unlock: Callable[[], None]) -> None:
        """Until a background response is queued, and any other has ended."""
        try:
            if run.background:
                await self.background.queue(plan, run, unlock)
            else:
                await self._drive_foreground(plan, run, unlock)
        except (ApiError, PensieveError) as error:
            run.fail(as_api_error(error, ENGINE_FIELDS))
        finally:
            if plan.key is not None:
                self._repeats.end(plan.owner, plan.key)
            if run.background and plan.head is not None and (run.head is None or run.is_abandoned):
                # It may have been queued all the same, and nobody was told of it.
                now_s = self._services.now_s()
                self._repeats.missed(plan.owner, plan.body_sha256, plan.head.response_id, now_s)
            if not run.has_ended and (run.head is None or not run.background):
                run.fail(internal_error())

    async def _drive_foreground(
        self, plan: ResponsePlan, run: ResponseRun, unlock: Callable[[], None]
    ) -> None:
        response = ForegroundResponse(self._services, plan, self._repeats, unlock, {})
        try:
            await response.start()
            run.begin(response.head)
            async for delta in response.turn:
                run.take(delta.token_ids, delta.logprobs)
            assert response.turn.output is not None
            run.end(response.finish(response.turn.output))
        finally:
            await response.close()


def check_unlocked(locks: set[tuple[str, str]], owner: str, conversation_id: str) -> None:
    """Raise ApiError 409 while a turn of a conversation runs."""
    if (owner, conversation_id) in locks:
        sentence = f"A turn of conversation {conversation_id!r} is running; send this when it has ended."
        headers = {"retry-after": "1"}
        raise ApiError(409, "conversation_locked", sentence, param="conversation", headers=headers)


def _starting_after(given: str | None) -> int:
    if given is None:
        return -1
    if not (given.isascii() and given.isdecimal() and len(given) < 10):
        raise invalid_value("starting_after", f"starting_after is {given[:20]!r}, but must be a number.")
    return int(given)
