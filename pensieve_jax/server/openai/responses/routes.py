"""The routes of /v1/responses.

Owns: their handlers, except for the one that creates responses, which is in `create`.
Does not know: how turns run, what is stored, or how events are encoded. Called by `server.app`.
"""

from __future__ import annotations

from pensieve_jax.history.server_tables.changes import DeleteResponse, ResponseRecord
from pensieve_jax.server.context.resolver import Memory
from pensieve_jax.server.http.app import Route
from pensieve_jax.server.http.errors import ApiError, invalid_value, renamed_fields
from pensieve_jax.server.http.pagination import page_of_items
from pensieve_jax.server.http.replies import HttpResponse, json_reply
from pensieve_jax.server.http.request import HttpRequest
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.openai.responses.background import BackgroundResponses
from pensieve_jax.server.openai.responses.context import reading, request_context
from pensieve_jax.server.openai.responses.create import ResponseCreation
from pensieve_jax.server.openai.responses.events import ResponseStreams
from pensieve_jax.server.openai.responses.plan import ENGINE_FIELDS
from pensieve_jax.server.openai.responses.response import stored_response
from pensieve_jax.server.openai.responses.retries import IdempotencyStore
from pensieve_jax.server.openai.responses.schemas import CountTokens, check_context
from pensieve_jax.server.turns.checks import check_model, context_token_limit


class Responses:
    """The handlers of one server, and their shared state. Used by the event loop's thread only.

    Attributes:
      background: the background responses; the application must enter its `lifespan`.
      locks: conversations with a running turn, by owner and id.
    """

    def __init__(self, services: Services) -> None:
        """Create empty state, and register its tables for the metrics."""
        self._services = services
        self.locks: set[tuple[str, str]] = set()
        self.background = BackgroundResponses(services, self.locks)
        self._streams = ResponseStreams(services)
        self._idempotency = IdempotencyStore(services.history, services.now_s(), self.background.current)
        self._creation = ResponseCreation(
            services, self.background, self._idempotency, self._streams, self.locks
        )
        services.keys.on_change(lambda: self._idempotency.cancel_unless(services.keys.has_owner))
        services.tables |= {
            "locked_conversations": lambda: len(self.locks),
            "background_responses": lambda: self.background.num_running,
            "requests_with_keys": lambda: self._idempotency.num_running,
            "responses_undelivered": lambda: self._idempotency.num_undelivered,
        }

    @property
    def routes(self) -> list[Route]:
        one = "/v1/responses/{response_id}"
        return [
            Route("POST", "/v1/responses", self._creation.create, takes_key=True),
            Route("POST", "/v1/responses/input_tokens", self.count_tokens),
            Route("POST", "/v1/responses/compact", compact, has_body=False),
            Route("GET", one, self.retrieve),
            Route("DELETE", one, self.delete),
            Route("GET", f"{one}/input_items", self.input_items),
            Route("POST", f"{one}/cancel", self.cancel, has_body=False),
        ]

    async def retrieve(self, call: HttpRequest) -> HttpResponse:
        """Answer with a response, or with `stream=true` with its events after `starting_after`."""
        response_id = call.path["response_id"]
        starting_after = _starting_after(call.query.get("starting_after"))
        streams = call.query.get("stream", "false").lower() == "true"
        if not streams and call.query.get("starting_after") is not None:
            raise invalid_value("starting_after", "starting_after needs stream=true.")
        call.charge_stream(streams)
        run = self.background.find(call.owner, response_id)
        if run is None or run.head is None or run.has_ended:
            history = call.services.history
            record: ResponseRecord = await self.background.current(
                call.owner, history.response, call.owner, response_id
            )
            run = self.background.run_queued(record)
        if run is not None and run.head is not None and not run.has_ended:
            if streams:
                return self._streams.reply(self._streams.run(run, run.head, starting_after))
            return json_reply(run.head.object("in_progress" if run.is_started else "queued"))
        if streams:
            return self._streams.reply(await self._streams.stored(record, starting_after))
        return json_reply(stored_response(record, call.services.token_texts))

    async def delete(self, call: HttpRequest) -> HttpResponse:
        """Delete a response; cancel it first if it runs."""
        services, response_id = call.services, call.path["response_id"]
        record: ResponseRecord = await call.read(services.history.response, call.owner, response_id)
        if record.status == "queued":
            await self.background.cancel(call.owner, response_id)
        await services.engine.apply(DeleteResponse(owner=call.owner, response_id=response_id))
        if record.turn_id is not None:
            services.resolver.index.forget(call.owner, record.turn_id)
        return json_reply({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, call: HttpRequest) -> HttpResponse:
        """Answer with the input items of a response's request."""
        return await page_of_items(call, call.services.history.input_items, call.path["response_id"])

    async def cancel(self, call: HttpRequest) -> HttpResponse:
        """Cancel a background response; if it has ended, answer with it unchanged."""
        response_id = call.path["response_id"]
        record: ResponseRecord = await call.read(call.services.history.response, call.owner, response_id)
        if not record.background:
            sentence = (
                f"Response {response_id!r} does not run in the background; close its connection to cancel it."
            )
            raise invalid_value("response_id", sentence)
        return json_reply(await self.background.cancel(call.owner, response_id))

    async def count_tokens(self, call: HttpRequest) -> HttpResponse:
        """Answer with the number of tokens of a context."""
        body = await call.decode(CountTokens)
        check_context(body)
        check_model(call.services, body.model)
        services, owner = call.services, call.owner
        estimate = reading(services, owner, body, len(call.body))
        context = await services.run_cpu(
            owner,
            estimate,
            request_context,
            services,
            owner,
            body,
            durable=True,
            token_limit=context_token_limit(services),
        )
        call.notes.ignored_fields += context.ignored_fields
        with renamed_fields(ENGINE_FIELDS):
            resolved = await services.run_cpu(owner, context.estimate, context.find, Memory.ALL)
        return json_reply({"object": "response.input_tokens", "input_tokens": resolved.num_context_tokens})


async def compact(call: HttpRequest) -> HttpResponse:
    """Refuse a route of OpenAI's that the path of a response would match, but for its method."""
    raise ApiError(404, "unknown_url", "The route POST /v1/responses/compact does not exist.")


def _starting_after(given: str | None) -> int:
    if given is None:
        return -1
    if not (given.isascii() and given.isdecimal() and len(given) < 10):
        limit = "an integer from 0 to 999999999"
        raise invalid_value("starting_after", f"starting_after is {given[:20]!r}, but must be {limit}.")
    return int(given)
