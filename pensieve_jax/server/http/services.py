"""What a server is made of, as handlers get it.

Owns: the list. Does not know: how the parts are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pensieve_jax.server.async_engine import EngineService
from pensieve_jax.server.context.resolver import Resolver
from pensieve_jax.server.http.admission import Limits
from pensieve_jax.server.http.keys import ApiKeys
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.metrics import Metrics
from pensieve_jax.server.workers import CpuTicket, run_cpu, run_io
from pensieve_jax.text import ChatFormat, Tokenizer
from pensieve_jax.text.token_texts import TokenTexts

if TYPE_CHECKING:  # of an extra
    from pensieve_jax.server.tracing import Tracing


@dataclass(slots=True, kw_only=True)
class Services:
    """The parts of one server.

    Attributes:
      engine: runs turns.
      settings: limits and addresses.
      keys: who may ask.
      limits: places for turns.
      metrics: what is counted.
      tokenizer: the model's; None serves token ids only.
      chat_format: the model's chat template; None where it has none.
      defaults: sampling where a request says nothing: `temperature`, `top_p`, `top_k`.
      resolver: finds the turn that a list of messages goes on from; see `server.context`.
      token_texts: of the model's vocabulary.
      history: reads what the history keeps beside turns; None keeps nothing.
      tracing: makes spans of turns; None makes none.
      now_s: seconds since the epoch; `started_at`: when the server began.
      tables: how many rows each table of ids has; whoever has one enters it here.
      map_streams: how many maps of state each owner watches.
    """

    engine: EngineService
    settings: ServerSettings
    keys: ApiKeys
    limits: Limits
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
    tables: dict[str, Callable[[], int]] = field(default_factory=dict)
    map_streams: Counter[str] = field(default_factory=Counter)

    @property
    def is_history_far(self) -> bool:
        """Whether to ask the history is to wait for another machine."""
        return self.history is not None and bool(self.history.is_far)

    async def read[**P, T](self, owner: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` reads of the history for an owner; raises what it raises.

        Of a file that is done at once, and nothing happens meanwhile. What is far is read in a thread, so
        that nobody else waits: what the event loop knew may have changed by then.
        """
        if self.is_history_far:
            return await run_io(owner, work, *args, **kwargs)
        return work(*args, **kwargs)

    async def run_cpu[**P, T](
        self, owner: str, how: CpuTicket, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What `work` returns, wherever it keeps nobody else waiting; raises what it raises."""
        if how.asks_history and self.is_history_far:
            return await run_io(owner, work, *args, **kwargs)
        return await run_cpu(owner, how.is_long, work, *args, **kwargs)

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.settings.served_model_name or self.engine.info.model_name
