"""Common parts of servers that store no conversations: their client sends the whole history every turn.

Owns: transcripts, the usage accounting of such servers, models described as Hugging Face configurations, and
the error if a server is not installed.
Does not know: any particular server.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from model_defs import ModelConfig, UnsupportedModelError
from model_defs.hf_config import hf_config as described
from pensieve_jax import ConfigError, PensieveError, Usage
from pensieve_lab.workload import UserTurn


class BaselineError(PensieveError):
    """Another server failed, or its answer has the wrong length."""


def import_baseline(system: str, name: str) -> ModuleType:
    """Import a module that may not be installed; raises ConfigError."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        limit = f"a system that can run here: {name} cannot be imported"
        raise ConfigError("--system", system, limit, str(error)) from error


class Transcripts:
    """Token ids of every conversation, as its client remembers them."""

    def __init__(self) -> None:
        self._token_ids: dict[str, list[int]] = {}

    def add(self, conversation_id: str, token_ids: Sequence[int]) -> list[int]:
        """Append ids to a conversation; return a copy of the whole transcript."""
        transcript = self._token_ids.setdefault(conversation_id, [])
        transcript += token_ids
        return list(transcript)


def check_length(turn: UserTurn, output_ids: list[int]) -> None:
    """Raise BaselineError unless the answer has the requested length."""
    if len(output_ids) != turn.output_tokens:
        what = f"turn {turn.turn_index} of {turn.conversation_id!r}"
        raise BaselineError(f"{what} has {len(output_ids)} output tokens; it must have {turn.output_tokens}.")


def usage(turn: UserTurn, num_found: int) -> Usage:
    """Return the usage of a server that had the first `num_found` tokens of history and prompt in memory.

    The last token of the history was never computed, as in our own engine's accounting.
    """
    num_computed = max(turn.num_history_tokens - 1, 0)
    num_reused = min(num_found, num_computed)
    return Usage(
        prompt_tokens=turn.prompt_tokens,
        reused_gpu_tokens=num_reused,
        swapped_in_tokens=0,
        recomputed_tokens=num_computed - num_reused,
        prefilled_tokens=turn.num_history_tokens + turn.prompt_tokens - num_computed,
        output_tokens=turn.output_tokens,
    )


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return config.json of a preset; raises ConfigError for a shape that config.json cannot describe."""
    try:
        return described(config) | {"torch_dtype": dtype}
    except UnsupportedModelError as error:
        limit = f"a preset of a published shape, or a model directory ({error})"
        raise ConfigError("--model", config.architecture, limit) from error
