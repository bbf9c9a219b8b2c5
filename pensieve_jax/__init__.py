"""Stateful multi-turn LLM serving in JAX: the KV state of a conversation outlives its requests.

JAX and Flax take a second or two to import. They come with `LLM` and `Stream`, when one of these is first
asked for: whoever only wants configurations, errors or a list of commands does not wait for them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pensieve_jax.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.core.errors import (
    ChatTemplateError,
    ConfigError,
    ContextLengthError,
    ConversationBusyError,
    EngineClosedError,
    HistoryCorruptError,
    HistoryError,
    HistoryLockedError,
    HistoryMismatchError,
    InvalidFieldError,
    InvalidRequestError,
    PensieveError,
    StepFailedError,
    TokenizerMissingError,
    UnknownConversationError,
)
from pensieve_jax.core.outputs import Delta, Output, TokenLogprob, Usage
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.runtime.asynchronous_launches import ask_for_asynchronous_launches

if TYPE_CHECKING:
    from pensieve_jax.engine.explanation import Explanation
    from pensieve_jax.llm import LLM
    from pensieve_jax.stream import Stream
else:
    _LATER = {
        "Explanation": "pensieve_jax.engine.explanation",
        "LLM": "pensieve_jax.llm",
        "Stream": "pensieve_jax.stream",
    }

    def __getattr__(name: str) -> Any:
        """What is imported when it is first asked for."""
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
        return found


ask_for_asynchronous_launches()  # whoever imports this may have JAX make its client next

__all__ = [
    "LLM",
    "CacheConfig",
    "ChatTemplateError",
    "ConfigError",
    "ContextLengthError",
    "ConversationBusyError",
    "Delta",
    "EngineClosedError",
    "EngineConfig",
    "Explanation",
    "HistoryCorruptError",
    "HistoryError",
    "HistoryLockedError",
    "HistoryMismatchError",
    "InvalidFieldError",
    "InvalidRequestError",
    "Output",
    "PensieveError",
    "RunnerConfig",
    "SamplingParams",
    "SchedulerConfig",
    "SharedPrefix",
    "StepFailedError",
    "Stream",
    "TokenLogprob",
    "TokenizerMissingError",
    "UnknownConversationError",
    "Usage",
]
