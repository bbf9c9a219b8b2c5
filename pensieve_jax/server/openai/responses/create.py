"""The route POST /v1/responses.

Owns: the steps of creating a response and their order; the answer to a repeated request; the lock of a
conversation while a turn of it runs.
Does not know: how turns run, what is stored, or how events are encoded. Called by `Responses`.

`ResponseCreation.create` calls the steps; the methods below it are in the same order.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from functools import partial
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
from pensieve_jax.server.openai.responses.events import ResponseStreams, StartedStream
from pensieve_jax.server.openai.responses.foreground import ForegroundResponse
from pensieve_jax.server.openai.responses.pieces import ReplyPieces
from pensieve_jax.server.openai.responses.plan import ENGINE_FIELDS, ResponsePlan
from pensieve_jax.server.openai.responses.response import stored_response
from pensieve_jax.server.openai.responses.retries import IdempotencyStore, is_retry
from pensieve_jax.server.openai.responses.run import ResponseRun
from pensieve_jax.server.openai.responses.schemas import CreateResponse, check_create
from pensieve_jax.server.turns.checks import check_model
from pensieve_jax.server.turns.idempotency import idempotency_key
from pensieve_jax.server.turns.structured import AskedForm, asked_text_format

type Earlier = ResponseRun | ResponseRecord
"""The response that an earlier request with the same key or body created, while it runs or as stored."""


class CreateRequest(NamedTuple):
    """One request, decoded and checked.

    Attributes:
      call: the HTTP request.
      body: its decoded body.
      form: the form that it asks for.
      body_sha256: SHA-256 digest of the raw body.
      key: its idempotency key, or None.
    """

    call: HttpRequest
    body: CreateResponse
    form: AskedForm
    body_sha256: str
    key: str | None


class ResponseCreation:
    """The handler of POST /v1/responses of one server. Used by the event loop's thread only."""

    def __init__(
        self,
        services: Services,
        background: BackgroundResponses,
        idempotency: IdempotencyStore,
        streams: ResponseStreams,
        locks: set[tuple[str, str]],
    ) -> None:
        """`locks` contains the conversations with a running turn, by owner and id."""
        self._services = services
        self._background = background
        self._idempotency = idempotency
        self._streams = streams
        self._locks = locks

    async def create(self, call: HttpRequest) -> HttpResponse:
        """Create a response, and answer with it whole, streamed, or queued."""
        request = await self._read(call)
        earlier = await self._earlier(request)
        if earlier is not None:
            return await self._answer_again(request, earlier)
        run = self._keyed_run(request)
        try:
            unlock = self._lock(request)
            plan, earlier = await self._plan(request, unlock)
        except BaseException as error:
            self._fail_to_plan(request, run, error)
            raise
        if earlier is not None:  # the same request arrived in the meantime
            return await self._answer_again(request, earlier)
        if run is None and plan.body.background:
            run = self._new_run(request)
        if run is not None:
            run.task = asyncio.ensure_future(self._drive(plan, run, unlock))
            return await self._follow(request, run)
        response = await self._start(request, plan, unlock)
        if plan.body.stream:
            return self._streams.reply(response.stream(), response.close, response.charge_unread)
        return await self._whole(request, response)

    # Read and check the request

    async def _read(self, call: HttpRequest) -> CreateRequest:
        """Decode and check a request; raise ApiError for an invalid body or key."""
        body = await call.decode(CreateResponse)
        check_create(body)
        check_model(call.services, body.model)
        call.charge_stream(body.stream)
        if body.stores:
            call.ticket.charge("written_rows", 2 + (len(body.input) if isinstance(body.input, list) else 1))
        key = idempotency_key(call.headers)
        if key is not None and not body.stores:
            sentence = "Idempotency-Key needs store: a response that is not stored cannot be returned again."
            raise invalid_value("Idempotency-Key", sentence)
        asked = await asked_text_format(call, body.text_format)
        return CreateRequest(call, body, asked, hashlib.sha256(call.body).hexdigest(), key)

    # Answer a request that was sent before

    async def _earlier(self, request: CreateRequest) -> Earlier | None:
        """Return the response of an earlier request with the same key or body, or None, once that is certain.

        Nothing else runs between the last check and the return.
        """
        owner, key = request.call.owner, request.key
        if key is None and not is_retry(request.call.headers):
            return None
        while True:
            now_s = self._services.now_s()
            earlier: Earlier | None
            if key is not None:
                earlier = await self._idempotency.by_key(owner, key, request.body_sha256, now_s)
            else:
                earlier = await self._idempotency.by_body(owner, request.body_sha256, now_s)
            if earlier is not None or not self._background.has_lost_confirmations:
                return earlier
            # The response of the earlier request may still be on its way into the queue.
            await request.call.unless_gone(self._background.reconcile())

    async def _answer_again(self, request: CreateRequest, earlier: Earlier) -> HttpResponse:
        """Answer a repeated request with the response of the earlier one."""
        if isinstance(earlier, ResponseRecord):
            run = self._background.run_queued(earlier)
            if run is None or run.has_ended:
                on_undelivered = self._undelivered_callback(request, request.body_sha256, earlier.response_id)
                if request.body.stream:
                    return self._stream(await self._streams.stored(earlier), on_undelivered)
                return json_reply(
                    stored_response(earlier, self._services.token_texts), undelivered=on_undelivered
                )
            earlier = run
        return await self._follow(request, earlier)

    # Register a request with a key, lock the conversation, and plan the turn

    def _keyed_run(self, request: CreateRequest) -> ResponseRun | None:
        """Return the run of a request with a key, which the same request finds from now on, else None.

        It is registered before the conversation is locked: otherwise the lock would refuse the same request.
        """
        if request.key is None:
            return None
        run = self._new_run(request)
        self._idempotency.start(request.call.owner, request.key, run)
        return run

    def _fail_to_plan(self, request: CreateRequest, run: ResponseRun | None, error: BaseException) -> None:
        """End the run of a request that cannot be planned, with the error for all requests with its key."""
        if run is not None and request.key is not None:
            self._idempotency.end(request.call.owner, request.key)
            run.fail(as_api_error(error, ENGINE_FIELDS))

    def _lock(self, request: CreateRequest) -> Callable[[], None]:
        """Lock the conversation and return the function to unlock it; raise ApiError 409 if it is locked."""
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
        """Return the plan of a request, and the response of the same request if one was created meanwhile.

        Unlocks the conversation if the plan is not to be run. Raises ApiError, UnknownRecordError, and
        StorageQuotaError for a response that would be stored.
        """
        call, services = request.call, self._services
        is_to_run, earlier = False, None
        try:
            if request.body.stores:
                await services.storage.check(call.owner)
            estimate = reading(services, call.owner, request.body, len(call.body))
            plan = await services.run_cpu(
                call.owner,
                estimate,
                ResponsePlan,
                services,
                call.owner,
                request.body,
                request.form,
                request.body_sha256,
                request.key,
            )
            if request.key is None:  # a request with a key is registered, so that no other one runs
                earlier = await self._earlier(request)
            is_to_run = earlier is None
        finally:
            if not is_to_run:
                unlock()
        if is_to_run:
            call.notes.ignored_fields += plan.context.ignored_fields
        return plan, earlier

    # Run a foreground response

    async def _start(
        self, request: CreateRequest, plan: ResponsePlan, unlock: Callable[[], None]
    ) -> ForegroundResponse:
        """Start the turn; raise ApiError, the engine's errors, and ClientGoneError."""
        call = request.call
        response = ForegroundResponse(self._services, plan, self._idempotency, unlock, call.notes.counts)
        is_started = False
        try:
            await call.unless_gone(response.start())
            is_started = True
        finally:
            if not is_started:
                await response.close()
        return response

    async def _whole(self, request: CreateRequest, response: ForegroundResponse) -> HttpResponse:
        """Wait for the whole response, and answer with it."""
        try:
            answer = await request.call.unless_gone(response.whole())
            response.delivered()
            return json_reply(answer, undelivered=response.mark_undelivered)
        finally:
            await response.close()

    # Run a response as a task: in the background, or for all requests with its key

    def _new_run(self, request: CreateRequest) -> ResponseRun:
        """Return the run of a response, which its clients follow once a task drives it."""
        owner, body_sha256 = request.call.owner, request.body_sha256
        new_pieces = partial(ReplyPieces, self._services.tokenizer)
        return ResponseRun(owner, body_sha256, new_pieces, background=bool(request.body.background))

    async def _drive(self, plan: ResponsePlan, run: ResponseRun, unlock: Callable[[], None]) -> None:
        """Run until a background response is queued, or until any other response has ended."""
        try:
            if run.background:
                await self._background.queue(plan, run, unlock)
            else:
                await self._drive_foreground(plan, run, unlock)
        except (ApiError, PensieveError) as error:
            run.fail(plan.errors.as_api_error(error))
        finally:
            if plan.key is not None:
                self._idempotency.end(plan.owner, plan.key)
            if run.background and plan.head is not None and (run.head is None or run.is_abandoned):
                # It may be queued nevertheless, although no client knows of it.
                now_s = self._services.now_s()
                self._idempotency.add_undelivered(plan.owner, plan.body_sha256, plan.head.response_id, now_s)
            if not run.has_ended and (run.head is None or not run.background):
                run.fail(internal_error())

    async def _drive_foreground(
        self, plan: ResponsePlan, run: ResponseRun, unlock: Callable[[], None]
    ) -> None:
        """Run a response with a key until it has ended."""
        response = ForegroundResponse(self._services, plan, self._idempotency, unlock, {})
        try:
            await response.start()
            run.begin(response.head)
            async for delta in response.turn:
                run.take(delta)
            assert response.turn.output is not None
            run.end(await response.finish(response.turn.output))
        finally:
            await response.close()

    # Follow a response that runs as a task

    async def _follow(self, request: CreateRequest, run: ResponseRun) -> HttpResponse:
        """Answer a request whose response runs as a task."""
        call = request.call
        try:
            head = await call.unless_gone(run.known())
        except ClientGoneError:
            run.is_abandoned = True
            raise
        on_undelivered = (
            self._undelivered_callback(request, run.body_sha256, head.response_id) if run.background else None
        )
        if request.body.stream:
            return self._stream(self._streams.run(run, head), on_undelivered)
        if run.background:
            return json_reply(run.response or head.object("queued"), undelivered=on_undelivered)
        return json_reply(await call.unless_gone(run.result()))

    def _undelivered_callback(
        self, request: CreateRequest, body_sha256: str, response_id: str
    ) -> Callable[[], None] | None:
        """Return what to call if the response is not delivered; None if a key leads a retry to it."""
        if request.key is not None:
            return None
        owner = request.call.owner
        return lambda: self._idempotency.add_undelivered(
            owner, body_sha256, response_id, self._services.now_s()
        )

    def _stream(
        self, events: AsyncGenerator[bytes], on_undelivered: Callable[[], None] | None
    ) -> HttpResponse:
        """Stream a response; call `on_undelivered` if the client got no event of it."""
        if on_undelivered is None:
            return self._streams.reply(events)
        begun = StartedStream(events)

        async def end() -> None:
            if not begun.has_begun:
                on_undelivered()

        return self._streams.reply(begun.events(), end)
