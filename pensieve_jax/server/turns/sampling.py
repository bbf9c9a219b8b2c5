"""Sampling as requests ask for it, and tokens as answers count them.

Owns: the fields that Chat Completions and Completions share, their defaults and their way to the engine's
parameters; the usage objects of answers.
Does not know: prompts, engines, or other schemas' names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.core.outputs import Usage
from pensieve_jax.core.sampling_params import (
    COMPLETIONS,
    MAX_SEED,
    SamplingParams,
    sampling_table,
    taken_fields,
)
from pensieve_jax.server.http.bodies import Body

_DEFAULTS = {"temperature": 1.0}
MAX_CHOICES: Final = 8
type Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
type Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
type Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""As OpenAI has it: clients send -1, too. A negative one is taken modulo 2**63."""


class StreamOptions(Body):
    """What a stream has beside text."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool | None = None


class SamplingFields(Body):
    """What Chat Completions and Completions have in common: among it every sampling field of theirs.

    `top_k`, `min_tokens`, `stop_token_ids` and `ignore_eos` are vLLM's.
    """

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "length_penalty": (1,),
        "logit_bias": ({},),
        "min_p": (0,),
        "use_beam_search": (False,),
        "best_of": (1,),
        "prompt_logprobs": (),
        "response_format": ({"type": "text"},),
        "structured_outputs": ({},),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "logits_processors": ([],),
        "truncate_prompt_tokens": (),
        "service_tier": ("auto", "default"),
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "user",
            "metadata",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
        }
    )

    model: str | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    store: bool | None = None

    @property
    def num_choices(self) -> int:
        """Replies to each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with what was used."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


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
    taken = [name for name, row in sampling_table().items() if row.is_model_default]
    found = {name: values[name] for name in taken if name in values}
    if values.get("do_sample") is False:
        found.setdefault("temperature", 0.0)
    found = {name: value for name, value in found.items() if value is not None}
    SamplingParams(**found)  # refuses what cannot be, at the start and not with every request
    return _DEFAULTS | found


def choice_params(
    body: SamplingFields, defaults: dict[str, Any], *, max_tokens: int, logprobs: int | None
) -> list[SamplingParams]:
    """Parameters of each choice of a completion; raises InvalidRequestError naming the field."""
    given = {name: getattr(body, name) for name in taken_fields(COMPLETIONS)}
    params = sampling_params(defaults, given, max_tokens=max_tokens, logprobs=logprobs)
    if params.seed is None:
        return [params] * body.num_choices
    # With one seed for all, every choice would be the same reply.
    return [replace(params, seed=(params.seed + i) % (MAX_SEED + 1)) for i in range(body.num_choices)]


def sampling_params(
    defaults: Mapping[str, Any], given: Mapping[str, Any], *, max_tokens: int, logprobs: int | None = None
) -> SamplingParams:
    """Return the parameters of a turn; raise InvalidRequestError naming the field.

    Args:
      defaults: by field, for what the request does not say.
      given: by field, as the request says it; None takes the default.
      max_tokens, logprobs: fields that each route has in its own form.
    """
    chosen = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    if "seed" in chosen:
        chosen["seed"] %= MAX_SEED + 1  # a negative one, too
    if isinstance(chosen.get("stop"), str):
        chosen["stop"] = [chosen["stop"]]
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **chosen)


def num_context_tokens(usage: Usage) -> int:
    """Return the tokens of history and prompt, whether they were found or computed."""
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
