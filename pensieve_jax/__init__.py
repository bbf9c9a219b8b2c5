"""Stateful multi-turn LLM serving in JAX: the KV state of a conversation outlives its requests."""

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
from pensieve_jax.engine.explanation import Explanation
from pensieve_jax.llm import LLM
from pensieve_jax.runtime.asynchronous_launches import ask_for_asynchronous_launches
from pensieve_jax.stream import Stream

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
