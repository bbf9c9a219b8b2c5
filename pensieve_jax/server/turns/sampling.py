"""Sampling fields of requests, and token counts of responses.

Owns: the fields that Chat Completions and Completions share, their defaults, their conversion to engine
parameters, and the usage objects of responses.
Does not know: prompts, engines, or field names of other schemas.
Called by `server.openai`, `server.cache_view`, and `server.app` at startup.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta

from pensieve_jax.core.errors import ConfigError, InvalidRequestError
from pensieve_jax.core.outputs import Usage
from pensieve_jax.core.sampling_params import (
    COMPLETIONS,
    MAX_BIASED_IDS,
    MAX_SEED,
    SamplingParams,
    sampling_table,
    taken_fields,
)
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.server.http.bodies import Body
from pensieve_jax.server.turns.structured import StructuredFields

_log = logging.getLogger(__name__)
_DEFAULTS = {"temperature": 1.0}
MAX_CHOICES: Final = 8
_ID: Final = re.compile(r"[0-9]{1,10}")
type Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
type Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
type Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""OpenAI's range. Clients also send negative seeds such as -1; these are reduced modulo 2**63."""


UNSUPPORTED_SAMPLING: Final[Mapping[str, tuple[Any, ...]]] = {
    # How tokens are chosen.
    "repeat_penalty": (1,),
    "length_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "repetition_detection": (),
    "dry_multiplier": (0,),
    "typical_p": (1,),
    "top_a": (0,),
    "tfs_z": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "smoothing_factor": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "do_sample": (True,),
    "use_beam_search": (False,),
    "num_beams": (1,),
    "best_of": (1,),
    "thinking_token_budget": (),
    # Which tokens and texts are possible.
    "logits_processors": ([],),
    "custom_logit_processor": ("",),
    "structured": (),  # the name in Python
    "structural_tag": ("",),
    "guided_decoding_backend": ("",),
    "guided_whitespace_pattern": ("",),
    "regex": ("",),
    "ebnf": ("",),
    "grammar": ("",),
    "json_schema": ("", {}),
    "stop_regex": ("", []),
    # What is read before the reply.
    "truncate_prompt_tokens": (),
    "suffix": ("",),
    "prompt_embeds": (),
    # What the answer shows.
    "no_stop_trim": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "include_reasoning": (True,),
    "logprob_token_ids": ([],),
    "n_probs": (0,),
    "return_tokens_as_token_ids": (False,),
    "return_hidden_states": (False,),
    # Which weights, cache and turn in the queue a request gets.
    "lora": ([],),
    "lora_path": ("",),
    "cache_salt": (),
    "kv_transfer_params": ({},),
    "priority": (0,),
    "vllm_xargs": ({},),
}
"""Fields of OpenAI, vLLM, SGLang and llama.cpp that change an answer, and that no route has.

Each has its values without effect. Every route that samples refuses the others.
`spaces_between_special_tokens` has no effect where special tokens are not shown.
"""

UNSUPPORTED_TEMPLATE: Final[Mapping[str, tuple[Any, ...]]] = {
    "chat_template": (),
    "enable_thinking": (),
    "thinking": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
"""Fields that change how a template writes messages; the routes that read messages or prompts refuse them.

The default of `enable_thinking` and `thinking` is the template's, so no value of them is without effect. They
are variables of some templates, for `chat_template_kwargs`.
"""

TEMPLATE_FIELDS: Final[Mapping[str, tuple[Any, ...]]] = {
    "chat_template_kwargs": ({},),
    "reasoning_effort": ("none",),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Fields for templates that some routes have. The others refuse all but these values without effect."""

MISSPELLED: Final[Mapping[str, str]] = {
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "random_seed": "seed",
    "sampling_seed": "seed",
}
"""Names that other servers give to sampling fields, and the names here."""


_NOT_APPLIED: Final[Mapping[str, tuple[Any, ...]]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "top_h": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "guidance_scale": (1,),
    "exponential_decay_length_penalty": (),
    "sequence_bias": ({}, []),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": ([],),
    "forced_decoder_ids": ([],),
    "stop_strings": ([],),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "max_length": (),
    "max_new_tokens": (),
    "max_time": (),
    "watermarking_config": (),
}
"""Settings of generation_config.json that change replies and are not applied, with values without effect."""


class StreamOptions(Body):
    """Options of a stream of a completion."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"continuous_usage_stats": (False,)}
    IGNORED: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool | None = None


class SamplingFields(StructuredFields):
    """Request fields that Chat Completions and Completions share, including all sampling fields.

    `metadata` has an effect on stored turns only.

    `top_k`, `min_p`, `repetition_penalty`, `allowed_token_ids`, `bad_words`, `min_tokens`, `stop_token_ids`,
    `include_stop_str_in_output`, `ignore_eos` and `prompt_logprobs` are vLLM extensions.
    """

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **UNSUPPORTED_SAMPLING,
        **UNSUPPORTED_TEMPLATE,
        "service_tier": ("auto", "default"),
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            "user",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
        }
    )
    MISPLACED: ClassVar[Mapping[str, str]] = {
        **{name: f"Use {ours}." for name, ours in MISSPELLED.items()},
    }

    model: str | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None

    @property
    def num_choices(self) -> int:
        """Number of replies to each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with the token usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def model_defaults(source: str, *, penalties: bool = True) -> dict[str, Any]:
    """Return the default sampling parameters from the model's generation_config.json.

    Args:
      source: the model directory. Any other text, such as "random:<preset>", has no such file.
      penalties: whether the engine has penalties; else those of the file are not applied.

    `do_sample: false` in the file means temperature 0. A warning names the settings of the file that would
    change replies and are not applied. Raises ConfigError for a file that is not a JSON object, and for an
    invalid value.
    """
    path = Path(source) / "generation_config.json"
    if not path.is_file():
        return dict(_DEFAULTS)
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), "unreadable", f"a JSON object ({error})") from error
    rows = {name: row for name, row in sampling_table().items() if row.is_model_default}
    taken = [name for name, row in rows.items() if penalties or row.penalty is None]
    without_effect = dict(_NOT_APPLIED) | {
        name: (row.penalty.off,) for name, row in rows.items() if name not in taken and row.penalty
    }
    found = {name: values[name] for name in taken if values.get(name) is not None}
    if not isinstance(values.get("do_sample"), bool | None):
        raise ConfigError(f"{path}: do_sample", values["do_sample"], "true, false or null")
    if values.get("do_sample") is False:
        found["temperature"] = 0.0
    try:  # at startup instead of at every request
        params = SamplingParams(**found)
    except InvalidRequestError as error:
        raise ConfigError(f"{path}: {error.field}", error.value, error.limit) from error
    left_out = _left_out(values, without_effect)
    if left_out:
        _log.warning("%s sets %s, which this server does not apply", path, ", ".join(left_out))
    return _DEFAULTS | {name: getattr(params, name) for name in found}


def _left_out(values: Mapping[str, Any], settings: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Return those of `settings` that would change replies and are not applied, as text.

    `settings` has the values without effect of each.
    """
    return [
        f"{name}={values[name]!r}"
        for name, without_effect in settings.items()
        if values.get(name) is not None and values[name] not in without_effect
    ]


