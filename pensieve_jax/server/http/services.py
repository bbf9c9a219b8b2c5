"""The services of a server, which every handler gets.

Owns: the list of services, and whether a history read runs in a thread.
Does not know: how the services are made. Called by `server.app`, which makes them, and by handlers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pensieve_jax.server.async_engine import EngineService
from pensieve_jax.server.context.resolver import Resolver
from pensieve_jax.server.http.admission import TurnAdmission
from pensieve_jax.server.http.keys import ApiKeys
from pensieve_jax.server.http.ledger import Ledger
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.http.storage import StorageCheck
from pensieve_jax.server.http.text_processes import TextProcesses
from pensieve_jax.server.metrics import Metrics
from pensieve_jax.server.workers import WorkEstimate, run_cpu, run_io
from pensieve_jax.text import ChatFormat, Tokenizer
from pensieve_jax.text.token_texts import TokenTexts

if TYPE_CHECKING:  # needs an optional dependency
    from pensieve_jax.server.tracing import Tracing


class RunningKey(NamedTuple):
    """A request with an idempotency key that runs: the digest of its body, and an event of its end."""

    body_sha256: str
    ended: asyncio.Event


@dataclass(slots=True, kw_only=True)
class Services:
    """The services of one server.

    Attributes:
      engine: runs turns.
      settings: limits and addresses.
      keys: API keys.
      limits: admission control for turns.
      ledger: what requests hold, and how much they may.
      metrics: counters and histograms.
      tokenizer: the model's tokenizer; None serves token ids only.
      chat_format: the model's chat template; None if the model has none.
      defaults: default sampling parameters: `temperature`, `top_p`, `top_k`.
      resolver: finds the turn that a list of messages continues from; see `server.context`.
      token_texts: texts of the tokens in the model's vocabulary.
      history: reader of the history's responses and conversations; None without a history.
      tracing: makes spans of turns; None makes none.
      now_s: clock in seconds since the Unix epoch.
      started_at: when the server started.
      texts: processes for long texts and bodies; None reads them here.
      tables: functions that count the rows of in-memory tables, by name. The owner of a table adds its own.
      running_keys: completions with an idempotency key that run, by owner and key.
      is_history_damaged: whether damage of the history was found since the start.
      storage: checks before a turn whether its key may store more.
    """

    engine: EngineService
    settings: ServerSettings
    keys: ApiKeys
    limits: TurnAdmission
    ledger: Ledger
    metrics: Metrics
    tokenizer: Tokenizer | None
    chat_format: ChatFormat | None
    defaults: dict[str, Any]
    resolver: Resolver
    token_texts: TokenTexts
    history: Any
    now_s: Callable[[], float]
    started_at: int
    tracing: Tracing | None = None
    texts: TextProcesses | None = None
    tables: dict[str, Callable[[], int]] = field(default_factory=dict)
    running_keys: dict[tuple[str, str], RunningKey] = field(default_factory=dict)
    is_history_damaged: Callable[[], bool] = lambda: False
    storage: StorageCheck = field(init=False)

    def __post_init__(self) -> None:
        """Create the check of what keys store."""
        self.storage = StorageCheck(self.history, self.settings.storage_quota, self.read)

    @property
    def is_history_far(self) -> bool:
        """Whether history reads wait for another machine."""
        return self.history is not None and bool(self.history.is_remote)

    async def read[**P, T](self, owner: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work`, which reads the history for an owner; raise what it raises.

        A local file is read at once, without yielding to the event loop. A remote history is read in a
        thread, so that other requests run meanwhile; the caller's state may have changed when this returns.
        """
        if self.is_history_far:
            return await run_io(owner, work, *args, **kwargs)
        return work(*args, **kwargs)

    async def run_cpu[**P, T](
        self, owner: str, estimate: WorkEstimate, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work` without blocking the event loop: at once if it is short, else in a thread.

        Raises what it raises, and ApiError 429 if the owner has too many such jobs, or too much text in them.
        """
        is_remote = estimate.asks_history and self.is_history_far
        if not estimate.is_long and not is_remote:
            return work(*args, **kwargs)
        with self.ledger.ticket(owner) as ticket:
            ticket.charge("jobs", 1)
            ticket.charge("encoded_characters", estimate.num_characters)
            if is_remote:
                return await run_io(owner, work, *args, **kwargs)
            return await run_cpu(owner, True, work, *args, **kwargs)

    @property
    def model_name(self) -> str:
        """The model name in the API."""
        return self.settings.served_model_name or self.engine.info.model_name
