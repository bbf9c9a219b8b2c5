"""What servers that keep no conversations have in common: a client sends them the whole history every turn.

Owns: transcripts, where such a server's tokens came from, models described as Hugging Face does, and the
refusal where a server is not installed.
Does not know: any server.
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


class PeerError(PensieveError):
    """Another server failed, or gave an answer of another length than it was asked for."""


def import_peer(system: str, name: str) -> ModuleType:
    """A module that may not be installed; raises ConfigError."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        limit = f"a system that can run here: {name} cannot be imported"
        raise ConfigError("--system", system, limit, str(error)) from error


class Transcripts:
    """All that was said in every conversation, as its client remembers it."""

    def __init__(self) -> None:
        """Nothing."""
        self._token_ids: dict[str, list[int]] = {}

    def add(self, conversation_id: str, token_ids: Sequence[int]) -> list[int]:
        """Go on with these; returns a copy of the whole."""
        transcript = self._token_ids.setdefault(conversation_id, [])
        transcript += token_ids
        return list(transcript)


def check_length(turn: UserTurn, output_ids: list[int]) -> None:
    """Raise PeerError unless the answer is as long as it must be."""
    if len(output_ids) != turn.output_tokens:
        what = f"turn {turn.turn_index} of {turn.conversation_id!r}"
        raise PeerError(f"{what} was answered with {len(output_ids)} tokens instead of {turn.output_tokens}.")


def usage(turn: UserTurn, num_found: int) -> Usage:
    """The accounting of a server that found the first `num_found` tokens of history and prompt in memory.

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
    """config.json of a preset; raises ConfigError for a shape that config.json has no words for."""
    try:
        return described(config) | {"torch_dtype": dtype}
    except UnsupportedModelError as error:
        limit = f"a preset of a published shape, or a model directory ({error})"
        raise ConfigError("--model", config.architecture, limit) from error
