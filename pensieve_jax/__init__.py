"""Stateful multi-turn LLM serving in JAX: the KV state of a conversation outlives its requests."""

from typing import TYPE_CHECKING

from model_defs.errors import CheckpointError, ModelError, ShardingError, UnsupportedModelError
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
from pensieve_jax.engine.turn import Turn
from pensieve_jax.llm import LLM
from pensieve_jax.runtime.asynchronous_launches import ask_for_asynchronous_launches
from pensieve_jax.stream import Stream

__version__: str
if not TYPE_CHECKING:  # a type checker would take it for leave to import any name

    def __getattr__(name: str) -> str:
        """`__version__`, which is looked up when somebody asks: importing this need not read any file."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from pensieve_jax.version import find_version

        return find_version()


ask_for_asynchronous_launches()  # whoever imports this may have JAX make its client next

__all__ = [
    "LLM",
    "CacheConfig",
    "ChatTemplateError",
    "CheckpointError",
    "ConfigError",
    "ContextLengthError",
    "ConversationBusyError",
    "Delta",
    "EngineClosedError",
    "EngineConfig",
    "HistoryCorruptError",
    "HistoryError",
    "HistoryLockedError",
    "HistoryMismatchError",
    "InvalidFieldError",
    "InvalidRequestError",
    "ModelError",
    "Output",
    "PensieveError",
    "RunnerConfig",
    "SamplingParams",
    "SchedulerConfig",
    "ShardingError",
    "SharedPrefix",
    "StepFailedError",
    "Stream",
    "TokenLogprob",
    "TokenizerMissingError",
    "Turn",
    "UnknownConversationError",
    "UnsupportedModelError",
    "Usage",
    "__version__",
]
