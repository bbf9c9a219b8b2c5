"""Dynamic re-batching: a padded batch that queries join and leave while it runs (Baton).

It needs matrix products, a masked softmax and slice updates, but no page tables and no decode kernel. JAX is
imported only when `PaddedLLM` is first used, so that policy and simulation run without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.query import Query

if TYPE_CHECKING:
    from pensieve_jax.rebatching.engine import RebatchingEngine
    from pensieve_jax.rebatching.llm import PaddedLLM
else:  # with `__getattr__` in sight, a type checker would accept any name
    _LATE = {"PaddedLLM": "llm", "RebatchingEngine": "engine"}

    def __getattr__(name: str) -> Any:
        """Import `PaddedLLM` or `RebatchingEngine` on first use."""
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"pensieve_jax.rebatching.{_LATE[name]}")
        found = globals()[name] = getattr(module, name)
        return found


__all__ = ["PaddedLLM", "Query", "RebatchingConfig", "RebatchingEngine"]
