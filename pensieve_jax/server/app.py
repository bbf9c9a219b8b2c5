"""Builds the ASGI application that serves one engine.

Owns: the list of services and routes, their construction, and the release of their resources.
Does not know: sockets, processes or signals, or what a route does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from pensieve_jax.core.clock import WallClock
from pensieve_jax.core.errors import ChatTemplateError, TokenizerMissingError
from pensieve_jax.core.turn_node import RootFor, new_root
from pensieve_jax.history.reader import HistoryReader
from pensieve_jax.model_source import source_tokenizer
from pensieve_jax.server import cache_view, operations, page, stored_view, tree_view
from pensieve_jax.server.allocator import return_free_memory, return_large_blocks
from pensieve_jax.server.anthropic import messages
from pensieve_jax.server.async_engine import EngineService
from pensieve_jax.server.context.resolver import Resolver
from pensieve_jax.server.context.turn_index import HistoryTurns, TurnIndex
from pensieve_jax.server.history_guard import HistoryGuard
from pensieve_jax.server.http.admission import TurnAdmission
from pensieve_jax.server.http.app import make_app
from pensieve_jax.server.http.keys import ApiKeys
from pensieve_jax.server.http.ledger import Ledger
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.http.text_processes import TextProcesses
from pensieve_jax.server.metrics import Metrics
from pensieve_jax.server.openai import chat, completions
from pensieve_jax.server.openai.responses.conversations import Conversations
from pensieve_jax.server.openai.responses.routes import Responses
from pensieve_jax.server.turns.sampling import model_defaults
from pensieve_jax.text import ChatFormat, ReplyReader, Tokenizer
from pensieve_jax.text.token_texts import TokenTexts

if TYPE_CHECKING:
    from pensieve_jax.server.tracing import Tracing
_log = logging.getLogger(__name__)
MODULES = (chat, completions, messages, operations, cache_view, stored_view, tree_view, page)
ROUTES = tuple(route for module in MODULES for route in module.ROUTES)


def make_application(
    engine: EngineService, settings: ServerSettings, keys: ApiKeys, *, root_for: RootFor = new_root
) -> ASGIApp:
    """Return the ASGI application that serves `engine`.

    Args:
      engine: an engine that is ready and whose history is in a file.
      settings: the HTTP settings.
      keys: the accepted API keys. The caller may reload them while the server runs.
      root_for: names the root of a turn without a parent. With several engines, the root selects the engine.

    Raises ConfigError for a tokenizer or defaults that do not fit the model, and HistoryError.
    """
    info = engine.info
    reader = HistoryReader(info.history, fingerprint=info.fingerprint)
    services = make_services(engine, settings, keys, reader, root_for)
    responses = Responses(services)

    @asynccontextmanager
    async def reading() -> AsyncIterator[None]:
        return_large_blocks()
        if services.texts is not None:
            services.texts.start()
        trimming = asyncio.create_task(return_free_memory())
        with closing(reader):
            try:
                yield
            finally:
                trimming.cancel()
                if services.texts is not None:
                    services.texts.close()
                if services.tracing is not None:  # closing waits for the network
                    await asyncio.to_thread(services.tracing.close)

    routes = (*ROUTES, *responses.routes, *Conversations(services, responses.locks).routes)
    return make_app(services, routes, [reading, responses.background.lifespan])


def make_services(
    engine: EngineService,
    settings: ServerSettings,
    keys: ApiKeys,
    history: HistoryReader,
    root_for: RootFor = new_root,
) -> Services:
    """Return the services of an engine that is ready and of its open history; raises ConfigError."""
    info = engine.info
    tokenizer = source_tokenizer(info.source, info.limits.vocab_size)
    clock = WallClock()
    texts = None
    if tokenizer is not None:
        texts = tokenizer.long_texts = TextProcesses(tokenizer.as_json())
    metrics = Metrics(settings.served_model_name or info.model_name)
    metrics.engine.slot_bytes = info.slot_bytes
    index = TurnIndex(HistoryTurns(history, ReplyReader(tokenizer)), max_bytes=settings.max_index_bytes)
    guard = HistoryGuard(engine, history)
    return Services(
        engine=guard,
        is_history_damaged=lambda: guard.is_damaged,
        settings=settings,
        keys=keys,
        limits=TurnAdmission(engine, settings, time.monotonic),
        ledger=Ledger(settings.resource_budgets(), has_keys=settings.api_keys_file is not None),
        metrics=metrics,
        tokenizer=tokenizer,
        chat_format=_chat_format(tokenizer, settings),
        defaults=model_defaults(info.source, penalties=info.limits.penalties),
        resolver=Resolver(
            tokenizer,
            info.fingerprint,
            index,
            parsers=settings.parsers,
            is_routed=settings.is_routed,
            root_for=root_for,
        ),
        token_texts=TokenTexts(tokenizer),
        history=history,
        now_s=clock.now,
        started_at=int(clock.now()),
        tracing=_tracing(settings, info.model_name),
        texts=texts,
        tables={"turns_remembered": lambda: len(index), "turn_bytes_remembered": lambda: index.num_bytes},
    )


def _tracing(settings: ServerSettings, model_name: str) -> Tracing | None:
    if settings.otel_endpoint is None:
        return None
    from pensieve_jax.server.tracing import Tracing  # needs an optional extra

    return Tracing.to(settings.otel_endpoint, settings.served_model_name or model_name)


def _chat_format(tokenizer: Tokenizer | None, settings: ServerSettings) -> ChatFormat | None:
    """Return None if the model has no usable chat format; requests with messages then get the reason."""
    try:
        return ChatFormat(tokenizer, parsers=settings.parsers)
    except (TokenizerMissingError, ChatTemplateError) as error:
        _log.warning("requests with messages are refused: %s", error)
        return None
