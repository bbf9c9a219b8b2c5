"""Stateful multi-turn LLM serving in JAX: the KV cache of a conversation outlives its requests.

JAX and Flax take a second or two to import, and other modules tenths of one. So every name is imported at its
first use, and programs that only need configurations, errors or a list of commands start fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pensieve_jax.runtime.asynchronous_launches import ask_for_asynchronous_launches

if TYPE_CHECKING:
    from model_defs.errors import CheckpointError, ModelError, ShardingError, UnsupportedModelError
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
        "CacheConfig": "pensieve_jax.config",
        "ChatTemplateError": "pensieve_jax.core.errors",
        "CheckpointError": "model_defs.errors",
        "ClockAheadError": "pensieve_jax.core.errors",
        "ConfigError": "pensieve_jax.core.errors",
        "ContextLengthError": "pensieve_jax.core.errors",
        "ConversationBusyError": "pensieve_jax.core.errors",
        "ConversationChangedError": "pensieve_jax.core.errors",
        "ConversationInfo": "pensieve_jax.history",
        "ConversationRecord": "pensieve_jax.history",
        "Delta": "pensieve_jax.core.outputs",
        "EngineClosedError": "pensieve_jax.core.errors",
        "EngineConfig": "pensieve_jax.config",
        "EngineDiedError": "pensieve_jax.core.errors",
        "Explanation": "pensieve_jax.engine.explanation",
        "GrammarFailedError": "pensieve_jax.core.errors",
        "GrammarQueueFullError": "pensieve_jax.core.errors",
        "GrammarTooComplexError": "pensieve_jax.core.errors",
        "HistoryBusyError": "pensieve_jax.core.errors",
        "HistoryCorruptError": "pensieve_jax.core.errors",
        "HistoryDeniedError": "pensieve_jax.core.errors",
        "HistoryError": "pensieve_jax.core.errors",
        "HistoryLockedError": "pensieve_jax.core.errors",
        "HistoryMismatchError": "pensieve_jax.core.errors",
        "HistoryMissingError": "pensieve_jax.core.errors",
        "HistoryUnavailableError": "pensieve_jax.core.errors",
        "InvalidFieldError": "pensieve_jax.core.errors",
        "InvalidRequestError": "pensieve_jax.core.errors",
        "LLM": "pensieve_jax.llm",
        "LogitsError": "pensieve_jax.core.errors",
        "ModelError": "model_defs.errors",
        "Output": "pensieve_jax.core.outputs",
        "PensieveError": "pensieve_jax.core.errors",
        "PromptLogprob": "pensieve_jax.core.prompt_logprobs",
        "RunnerConfig": "pensieve_jax.config",
        "SamplingParams": "pensieve_jax.core.sampling_params",
        "SchedulerConfig": "pensieve_jax.config",
        "ShardingError": "model_defs.errors",
        "SharedPrefix": "pensieve_jax.core.prefix",
        "StepFailedError": "pensieve_jax.core.errors",
        "StorageQuotaError": "pensieve_jax.core.errors",
        "Stream": "pensieve_jax.stream",
        "StructuredOutput": "pensieve_jax.core.structured",
        "TokenLogprob": "pensieve_jax.core.outputs",
        "TokenizerMissingError": "pensieve_jax.core.errors",
        "Turn": "pensieve_jax.engine.turn",
        "TurnRecord": "pensieve_jax.history",
        "UnknownConversationError": "pensieve_jax.core.errors",
        "UnknownRecordError": "pensieve_jax.core.errors",
        "UnknownTurnError": "pensieve_jax.core.errors",
        "UnsupportedGrammarError": "pensieve_jax.core.errors",
        "UnsupportedModelError": "model_defs.errors",
        "Usage": "pensieve_jax.core.outputs",
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
