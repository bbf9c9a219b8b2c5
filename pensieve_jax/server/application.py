"""The application of a server: everything that stands before its engine, put together.

Owns: which parts there are, and how they are made of an engine and settings.
Does not know: sockets, processes or signals but SIGHUP, which reads the keys again.
Called by: `pensieve serve`; programs that put the application into a server of their own.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

from starlette.types import ASGIApp

from pensieve_jax.core.clock import WallClock
from pensieve_jax.core.errors import ChatTemplateError, ConfigError
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
from pensieve_jax.server.logs import log_event
from pensieve_jax.server.metrics import Metrics
from pensieve_jax.server.token_texts import TokenTexts
from pensieve_jax.text import ChatFormat, Tokenizer


def make_application(engine: EngineService, *, settings: ServerSettings) -> ASGIApp:
    """The ASGI application of an engine that is ready.

    Raises ConfigError for keys or a model's defaults that cannot be read, and HistoryError.
    """
    info = engine.info
    reader = HistoryReader(info.history, fingerprint=info.fingerprint)
    services = make_services(engine, settings, reader)
    responses = Responses(services)

    @asynccontextmanager
    async def open_history() -> AsyncIterator[None]:
        with closing(reader):
            yield

    @asynccontextmanager
    async def keys_on_signal() -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        if services.keys.are_asked_for:
            loop.add_signal_handler(signal.SIGHUP, read_keys_again, services.keys)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    routes = (*ROUTES, *responses.routes, *Conversations(responses.locks).routes)
    return make_app(services, routes, [open_history, keys_on_signal, responses.background.lifespan])


def make_services(engine: EngineService, settings: ServerSettings, history: HistoryReader) -> Services:
    """The parts, of an engine that is ready and its open history; raises ConfigError."""
    info = engine.info
    tokenizer = source_tokenizer(info.source, info.limits.vocab_size)
    clock = WallClock()
    metrics = Metrics(settings.served_model_name or info.model_name)
    metrics.engine.chunk_bytes = _chunk_bytes(info.description)
    return Services(
        engine=engine,
        settings=settings,
        keys=ApiKeys(settings.api_keys_file),
        limits=Limits(engine, settings, clock.now),
        metrics=metrics,
        tokenizer=tokenizer,
        chat_format=_chat_format(tokenizer),
        defaults=model_defaults(info.source),
        resolver=Resolver(tokenizer, info.fingerprint, TurnIndex(HistoryTurns(history))),
        token_texts=TokenTexts(tokenizer),
        history=history,
        now_s=clock.now,
        started_at=int(clock.now()),
    )


def read_keys_again(keys: ApiKeys) -> None:
    """After the file was changed; one that cannot be read leaves the old keys, and the log says so."""
    try:
        num_keys = keys.reload()
    except ConfigError as error:  # its words name the file and a line's number, and hold no key
        log_event("the keys stay as they were", problem=str(error))
    else:
        log_event("the keys were read again", num_keys=num_keys)


def _chat_format(tokenizer: Tokenizer | None) -> ChatFormat | None:
    """None where messages cannot be written for this model."""
    if tokenizer is None or tokenizer.chat_template is None:
        return None
    try:
        return ChatFormat(tokenizer)
    except ChatTemplateError as error:
        raise ConfigError("chat_template", "unreadable", f"a template ({error})") from error


def _chunk_bytes(description: dict[str, Any]) -> int:
    """Of one chunk on all devices."""
    cache, device = description.get("cache", {}), description.get("device", {})
    return int(cache.get("page_bytes", 0)) * int(device.get("count", 1))
