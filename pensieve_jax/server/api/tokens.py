"""POST /tokenize and POST /detokenize, in vLLM's shapes.

Owns: both bodies and answers.
Does not know: turns: messages are written as those of a new conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pensieve_jax.core.errors import ChatTemplateError, InvalidRequestError, TokenizerMissingError
from pensieve_jax.engine.validation import check_token_ids
from pensieve_jax.server.http.bodies import Body
from pensieve_jax.server.http.errors import invalid_value
from pensieve_jax.server.http.replies import Reply, json_reply
from pensieve_jax.server.http.request import Call
from pensieve_jax.server.http.routes import Route
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.openai.schemas import ChatMessage
from pensieve_jax.server.threads import aside, is_long
from pensieve_jax.server.turns.checks import check_model, unwritable
from pensieve_jax.text import ChatFormat


class TokenizeBody(Body):
    """Text, or messages as a chat template writes them."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "tools": ([],),
    }

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


async def tokenize(call: Call) -> Reply:
    """Ids of a text, or of messages with a generation prompt."""
    body = await call.decode(TokenizeBody)
    services = call.services
    check_model(services, body.model)
    in_thread = is_long(len(call.body), len(body.messages or ()))
    return json_reply(await aside(call.owner, in_thread, _tokenized, services, body))


async def detokenize(call: Call) -> Reply:
    """The text of ids, special ones written out."""
    body = await call.decode(DetokenizeBody)
    services = call.services
    check_model(services, body.model)
    return json_reply({"prompt": await call.aside(_text, services, body.tokens)})


ROUTES = [Route("POST", "/tokenize", tokenize), Route("POST", "/detokenize", detokenize)]


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
    if token_ids:
        check_token_ids("tokens", token_ids, services.engine.info.limits.vocab_size)
    return services.tokenizer.decode_raw(token_ids)


def _token_ids(services: Services, body: TokenizeBody) -> list[int]:
    if services.tokenizer is None:
        raise TokenizerMissingError
    if (body.prompt is None) == (body.messages is None):
        raise invalid_value("prompt", "Either prompt or messages must be given.")
    if body.messages is not None:
        messages = [message.as_message(f"messages[{i}]") for i, message in enumerate(body.messages)]
        chat_format = services.chat_format or ChatFormat(services.tokenizer)  # which raises what is missing
        try:
            return chat_format.turn_token_ids([], services.resolver.with_known_roles(messages))
        except ChatTemplateError as error:
            raise unwritable(error, messages, "messages") from error
    assert body.prompt is not None
    try:
        return services.tokenizer.encode(body.prompt, add_bos=body.add_special_tokens)
    except InvalidRequestError as error:
        raise invalid_value("prompt", str(error)) from error
