"""Tokens as clients count them, and where they came from.

Owns: the usage objects of answers. Does not know: engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pensieve_jax.core.outputs import Usage


def num_context_tokens(usage: Usage) -> int:
    """History and prompt."""
    return num_cached_tokens(usage) + usage.recomputed_tokens + usage.prefilled_tokens


def num_cached_tokens(usage: Usage) -> int:
    """Of them, those whose state was found, in any tier."""
    return usage.reused_gpu_tokens + usage.swapped_in_tokens


def token_sources(usages: Sequence[Usage]) -> dict[str, int]:
    """`usage.pensieve`: of the contexts of these turns, what was new and where the rest came from.

    gpu + cpu + recomputed + prefilled are all tokens of the contexts.
    """
    return {
        "new_tokens": sum(usage.prompt_tokens for usage in usages),
        "gpu_tokens": sum(usage.reused_gpu_tokens for usage in usages),
        "cpu_tokens": sum(usage.swapped_in_tokens for usage in usages),
        "recomputed_tokens": sum(usage.recomputed_tokens for usage in usages),
        "prefilled_tokens": sum(usage.prefilled_tokens for usage in usages),
    }


def completion_usage(usages: Sequence[Usage], num_shared: int = 1) -> dict[str, Any]:
    """The usage object of Chat Completions and Completions.

    Args:
      usages: of the request's turns.
      num_shared: how many turns in a row are several replies to one prompt, which counts once.
    """
    prompts = usages[::num_shared]
    num_prompt = sum(map(num_context_tokens, prompts))
    num_reply = sum(usage.output_tokens for usage in usages)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_reply,
        "total_tokens": num_prompt + num_reply,
        "prompt_tokens_details": {"cached_tokens": sum(map(num_cached_tokens, prompts))},
        "pensieve": token_sources(usages),
    }
