"""Dynamic re-batching: a padded batch that queries join and leave while it runs (Baton).

It needs matrix products, a masked softmax and slice updates, but no page tables and no kernel to decode. JAX
comes with `PaddedLLM`, when it is first asked for: policy and simulation do without.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.query import Query

if TYPE_CHECKING:
    from pensieve_jax.rebatching.engine import RebatchingEngine
    from pensieve_jax.rebatching.llm import PaddedLLM
else:  # a type checker would take a `__getattr__` for leave to import any name
    _LATE = {"PaddedLLM": "llm", "RebatchingEngine": "engine"}

    def __getattr__(name: str) -> Any:
        """What is imported when it is first asked for."""
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"pensieve_jax.rebatching.{_LATE[name]}")
        found = globals()[name] = getattr(module, name)
        return found


__all__ = ["PaddedLLM", "Query", "RebatchingConfig", "RebatchingEngine"]
