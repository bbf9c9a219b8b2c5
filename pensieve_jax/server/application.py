"""From an engine that is ready to the application in front of it: the parts of a server, put together.

Owns: what each part is made of, and giving back what it holds.
Does not know: what requests there are, or how the engine runs.
Called by: `pensieve serve`; tests of a whole server.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from starlette.types import ASGIApp

from pensieve_jax.core.errors import ChatTemplateError, TokenizerMissingError
from pensieve_jax.history.reader import HistoryReader
from pensieve_jax.model_source import source_tokenizer
from pensieve_jax.server.api.conversations import Conversations
from pensieve_jax.server.api.responses import Responses
from pensieve_jax.server.api.routes import ROUTES
from pensieve_jax.server.api.sampling import model_defaults
from pensieve_jax.server.async_engine import EngineService
from pensieve_jax.server.context.history_turns import HistoryTurns
from pensieve_jax.server.context.resolver import Resolver
from pensieve_jax.server.context.turn_index import TurnIndex
from pensieve_jax.server.http.app import make_app
from pensieve_jax.server.http.keys import ApiKeys
from pensieve_jax.server.http.limits import Limits
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.metrics import Metrics
from pensieve_jax.server.token_texts import TokenTexts
from pensieve_jax.text import ChatFormat, Tokenizer


def make_application(engine: EngineService, settings: ServerSettings, keys: ApiKeys) -> ASGIApp:
    """The ASGI application of a server.

    Args:
      engine: ready, with its history in a file.
      settings: of HTTP.
      keys: who may ask; whoever gives them may have them read again.

    Raises ConfigError for a tokenizer that does not fit the model, and HistoryError.
    """
    info = engine.info
    tokenizer = source_tokenizer(info.source, info.limits.vocab_size)
    reader = HistoryReader(info.history, fingerprint=info.fingerprint)
    services = Services(
        engine=engine,
        settings=settings,
        keys=keys,
        limits=Limits(engine, settings, time.monotonic),
        metrics=Metrics(settings.served_model_name or info.model_name),
        tokenizer=tokenizer,
        chat_format=_chat_format(tokenizer),
        defaults=model_defaults(info.source),
        resolver=Resolver(tokenizer, info.fingerprint, TurnIndex(HistoryTurns(reader))),
        token_texts=TokenTexts(tokenizer),
        history=reader,
        now_s=time.time,
        started_at=int(time.time()),
    )

    @contextlib.asynccontextmanager
    async def reading() -> AsyncIterator[None]:
        try:
            yield
        finally:
            reader.close()

    responses = Responses(services)
    routes = [*ROUTES, *responses.routes, *Conversations(responses.locks).routes]
    return make_app(services, routes, [reading, responses.background.lifespan])


def _chat_format(tokenizer: Tokenizer | None) -> ChatFormat | None:
    try:
        return ChatFormat(tokenizer)
    except (TokenizerMissingError, ChatTemplateError):
        return None
