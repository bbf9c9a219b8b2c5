"""Stateful multi-turn LLM serving in JAX: the KV cache of a conversation outlives its requests.

JAX and Flax take a second or two to import. So `LLM` and the names that need it are imported at their first
use, and programs that only need configurations, errors or a list of commands start fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pensieve_jax.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.core.errors import (
    ChatTemplateError,
    ClockAheadError,
    ConfigError,
    ContextLengthError,
    ConversationBusyError,
    ConversationChangedError,
    EngineClosedError,
    EngineDiedError,
    GrammarFailedError,
    GrammarQueueFullError,
    GrammarTooComplexError,
    HistoryBusyError,
    HistoryCorruptError,
    HistoryDeniedError,
    HistoryError,
    HistoryLockedError,
    HistoryMismatchError,
    HistoryMissingError,
    HistoryUnavailableError,
    InvalidFieldError,
    InvalidRequestError,
    LogitsError,
    PensieveError,
    StepFailedError,
    StorageQuotaError,
    TokenizerMissingError,
    UnknownConversationError,
    UnknownRecordError,
    UnknownTurnError,
    UnsupportedGrammarError,
)
from pensieve_jax.core.outputs import Delta, Output, TokenLogprob, Usage
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.core.prompt_logprobs import PromptLogprob
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.runtime.asynchronous_launches import ask_for_asynchronous_launches

if TYPE_CHECKING:
    from model_defs.errors import CheckpointError, ModelError, ShardingError, UnsupportedModelError
    from pensieve_jax.engine.explanation import Explanation
    from pensieve_jax.engine.turn import Turn
    from pensieve_jax.history import ConversationInfo, ConversationRecord, TurnRecord
    from pensieve_jax.llm import LLM
    from pensieve_jax.server.engine_process.async_llm import AsyncEngine
    from pensieve_jax.stream import Stream

    __version__: str
else:  # hidden from type checkers: with a `__getattr__` they would accept the import of any name
    _LATER = {
        "AsyncEngine": "pensieve_jax.server.engine_process.async_llm",
        "CheckpointError": "model_defs.errors",
        "ConversationInfo": "pensieve_jax.history",
        "ConversationRecord": "pensieve_jax.history",
        "Explanation": "pensieve_jax.engine.explanation",
        "LLM": "pensieve_jax.llm",
        "ModelError": "model_defs.errors",
        "ShardingError": "model_defs.errors",
        "Stream": "pensieve_jax.stream",
        "Turn": "pensieve_jax.engine.turn",
        "TurnRecord": "pensieve_jax.history",
        "UnsupportedModelError": "model_defs.errors",
        "__version__": "pensieve_jax.version",
    }

    def __getattr__(name: str) -> Any:
        """Import a name of `_LATER` at its first use."""
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(_LATER[name])
        except ModuleNotFoundError as error:
            if error.name != "msgspec":
                raise
            raise ImportError(f'{name} needs an extra: pip install "pensieve-jax[server]"') from error
        found = globals()[name] = getattr(module, name)
        return found


ask_for_asynchronous_launches()  # at import, because the caller may create JAX's client next

__all__ = [
    "LLM",
    "AsyncEngine",
    "CacheConfig",
    "ChatTemplateError",
    "CheckpointError",
    "ClockAheadError",
    "ConfigError",
    "ContextLengthError",
    "ConversationBusyError",
    "ConversationChangedError",
    "ConversationInfo",
    "ConversationRecord",
    "Delta",
    "EngineClosedError",
    "EngineConfig",
    "EngineDiedError",
    "Explanation",
    "GrammarFailedError",
    "GrammarQueueFullError",
    "GrammarTooComplexError",
    "HistoryBusyError",
    "HistoryCorruptError",
    "HistoryDeniedError",
    "HistoryError",
    "HistoryLockedError",
    "HistoryMismatchError",
    "HistoryMissingError",
    "HistoryUnavailableError",
    "InvalidFieldError",
    "InvalidRequestError",
    "LogitsError",
    "ModelError",
    "Output",
    "PensieveError",
    "PromptLogprob",
    "RunnerConfig",
    "SamplingParams",
    "SchedulerConfig",
    "ShardingError",
    "SharedPrefix",
    "StepFailedError",
    "StorageQuotaError",
    "Stream",
    "StructuredOutput",
    "TokenLogprob",
    "TokenizerMissingError",
    "Turn",
    "TurnRecord",
    "UnknownConversationError",
    "UnknownRecordError",
    "UnknownTurnError",
    "UnsupportedGrammarError",
    "UnsupportedModelError",
    "Usage",
    "__version__",
]
