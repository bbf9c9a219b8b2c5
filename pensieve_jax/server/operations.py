"""The operational HTTP endpoints: health, readiness, metrics, models, and tokenization.

Owns: when a server is healthy and when it is ready; the description of the model; the request and response
bodies of /tokenize and /detokenize, in vLLM's format.
Does not know: what is counted, models, or turns. It formats messages as those of a new conversation.

Healthy means that a restart would not help. Ready means that the server accepts turns. While the engine
starts or restarts, the server is healthy but not ready. A server with a full queue stays ready: if a load
balancer removed it, its conversations would move to servers that lack their KV cache, and those would fill
up too. The excess turns get a Retry-After header instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, Final

from pensieve_jax.core.errors import (
    ChatTemplateError,
    PensieveError,
    TokenizerMissingError,
)
from pensieve_jax.decoding.turn_spec import check_token_ids
from pensieve_jax.model_source import included_purpose
from pensieve_jax.server.anthropic.models import VERSION_HEADER, model_info, model_page
from pensieve_jax.server.http.app import Route
from pensieve_jax.server.http.bodies import Body
from pensieve_jax.server.http.errors import ApiError, history_damaged, invalid_value, overloaded, unsupported
from pensieve_jax.server.http.replies import BytesResponse, HttpResponse, json_reply
from pensieve_jax.server.http.request import HttpRequest
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.metrics import CONTENT_TYPE
from pensieve_jax.server.openai.schemas import ChatMessage, rendering
from pensieve_jax.server.turns.checks import check_model, context_token_limit, template_error
from pensieve_jax.server.turns.sampling import TEMPLATE_FIELDS, UNSUPPORTED_TEMPLATE
from pensieve_jax.server.turns.template import FunctionTool
from pensieve_jax.server.workers import WorkEstimate
from pensieve_jax.text import ChatFormat
from pensieve_jax.text.messages import check_results
from pensieve_jax.version import __version__

MAX_SILENCE_S: Final = 10.0
"""An engine that is silent for this long counts as unhealthy; it sends a message every second."""
_ANSWER_TIMEOUT_S: Final = 2.0


async def health(call: HttpRequest) -> HttpResponse:
    """Reply 200, or 503 if the engine has stopped for good or is silent."""
    engine = call.services.engine
    if engine.state == "dead":
        raise overloaded("The engine has stopped.", 1)
    if engine.state == "ready" and engine.last_heard_s > MAX_SILENCE_S:
        raise overloaded(f"The engine has been silent for {engine.last_heard_s:.0f} s.", 1)
    return json_reply({"status": "ok", "engine": engine.state})


async def ready(call: HttpRequest) -> HttpResponse:
    """Reply 200 if turns are accepted and stored, immediately or after queueing, else 503."""
    call.services.limits.check_ready()
    if call.services.is_history_damaged():
        raise history_damaged()
    return await health(call)


async def version(call: HttpRequest) -> HttpResponse:
    """Reply with the version of this package."""
    return json_reply({"version": __version__})


async def metrics(call: HttpRequest) -> HttpResponse:
    """Reply with all metrics in Prometheus format; with keys, to an operator only."""
    services = call.services
    if not call.is_operator:
        sentence = "The metrics are about all owners; send an operator's key."
        raise ApiError(403, "operator_key_required", sentence)
    report = services.metrics.engine
    report.stats = services.engine.last_stats
    # Only a hanging engine misses this timeout; its previous answers are then still usable.
    with suppress(TimeoutError, PensieveError):
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            report.census = await services.engine.call("census")
            report.distributions = await services.engine.call("distributions")
            if services.history is not None:
                services.metrics.stored(*await services.read(call.owner, services.history.stored_by_all))
    return BytesResponse(
        services.metrics.render(services.limits.num_waiting, services.ledger.usage()), CONTENT_TYPE
    )


async def list_models(call: HttpRequest) -> HttpResponse:
    """Reply with a list of the one model that is served, in the form of the client's API."""
    if VERSION_HEADER in call.headers:
        return json_reply(model_page(call.services))
    return json_reply({"object": "list", "data": [_card(call.services)]})


