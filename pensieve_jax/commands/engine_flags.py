"""Command-line flags of the model, the engine and sampling.

Owns: one flag for every field of a configuration and of `SamplingParams`, and the conversion of flags back to
configurations.
Does not know: the meaning of a field, which its option documents, or the use of the model.
Flags belong to the module that calls these functions, so that its `--help` lists them.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from absl import flags

from pensieve_jax import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    RunnerConfig,
    SamplingParams,
    SchedulerConfig,
)
from pensieve_jax.commands.help import flag_group
from pensieve_jax.commands.launch import check_first, take_words
from pensieve_jax.core.options import Option, options_of
from pensieve_jax.core.sampling_params import sampling_table
from pensieve_jax.core.user_directories import user_cache_dir
from pensieve_jax.model_source import DEFAULT_MODEL, resolve_model, source_tokenizer, with_tokenizer_end

if TYPE_CHECKING:  # these import JAX, which the server's front end does not load
    from model_defs import ModelConfig
    from pensieve_jax import LLM
    from pensieve_jax.assembly import Assembled
    from pensieve_jax.device.model_runner import ModelRunner
    from pensieve_jax.engine.runner import Runner

CACHE_DIR = user_cache_dir()
"""Directory where interactive commands store compiled steps for the next start."""
FLAGS = flags.FLAGS
flags.disclaim_key_flags()
TINY_MODEL = "random:llama-tiny"
"""Default of launchers that need more than the 1,024 tokens of context of the library's default model."""
_GROUPS = {
    EngineConfig: "the model and the engine",
    CacheConfig: "the cache: pages, host memory, eviction",
    SchedulerConfig: "batches: the size of a step",
    RunnerConfig: "the device: how steps run",
}
_OPTIONS = {
    option.name: option
    for kind in _GROUPS
    for option in options_of(kind)
    if not dataclasses.is_dataclass(option.kind)
}
# Flags whose default depends on another flag. They have no default on the command line, but this sentence.
_SAID_BY_OTHERS = {
    "max_num_batched_tokens": f"Default: the last of token_buckets, otherwise "
    f"{SchedulerConfig.max_num_batched_tokens}, or the smallest working value if that is larger.",
}
_EMPTY_IS_NONE = ("compilation_cache_dir",)
_SIZES = (
    *("gpu_pages", "gpu_memory_fraction", "cpu_pages", "cpu_bytes", "cpu_memory_fraction", "max_num_rows"),
    *("token_buckets", "max_num_running", "max_num_batched_tokens", "max_context_tokens"),
)
_BYTES_OF = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("iB", 1024))
}


@flag_group(_GROUPS[EngineConfig])
def define_engine_flags(*, model: str = DEFAULT_MODEL) -> None:
    """Define the flags of the model and the engine, with the library's defaults except for `model`."""
    define_model_flag(model)
    flags.DEFINE_enum(
        "dtype",
        "auto",
        ["auto", "float32", "bfloat16", "float16"],
        "Type of weights, and of the KV cache unless kv_dtype is set.",
    )
    for kind, title in _GROUPS.items():
        flag_group(title)(_define_options)(kind)
    flags.DEFINE_bool("progress", None, "Show progress bars; default: on a terminal.")


def engine_flag_names() -> list[str]:
    """Return the names of the flags of `define_engine_flags`, for commands that pass them to another one."""
    return ["model", "dtype", "progress", *_OPTIONS]


def define_model_flag(default: str = DEFAULT_MODEL) -> None:
    """Define `--model`; the default is the small chat model that comes with the library."""
    flags.DEFINE_string("model", default, "Model: chat, a directory, a hub name, or random:<preset>.")


def take_model_word() -> None:
    """Accept the model as an argument, as in `pensieve serve MODEL`. Call it once `--model` is defined."""
    words = take_words()

    def take() -> None:
        match words:
            case []:
                return
            case [model] if not FLAGS["model"].present:
                FLAGS["model"].value = model
            case [_]:
                limit = "left out beside the argument that names the model"
                raise ConfigError("--model", FLAGS.model, limit)
            case _:
                raise ConfigError("model", " ".join(words), "one name", "--help lists the flags")

    check_first(take)


