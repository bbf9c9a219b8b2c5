"""POST /v1/responses, from its body to its answer.

Owns: the steps of a request for a response and their order; which of its answers a repeated request gets; the
lock that a conversation has while a turn of it runs.
Does not know: how turns run, what is kept, or how events are written.

`ResponseCreation.create` names the steps; those below stand in the order in which it takes them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.history.server_tables.changes import ResponseRecord
from pensieve_jax.server.http.errors import ApiError, as_api_error, internal_error, invalid_value
from pensieve_jax.server.http.replies import HttpResponse, json_reply
from pensieve_jax.server.http.request import ClientGoneError, HttpRequest
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.openai.responses.background import BackgroundResponses
from pensieve_jax.server.openai.responses.context import reading
from pensieve_jax.server.openai.responses.conversations import check_unlocked
from pensieve_jax.server.openai.responses.events import ResponseStreams, StartedStream, run_events
from pensieve_jax.server.openai.responses.foreground import ForegroundResponse
from pensieve_jax.server.openai.responses.plan import ENGINE_FIELDS, ResponsePlan
from pensieve_jax.server.openai.responses.response import kept_response
from pensieve_jax.server.openai.responses.retries import IdempotencyStore, idempotency_key, is_retry
from pensieve_jax.server.openai.responses.run import ResponseRun
from pensieve_jax.server.openai.responses.schemas import CreateResponse, check_create
from pensieve_jax.server.turns.checks import check_model

type Earlier = ResponseRun | ResponseRecord
"""What an earlier request with the same key or body became."""


class CreateRequest(NamedTuple):
    """One request, read and checked.

    Attributes:
      body_sha256: a digest of its body as it came.
      key: its idempotency key.
    """

    call: HttpRequest
    body: CreateResponse
    body_sha256: str
    key: str | None


class ResponseCreation:
    """POST /v1/responses of one server. Used by the event loop's thread only."""

    def __init__(
        self,
        services: Services,
        background: BackgroundResponses,
        repeats: IdempotencyStore,
        streams: ResponseStreams,
        locks: set[tuple[str, str]],
    ) -> None:
        """`locks` has the conversations, by owner and id, of which a turn runs."""
        self._services = services
        self._background = background
        self._repeats = repeats
        self._streams = streams
        self._locks = locks

    async def create(self, call: HttpRequest) -> HttpResponse:
        """A response, whole, as a stream, or queued."""
        request = await self._read(call)
        earlier = await self._earlier(request)
        if earlier is not None:
            return await self._answer_again(request, earlier)
        unlock = self._lock(request)
        plan, earlier = await self._plan(request, unlock)
        if earlier is not None:  # the same request came in the meantime
            return await self._answer_again(request, earlier)
        if plan.body.background or plan.key is not None:
            run = self._run(plan, unlock)
            return await self._follow(request, run)
        response = await self._start(request, plan, unlock)
        if plan.body.stream:
            return self._streams.reply(response.stream(), response.close)
        return await self._whole(request, response)

    # Read and check the request

    async def _read(self, call: HttpRequest) -> CreateRequest:
        """Raises ApiError for a body or a key that cannot be served."""
        body = await call.decode(CreateResponse)
        check_create(body)
        check_model(call.services, body.model)
        key = idempotency_key(call.headers)
        if key is not None and not body.stores:
            sentence = "Idempotency-Key needs store: what is not kept cannot be given again."
            raise invalid_value("Idempotency-Key", sentence)
        return CreateRequest(call, body, hashlib.sha256(call.body).hexdigest(), key)

    # Answer a request that was sent before

    async def _earlier(self, request: CreateRequest) -> Earlier | None:
        """What an earlier request with the same key or body became, once that is certain.

        Nothing happens between its last look and its return.
        """
        owner, key = request.call.owner, request.key
        if key is None and not is_retry(request.call.headers):
            return None
        while True:
            now_s = self._services.now_s()
            earlier: Earlier | None
            if key is not None:
                earlier = await self._repeats.by_key(owner, key, request.body_sha256, now_s)
            else:
                earlier = await self._repeats.by_body(owner, request.body_sha256, now_s)
            if earlier is not None or not self._background.is_in_doubt:
                return earlier
            # The earlier one may be queued only now.
            await request.call.unless_gone(self._background.settle())

    async def _answer_again(self, request: CreateRequest, earlier: Earlier) -> HttpResponse:
        """The answer of the response that an earlier request became."""
        if isinstance(earlier, ResponseRecord):
            run = self._background.adopt(earlier)
            if run is None or run.has_ended:
                missed = self._missed(request, request.body_sha256, earlier.response_id)
                if request.body.stream:
                    return self._stream(await self._streams.kept(earlier), missed)
                return json_reply(kept_response(earlier), undelivered=missed)
            earlier = run
        return await self._follow(request, earlier)

    # Lock the conversation, and plan the turn

    def _lock(self, request: CreateRequest) -> Callable[[], None]:
        """Lock a conversation for a turn; what unlocks it. Raises ApiError 409 where one runs already."""
        owner, conversation_id = request.call.owner, request.body.conversation_id
        if conversation_id is None:
            return lambda: None
        check_unlocked(self._locks, owner, conversation_id)
        lock = (owner, conversation_id)
        self._locks.add(lock)
        return lambda: self._locks.discard(lock)

    async def _plan(
        self, request: CreateRequest, unlock: Callable[[], None]
    ) -> tuple[ResponsePlan, Earlier | None]:
        """The plan of a request, and what the same request became while it was made.

        Unlocks the conversation where the plan is not to be run. Raises ApiError and UnknownRecordError.
        """
        call, services = request.call, self._services
        is_to_run = False
        try:
            thought = reading(services, call.owner, request.body, len(call.body))
            plan = await services.run_cpu(
                call.owner,
                thought,
                ResponsePlan,
                services,
                call.owner,
                request.body,
                request.body_sha256,
                request.key,
            )
            earlier = await self._earlier(request)
            is_to_run = earlier is None
        finally:
            if not is_to_run:
                unlock()
        if is_to_run:
            call.notes.ignored_fields += plan.context.ignored_fields
        return plan, earlier

    # Run it for a client that waits

    async def _start(
        self, request: CreateRequest, plan: ResponsePlan, unlock: Callable[[], None]
    ) -> ForegroundResponse:
        """Start its turn; raises ApiError, what the engine raises, and ClientGoneError."""
        call = request.call
        response = ForegroundResponse(self._services, plan, self._repeats, unlock, call.notes.counts)
        is_started = False
        try:
            await call.unless_gone(response.start())
            is_started = True
        finally:
            if not is_started:
                await response.close()
        return response

    async def _whole(self, request: CreateRequest, response: ForegroundResponse) -> HttpResponse:
        """Wait for all of it."""
        try:
            answer = await request.call.unless_gone(response.whole())
            response.delivered()
            return json_reply(answer, undelivered=response.missed)
        finally:
            await response.close()

    # Run it by itself: in the background, or for all requests with its key

    def _run(self, plan: ResponsePlan, unlock: Callable[[], None]) -> ResponseRun:
        """Have a response run, which its clients then follow."""
        run = ResponseRun(plan.owner, plan.body_sha256, background=bool(plan.body.background))
        if plan.key is not None:
            self._repeats.start(plan.owner, plan.key, run)
        run.task = asyncio.ensure_future(self._drive(plan, run, unlock))
        return run

    async def _drive(self, plan: ResponsePlan, run: ResponseRun, unlock: Callable[[], None]) -> None:
        """Until a background response is queued, and any other has ended."""
        try:
            if run.background:
                await self._background.queue(plan, run, unlock)
            else:
                await self._drive_foreground(plan, run, unlock)
        except (ApiError, PensieveError) as error:
            run.fail(as_api_error(error, ENGINE_FIELDS))
        finally:
            if plan.key is not None:
                self._repeats.end(plan.owner, plan.key)
            if run.background and plan.head is not None and (run.head is None or run.is_abandoned):
                # It may have been queued all the same, and no client was told of it.
                now_s = self._services.now_s()
                self._repeats.missed(plan.owner, plan.body_sha256, plan.head.response_id, now_s)
            if not run.has_ended and (run.head is None or not run.background):
                run.fail(internal_error())

    async def _drive_foreground(
        self, plan: ResponsePlan, run: ResponseRun, unlock: Callable[[], None]
    ) -> None:
        """Until it has ended."""
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

    # Answer while it runs by itself

    async def _follow(self, request: CreateRequest, run: ResponseRun) -> HttpResponse:
        """The answer to a request whose response runs by itself."""
        call = request.call
        try:
            head = await call.unless_gone(run.known())
        except ClientGoneError:
            run.is_abandoned = True
            raise
        missed = self._missed(request, run.body_sha256, head.response_id) if run.background else None
        if request.body.stream:
            return self._stream(run_events(run, head, self._streams.texts), missed)
        if run.background:
            return json_reply(run.response or head.object("queued"), undelivered=missed)
        return json_reply(await call.unless_gone(run.result()))

    def _missed(
        self, request: CreateRequest, body_sha256: str, response_id: str
    ) -> Callable[[], None] | None:
        """What to call where a response does not reach its client; one with a key asks for it by that."""
        if request.key is not None:
            return None
        owner = request.call.owner
        return lambda: self._repeats.missed(owner, body_sha256, response_id, self._services.now_s())

    def _stream(self, events: AsyncGenerator[bytes], missed: Callable[[], None] | None) -> HttpResponse:
        """Stream a response; `missed` is called where the client got no event of it."""
        if missed is None:
            return self._streams.reply(events)
        begun = StartedStream(events)

        async def end() -> None:
            if not begun.has_begun:
                missed()

        return self._streams.reply(begun.events(), end)