async def get_model(call: HttpRequest) -> HttpResponse:
    """Reply with the model of this name, or 404."""
    check_model(call.services, call.path["model"])
    if VERSION_HEADER in call.headers:
        return json_reply(model_info(call.services))
    return json_reply(_card(call.services))


def _card(services: Services) -> dict[str, Any]:
    purpose = included_purpose(services.engine.info.source)
    return {
        "id": services.model_name,
        "object": "model",
        "created": services.started_at,
        "owned_by": "pensieve",
        "root": services.model_name,  # not the local path, which clients must not see
        "parent": None,
        "max_model_len": services.engine.info.limits.max_context_tokens,
        **({} if purpose is None else {"description": purpose}),
    }


class TokenizeBody(Body, kw_only=True):
    """Request body of `POST /tokenize`: a text, or messages that the chat template formats."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **UNSUPPORTED_TEMPLATE,
        "reasoning_effort": TEMPLATE_FIELDS["reasoning_effort"],
    }
    OPTIONAL_OFFERS: ClassVar[Mapping[str, tuple[str | None, ...]]] = {"tools": ("function",)}

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[FunctionTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Request body of `POST /detokenize`: token ids."""

    tokens: list[int]
    model: str | None = None


async def tokenize(call: HttpRequest) -> HttpResponse:
    """Reply with the token ids of a text, or of messages with a generation prompt."""
    body = await call.decode(TokenizeBody)
    services = call.services
    check_model(services, body.model)
    estimate = WorkEstimate.of(len(call.body), len(body.messages or ()))
    return json_reply(await services.run_cpu(call.owner, estimate, _tokenized, services, body))


async def detokenize(call: HttpRequest) -> HttpResponse:
    """Reply with the text of token ids, including special tokens."""
    body = await call.decode(DetokenizeBody)
    services = call.services
    check_model(services, body.model)
    return json_reply({"prompt": await call.run_cpu(_text, services, body.tokens)})


def _tokenized(services: Services, body: TokenizeBody) -> dict[str, Any]:
    token_ids = _token_ids(services, body)
    texts = (
        [services.token_texts.text(token_id) for token_id in token_ids] if body.return_token_strs else None
    )
    return {
        "count": len(token_ids),
        "max_model_len": services.engine.info.limits.max_context_tokens,
        "tokens": token_ids,
        "token_strs": texts,
    }


def _text(services: Services, token_ids: list[int]) -> str:
    if services.tokenizer is None:
        raise TokenizerMissingError
    most = services.engine.info.limits.max_context_tokens
    if len(token_ids) > most:
        sentence = f"tokens has {len(token_ids)} ids, but must have at most {most}, as a context has."
        raise invalid_value("tokens", sentence)
    if token_ids:
        check_token_ids("tokens", token_ids, services.engine.info.limits.vocab_size)
    return services.tokenizer.decode_raw(token_ids)


def _token_ids(services: Services, body: TokenizeBody) -> list[int]:
    if services.tokenizer is None:
        raise TokenizerMissingError
    token_limit = context_token_limit(services)  # a text that no turn could have is not read to its end
    if (body.prompt is None) == (body.messages is None):
        raise invalid_value("prompt", "Either prompt or messages must be given.")
    if body.messages is not None:
        if body.add_special_tokens:
            raise unsupported("add_special_tokens", "the chat template writes the special tokens of messages")
        chat_format = services.chat_format or ChatFormat(services.tokenizer)  # raises the missing part
        messages, template_input = rendering(body, body.messages, chat_format)
        check_results(messages)
        try:
            return chat_format.token_ids(
                services.resolver.with_known_roles(messages),
                template_input=template_input,
                token_limit=token_limit,
            )
        except ChatTemplateError as error:
            raise template_error(error, messages, "messages") from error
    assert body.prompt is not None
    return services.tokenizer.encode(
        body.prompt, add_bos=body.add_special_tokens is not False, token_limit=token_limit
    )


ROUTES: Final = (
    Route("GET", "/v1/models", list_models),
    Route("GET", "/v1/models/{model:path}", get_model),
    Route("POST", "/tokenize", tokenize),
    Route("POST", "/detokenize", detokenize),
    Route("GET", "/health", health, needs_key=False),
    Route("GET", "/ready", ready, needs_key=False),
    Route("GET", "/version", version),
    Route("GET", "/metrics", metrics),
)