def set_command_defaults() -> None:
    """Give the flags the defaults of all commands, so that one loads what another has compiled."""
    FLAGS.set_default("compilation_cache_dir", str(CACHE_DIR))


def command_config(compilation_cache_dir: str | None) -> EngineConfig:
    """Return the configuration of commands whose flags are left out."""
    return EngineConfig(runner=RunnerConfig(compilation_cache_dir=compilation_cache_dir))


def check_engine_flags() -> EngineConfig:
    """Return the configuration of the flags, once the model was found; JAX is not imported for it.

    A hub name is downloaded. Raises ConfigError for an invalid value, and for a model that cannot be found.
    """
    config = engine_config()
    resolve_model(FLAGS.model)
    return config


def _define_options(kind: type) -> None:
    """Define the flags of a configuration's own fields."""
    for option in options_of(kind):
        if option.name in _OPTIONS:
            _define_option(option)


def _define_option(option: Option) -> None:
    """Define the flag of a field under the field's name, with its default and help."""
    default, text = option.default, option.text
    if default is None:
        text = _without_none(text, "an empty one" if option.name in _EMPTY_IS_NONE else "the default")
    if option.name in _SAID_BY_OTHERS:
        default, text = None, f"{text} {_SAID_BY_OTHERS[option.name]}"
    if option.kind is str and option.limit.choices:
        flags.DEFINE_enum(option.name, default, option.limit.choices, text)
    elif option.unit == "bytes":
        flags.DEFINE_string(option.name, default, text)
    else:
        define: dict[type, Callable[..., Any]] = {
            bool: flags.DEFINE_bool,
            int: flags.DEFINE_integer,
            float: flags.DEFINE_float,
            str: flags.DEFINE_string,
            tuple: flags.DEFINE_list,
        }
        define[option.kind](option.name, default, text)


def _without_none(text: str, instead: str) -> str:
    """Replace None in a field's help, since None cannot be typed on a command line."""
    text = text.replace("None or ", "")
    text = re.sub(r"(\A|\. )None\b", lambda found: found[1] + instead[0].upper() + instead[1:], text)
    return re.sub(r"\bNone\b", instead, text)


COMPILATION_CACHE_HELP = _without_none(_OPTIONS["compilation_cache_dir"].text, "an empty one")


def refuse_sizes(*others: str) -> None:
    """Raise ConfigError for a size flag, in launchers whose cases fix the sizes of tiers and steps.

    `others` are further flags that the cases fix.
    """
    for name in (*_SIZES, *others):
        if not FLAGS[name].using_default_value:
            raise ConfigError(f"--{name}", FLAGS[name].value, "left out: the measured case determines it")


def define_history_flag() -> None:
    """Define `--history`, the store of conversations."""
    text = "Store of the conversations: an SQLite file, or postgresql://...; default: memory only."
    flags.DEFINE_string("history", None, text)


@flag_group("sampling")
def define_sampling_flags(*, max_tokens: int) -> None:
    """Define the flags of `SamplingParams` in its table; `max_tokens` is the default of that flag."""
    define: dict[type, Callable[..., object]] = {
        bool: flags.DEFINE_bool,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
    }
    for option, text in _sampling_flags().items():
        if option.default is tuple:
            flags.DEFINE_multi_string(option.name, [], text)
        else:
            default = max_tokens if option.name == "max_tokens" else option.default
            define[option.kind](option.name, default, text)


def _sampling_flags() -> dict[Option, str]:
    """Return the sampling fields that have a flag, in order, each with its help."""
    table = sampling_table()
    return {one: text for one in options_of(SamplingParams) if (text := table[one.name].flag)}


def engine_config() -> EngineConfig:
    """Return the configuration of the flags; raise ConfigError for invalid values."""
    return EngineConfig(
        **_values(EngineConfig),
        cache=CacheConfig(**_values(CacheConfig)),
        scheduler=SchedulerConfig(**_values(SchedulerConfig)),
        runner=RunnerConfig(**_values(RunnerConfig)),
    )


