"""Log-probabilities of prompts in the forms of the wire.

Owns: vLLM's form of `prompt_logprobs`, and which of them a request asks the engine for.
Does not know: how a prompt is scored, or the columns of Completions (`openai.completions`).
Called by the handlers of Chat Completions and Completions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from pensieve_jax.core.prompt_logprobs import PromptLogprob
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.server.http.errors import unsupported
from pensieve_jax.server.http.long_json import EncodedList
from pensieve_jax.text.token_texts import TokenTexts


def check_not_streamed(field: str, number: int | None, stream: bool | None) -> None:
    """Raise ApiError for a stream of a request whose prompt is scored, as `number` is not None."""
    if number is not None and stream:
        raise unsupported(field, "a stream has no log-probabilities of the prompt, so send stream: false")


def scored_by_the_first(params: Sequence[SamplingParams], number: int | None) -> list[SamplingParams]:
    """Return the parameters of a prompt's choices; the first one scores the prompt for all of them.

    `params` must not score the prompt; with None for `number`, the first one does not either.
    """
    if number is None:
        return list(params)
    return [replace(one, prompt_logprobs=None if i else number) for i, one in enumerate(params)]


def prompt_logprobs_field(
    entries: Iterable[PromptLogprob | None], num_top: int, texts: TokenTexts
) -> EncodedList:
    """Return vLLM's `prompt_logprobs`: for each token None, or the entries of it and the likely ids by id."""
    return EncodedList(None if entry is None else _by_id(entry, num_top, texts) for entry in entries)


def _by_id(entry: PromptLogprob, num_top: int, texts: TokenTexts) -> dict[str, Any]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top.items(), 1)]
    return {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": texts.text(token_id)}
        for token_id, logprob, rank in [(entry.token_id, entry.logprob, entry.rank), *ranked[:num_top]]
    }
