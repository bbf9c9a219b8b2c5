"""What a request says about sampling, to the engine's parameters.

Owns: the fields that Chat Completions and Completions share, and their defaults.
Does not know: prompts, or other schemas' names.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.core.sampling_params import MAX_SEED, SamplingParams
from pensieve_jax.server.api.chat_schemas import SamplingFields

_DEFAULTS = {"temperature": 1.0}


def model_defaults(source: str) -> dict[str, Any]:
    """Sampling as the model's generation_config.json has it, for requests that say nothing.

    Args:
      source: the model's directory; one that is none has no such file.

    A file that says not to sample means temperature 0. Raises ConfigError for a file that is no JSON object.
    """
    path = Path(source) / "generation_config.json"
    if not path.is_file():
        return dict(_DEFAULTS)
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), "unreadable", f"a JSON object ({error})") from error
    found = {name: values[name] for name in ("temperature", "top_p", "top_k") if name in values}
    if values.get("do_sample") is False:
        found.setdefault("temperature", 0.0)
    found = {name: value for name, value in found.items() if value is not None}
    SamplingParams(**found)  # refuses what cannot be, at the start and not with every request
    return _DEFAULTS | found


def choice_params(
    body: SamplingFields, defaults: dict[str, Any], *, max_tokens: int, logprobs: int | None
) -> list[SamplingParams]:
    """Parameters of each choice of a completion; raises InvalidRequestError naming the field."""
    params = sampling_params(
        defaults,
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=body.stop,
        logprobs=logprobs,
        min_tokens=body.min_tokens,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
    )
    if params.seed is None:
        return [params] * body.num_choices
    # With one seed for all, every choice would be the same reply.
    return [replace(params, seed=(params.seed + i) % (MAX_SEED + 1)) for i in range(body.num_choices)]


def sampling_params(
    defaults: dict[str, Any],
    *,
    max_tokens: int,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    stop: str | list[str] | None = None,
    logprobs: int | None = None,
    **others: Any,
) -> SamplingParams:
    """Parameters of a turn; None takes the default. Raises InvalidRequestError naming the field."""
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    chosen = defaults | {name: value for name, value in given.items() if value is not None}
    return SamplingParams(
        max_tokens=max_tokens,
        seed=None if seed is None else seed % (MAX_SEED + 1),  # a negative one, too
        stop=[stop] if isinstance(stop, str) else tuple(stop or ()),
        logprobs=logprobs,
        **{name: value for name, value in others.items() if value is not None},
        **chosen,
    )