def _values(kind: type) -> dict[str, Any]:
    """Return a configuration's fields from the flags; raise ConfigError for a value of the wrong type."""
    names = [option.name for option in options_of(kind) if option.name in _OPTIONS]
    found = {name: getattr(FLAGS, name) for name in names}
    # Conversions of flags that differ from the field's value.
    changed: dict[str, Callable[[Any], Any]] = {
        "cpu_bytes": _cpu_bytes,
        "gpu_reserved_bytes": lambda text: None if text is None else num_bytes("--gpu_reserved_bytes", text),
        "token_buckets": _token_buckets,
        "max_num_batched_tokens": _max_num_batched_tokens,
        "compilation_cache_dir": lambda path: path or None,
    }
    return {name: changed[name](value) if name in changed else value for name, value in found.items()}


def model_limits() -> tuple[ModelConfig, int]:
    """Return the model's configuration and the longest context in tokens, before loading the model.

    A hub name is downloaded. The tokenizer is read for its end-of-sequence id. Raises ConfigError or
    ModelError.
    """
    from model_defs import source_config

    config = engine_config()
    source = resolve_model(FLAGS.model)
    model = source_config(source, config.runner.max_position_embeddings)
    model = with_tokenizer_end(model, source_tokenizer(source, model.vocab_size))
    return model, config.resolve_context_tokens(model.max_position_embeddings)


def sampling_params() -> SamplingParams:
    """Return the sampling parameters of the flags; raise InvalidRequestError for invalid values."""
    return SamplingParams(**{option.name: getattr(FLAGS, option.name) for option in _sampling_flags()})


def shows_progress() -> bool:
    """Return whether to show progress bars."""
    return sys.stderr.isatty() if FLAGS.progress is None else bool(FLAGS.progress)


def open_llm(*, config: EngineConfig | None = None, history: str | None = None) -> LLM:
    """Load and compile the model of the flags; `config` overrides that of the flags.

    Raises PensieveError or ModelError.
    """
    from pensieve_jax import LLM

    return LLM(
        FLAGS.model,
        dtype=FLAGS.dtype,
        history=history,
        config=config or engine_config(),
        progress=shows_progress(),
    )


def open_parts(config: EngineConfig, *, wrap: Callable[[ModelRunner], Runner] | None = None) -> Assembled:
    """Assemble an engine of the flags' model without a history file, on what `wrap` returns for the runner.

    Errors are those of `open_llm`.
    """
    from pensieve_jax.assembly import assemble

    return assemble(
        FLAGS.model,
        dtype=FLAGS.dtype,
        history=None,
        synchronous="normal",
        config=config,
        progress=shows_progress(),
        wrap=wrap,
    )


def parse_bytes(text: str) -> int:
    """Parse a number of bytes such as "16GiB", "40 GB", "1.5e9" or "4096"; raise ValueError."""
    found = re.fullmatch(r"([\d_.]+(?:e\d+)?)\s*([KMGT]?i?B?)", text.strip(), re.IGNORECASE)
    units = {unit.lower(): size for unit, size in _BYTES_OF.items()}
    unit = None if found is None else units.get(found[2].lower())
    size = math.inf if found is None or unit is None else float(found[1]) * unit
    if not math.isfinite(size):
        raise ValueError(f"{text!r} is not a number of bytes")
    return int(size)


def num_bytes(flag: str, text: str) -> int:
    """Parse a flag's value by `parse_bytes`; raise ConfigError, which names the flag."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(flag, text, "a number of bytes such as 16GiB, 40GB or 17179869184") from error


def _cpu_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    if FLAGS.cpu_pages:
        raise ConfigError("--cpu_bytes", text, "left out with --cpu_pages")
    return num_bytes("--cpu_bytes", text)


def _token_buckets(words: list[str] | None) -> tuple[int, ...] | None:
    if words is None:
        return None
    try:
        return tuple(int(word) for word in words)
    except ValueError as error:
        raise ConfigError("--token_buckets", ",".join(words), "integers separated by commas") from error


def _max_num_batched_tokens(given: int | None) -> int:
    """Resolve the flag: as given, or the last bucket, or enough for one chunk and all running requests."""
    if given is not None:
        return given
    buckets = _token_buckets(FLAGS.token_buckets)
    least = (FLAGS.max_num_running or 0) + FLAGS.chunk_tokens
    return buckets[-1] if buckets else max(SchedulerConfig.max_num_batched_tokens, least)