def choice_params(
    body: SamplingFields,
    defaults: dict[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    structured: StructuredOutput | None = None,
) -> list[SamplingParams]:
    """Return the parameters of each choice of a completion; raise InvalidRequestError naming the field."""
    given = {name: getattr(body, name) for name in taken_fields(COMPLETIONS)}
    params = sampling_params(defaults, given, max_tokens=max_tokens, logprobs=logprobs, structured=structured)
    if params.seed is None:
        return [params] * body.num_choices
        # With the same seed, all choices would be the same reply.
    return [replace(params, seed=(params.seed + i) % (MAX_SEED + 1)) for i in range(body.num_choices)]


def sampling_params(
    defaults: Mapping[str, Any],
    given: Mapping[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None = None,
    structured: StructuredOutput | None = None,
) -> SamplingParams:
    """Return the parameters of a turn; raise InvalidRequestError naming the field.

    Args:
        defaults: values by field for fields that the request leaves out.
        given: values by field from the request; None takes the default.
        max_tokens, logprobs, structured: fields that each route names and defaults differently.
    """
    chosen = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    if "seed" in chosen:
        chosen["seed"] %= MAX_SEED + 1  # maps negative seeds into the range
    if isinstance(chosen.get("stop"), str):
        chosen["stop"] = [chosen["stop"]]
    if "logit_bias" in chosen:
        chosen["logit_bias"] = _biases(chosen["logit_bias"])
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, structured=structured, **chosen)


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Return biases by id from JSON, where ids are text; raise InvalidRequestError naming the id."""
    if len(given) > MAX_BIASED_IDS:
        limit = f"at most {MAX_BIASED_IDS} ids"
        raise InvalidRequestError("logit_bias", f"{len(given)} ids", limit)
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not _ID.fullmatch(key) or int(key) in biases:
            raise InvalidRequestError("logit_bias", key, "an object whose names are different token ids")
        biases[int(key)] = bias
    return biases


def num_context_tokens(usage: Usage) -> int:
    """Return the number of tokens of history and prompt, both reused and computed."""
    return num_cached_tokens(usage) + usage.recomputed_tokens + usage.prefilled_tokens


def num_cached_tokens(usage: Usage) -> int:
    """Return the number of context tokens whose KV cache was reused, from any tier."""
    return usage.reused_gpu_tokens + usage.swapped_in_tokens


def token_sources(usages: Sequence[Usage]) -> dict[str, int]:
    """Return `usage.pensieve`: the new tokens of these turns, and where their context tokens came from.

    gpu + cpu + recomputed + prefilled is the number of all context tokens.
    """
    return {
        "new_tokens": sum(usage.prompt_tokens for usage in usages),
        "gpu_tokens": sum(usage.reused_gpu_tokens for usage in usages),
        "cpu_tokens": sum(usage.swapped_in_tokens for usage in usages),
        "recomputed_tokens": sum(usage.recomputed_tokens for usage in usages),
        "prefilled_tokens": sum(usage.prefilled_tokens for usage in usages),
    }


def completion_usage(usages: Sequence[Usage], num_shared: int = 1) -> dict[str, Any]:
    """Return the usage object of Chat Completions and Completions.

    Args:
        usages: usage of each turn of the request.
        num_shared: number of consecutive turns that reply to the same prompt; that prompt counts once.
    """
    prompts = usages[::num_shared]
    num_prompt = sum(map(num_context_tokens, prompts))
    num_reply = sum(usage.output_tokens for usage in usages)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_reply,
        "total_tokens": num_prompt + num_reply,
        "prompt_tokens_details": {"cached_tokens": sum(map(num_cached_tokens, prompts))},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.reasoning_tokens for usage in usages)},
        "pensieve": token_sources(usages),
    }
