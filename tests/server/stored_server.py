"""Every route of a server in this process, over a stored engine and its history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.history.reader import HistoryReader
from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.history_guard import HistoryGuard
from pensieve_jax.server.http.app import make_app
from pensieve_jax.server.openai.responses.conversations import Conversations
from pensieve_jax.server.openai.responses.routes import Responses
from pensieve_jax.text import Tokenizer
from pensieve_jax.text.loading import byte_tokenizer
from tests.server.fakes import FakeTurn, Harness
from tests.server.stored_engine import FINGERPRINT, StoredEngine, resolving

START_S = 1_790_000_000.0


class StoredServer:
    """Server in this process; its creator closes it.

    Attributes:
        clock, engine, reader, harness, responses, routes: its parts.
    """

    def __init__(
        self,
        path: Path,
        script: Callable[[FakeTurn], None] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        **parts: Any,
    ) -> None:
        """Create it, with the byte tokenizer unless another is given; `parts` go to the harness."""
        tokenizer = tokenizer or byte_tokenizer()
        self.clock = VirtualClock(START_S)
        self.engine = StoredEngine(path, self.clock, script)
        self.reader = HistoryReader(path, fingerprint=FINGERPRINT)
        resolver = resolving(tokenizer, self.reader)
        self.harness = Harness(
            [], self.engine, tokenizer=tokenizer, history=self.reader, resolver=resolver, **parts
        )
        guard = HistoryGuard(self.engine, self.reader)
        self.harness.services.engine = guard
        self.harness.services.is_history_damaged = lambda: guard.is_damaged
        self.harness.services.now_s = self.clock.now
        self.responses = Responses(self.harness.services)
        self.routes = [
            *ROUTES,
            *self.responses.routes,
            *Conversations(self.harness.services, self.responses.locks).routes,
        ]
        self.harness.app = make_app(self.harness.services, self.routes)

    def close(self) -> None:
        """Close the history of the server."""
        self.reader.close()
        self.engine.store.close()
