"""The command-line flags that a launcher turns into an `LLM` and `SamplingParams`.

Owns: names, defaults and help of these flags, and the way back from flags to configuration.
Does not know: what a launcher does with the model. Called by: every launcher that opens a model. The flags
are those of whoever calls, so that its `--help` lists them.
"""

from __future__ import annotations

import math
import re
import sys

from absl import flags

from model_defs import ModelConfig, source_config
from pensieve_jax import (
    LLM,
    CacheConfig,
    ConfigError,
    EngineConfig,
    RunnerConfig,
    SamplingParams,
    SchedulerConfig,
)
from pensieve_jax.assembly import DEFAULT_MODEL, Assembled, assemble, resolve_model
from pensieve_jax.commands.help import flag_group
from pensieve_jax.config import ATTENTION_BACKENDS, POLICIES

FLAGS = flags.FLAGS
flags.disclaim_key_flags()
TINY_MODEL = "random:llama-tiny"
"""The default of launchers whose own sizes outgrow the 1,024 tokens of the library's default model."""
COMPILATION_CACHE_HELP = (
    "Directory where compiled steps outlive the process. They are run as they are found, so it must be your "
    "own, and nobody else may be able to write to it."
)
_CACHE, _SCHEDULER, _RUNNER = CacheConfig(), SchedulerConfig(), RunnerConfig()
_SIZES = (
    *("gpu_pages", "gpu_memory_fraction", "cpu_pages", "cpu_bytes"),
    *("token_buckets", "max_num_running", "max_num_batched_tokens", "max_context_tokens"),
)
_BYTES_OF = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("iB", 1024))
}


@flag_group("the model and the engine")
def define_engine_flags(*, model: str = DEFAULT_MODEL) -> None:
    """Flags of the model and the engine; those left out keep the library's defaults, but for `model`."""
    define_model_flag(model)
    flags.DEFINE_enum("dtype", "auto", ["auto", "float32", "bfloat16", "float16"], "Of weights and KV state.")
    flags.DEFINE_bool("stateful", True, "Keep KV state between turns.")
    flags.DEFINE_integer("gpu_pages", _CACHE.gpu_pages, "Pages of device memory.")
    flags.DEFINE_float(
        "gpu_memory_fraction",
        None,
        "Instead of --gpu_pages: the share of what JAX may use that weights, pages and copies take.",
    )
    flags.DEFINE_integer("chunk_tokens", _CACHE.chunk_tokens, "Tokens of a page: 16, 32 or 64.")
    _define_tier_flags()
    flags.DEFINE_integer("max_num_running", _SCHEDULER.max_num_running, "Requests in the batch at once.")
    flags.DEFINE_integer("max_num_batched_tokens", None, "Query tokens of a step.")
    flags.DEFINE_integer(
        "max_num_buckets", None, "Step sizes compiled, if derived; default: 8 on GPUs, 4 elsewhere."
    )
    flags.DEFINE_list("token_buckets", None, "Step sizes compiled, ascending, e.g. 64,256,1024.")
    flags.DEFINE_bool(
        "unified", _SCHEDULER.unified, "Put prompts and decodes into one step; --nounified pauses decodes."
    )
    flags.DEFINE_integer(
        "max_context_tokens", None, "Longest history + turn; default: what model and pool allow."
    )
    flags.DEFINE_enum(
        "attention_backend", _RUNNER.attention_backend, ATTENTION_BACKENDS, "What computes attention."
    )
    flags.DEFINE_integer(
        "tensor_parallel_size", _RUNNER.tensor_parallel_size, "Devices that share each layer."
    )
    flags.DEFINE_integer("max_position_embeddings", None, "Raises the context of a random: preset.")
    flags.DEFINE_integer("random_seed", _RUNNER.random_seed, "Of random: weights and of drawn seeds.")
    flags.DEFINE_string("compilation_cache_dir", None, COMPILATION_CACHE_HELP)
    flags.DEFINE_bool("progress", None, "Show progress bars; default: on a terminal.")


def define_model_flag(default: str = DEFAULT_MODEL) -> None:
    """Which model; by default the small chat model that comes with the library."""
    flags.DEFINE_string("model", default, "chat, a directory, a hub name, or random:<preset>.")


@flag_group("the host tier, and what moves between the tiers")
def _define_tier_flags() -> None:
    """Flags of the host tier, and of how chunks move between it and the device."""
    flags.DEFINE_integer(
        "cpu_pages", None, "Pages of pinned host memory; with neither this nor --cpu_bytes there are none."
    )
    flags.DEFINE_string("cpu_bytes", None, "The same as memory of all devices together, e.g. 16GiB or 40GB.")
    flags.DEFINE_enum("policy", _CACHE.policy, POLICIES, "Whose state leaves a tier first.")
    flags.DEFINE_string(
        "cost_profile",
        None,
        "JSON file that profile_costs.py measured, for --policy=retention; default: an analytic estimate.",
    )
    flags.DEFINE_float(
        "swap_out_fraction",
        _CACHE.swap_out_fraction,
        "Idle chunks are copied out ahead of time while less than this share of pages is free or copied.",
    )
    flags.DEFINE_bool(
        "retrieval_priority", _CACHE.retrieval_priority, "Copy nothing out ahead of time while copying in."
    )
    flags.DEFINE_bool("prefetch", _CACHE.prefetch, "Copy in what queued requests need while others run.")
    flags.DEFINE_integer(
        "max_num_staged_pages", _RUNNER.max_num_staged_pages, "Chunks on their way in, or out, at once."
    )
    flags.DEFINE_integer(
        "num_layer_groups",
        _RUNNER.num_layer_groups,
        "Parts of a step: one computes while the next one's pieces of chunks are copied in.",
    )


def refuse_sizes() -> None:
    """For launchers whose cases say how large tiers and steps are; raises ConfigError if a flag does, too."""
    for name in _SIZES:
        if not FLAGS[name].using_default_value:
            raise ConfigError(f"--{name}", FLAGS[name].value, "left out: it follows from what is measured")


def define_history_flag() -> None:
    """Where conversations are kept."""
    flags.DEFINE_string("history", None, "SQLite file that keeps the conversations; default: memory only.")


@flag_group("sampling")
def define_sampling_flags(*, max_tokens: int) -> None:
    """Flags of `SamplingParams`."""
    flags.DEFINE_integer("max_tokens", max_tokens, "The most tokens of a reply.")
    flags.DEFINE_integer("min_tokens", 0, "Replies do not end before this many tokens.")
    flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
    flags.DEFINE_integer("top_k", 0, "Sample among the k most likely ids; 0 is off.")
    flags.DEFINE_float("top_p", 1.0, "Sample among ids of this much probability; 1 is off.")
    flags.DEFINE_integer("seed", None, "Of sampled turns; default: a new one for each.")
    flags.DEFINE_multi_string("stop", [], "A string that ends the reply; may be given several times.")
    flags.DEFINE_bool("ignore_eos", False, "Go on past the end of sequence.")


def engine_config() -> EngineConfig:
    """What the flags say; raises ConfigError."""
    buckets = _token_buckets(FLAGS.token_buckets)
    max_tokens = FLAGS.max_num_batched_tokens
    if max_tokens is None:
        max_tokens = buckets[-1] if buckets else _SCHEDULER.max_num_batched_tokens
    return EngineConfig(
        stateful=FLAGS.stateful,
        cache=CacheConfig(
            gpu_pages=FLAGS.gpu_pages,
            gpu_memory_fraction=FLAGS.gpu_memory_fraction,
            cpu_pages=FLAGS.cpu_pages or 0,
            cpu_bytes=_cpu_bytes(),
            chunk_tokens=FLAGS.chunk_tokens,
            policy=FLAGS.policy,
            cost_profile=FLAGS.cost_profile,
            swap_out_fraction=FLAGS.swap_out_fraction,
            retrieval_priority=FLAGS.retrieval_priority,
            prefetch=FLAGS.prefetch,
        ),
        scheduler=SchedulerConfig(
            max_num_running=FLAGS.max_num_running,
            max_num_batched_tokens=max_tokens,
            max_num_buckets=FLAGS.max_num_buckets,
            token_buckets=buckets,
            max_context_tokens=FLAGS.max_context_tokens,
            unified=FLAGS.unified,
        ),
        runner=RunnerConfig(
            attention_backend=FLAGS.attention_backend,
            tensor_parallel_size=FLAGS.tensor_parallel_size,
            num_layer_groups=FLAGS.num_layer_groups,
            max_num_staged_pages=FLAGS.max_num_staged_pages,
            max_position_embeddings=FLAGS.max_position_embeddings,
            random_seed=FLAGS.random_seed,
            compilation_cache_dir=FLAGS.compilation_cache_dir or None,
        ),
    )


def model_limits() -> tuple[ModelConfig, int]:
    """The model's configuration and the longest context in tokens, before anything is loaded.

    Raises ConfigError or ModelError. Fetches a model that has only a hub name.
    """
    config = engine_config()
    model = source_config(resolve_model(FLAGS.model), config.runner.max_position_embeddings)
    return model, config.resolve_context_tokens(model.max_position_embeddings)


def sampling_params() -> SamplingParams:
    """What the flags say; raises InvalidRequestError."""
    return SamplingParams(
        max_tokens=FLAGS.max_tokens,
        min_tokens=FLAGS.min_tokens,
        temperature=FLAGS.temperature,
        top_k=FLAGS.top_k,
        top_p=FLAGS.top_p,
        seed=FLAGS.seed,
        stop=tuple(FLAGS.stop),
        ignore_eos=FLAGS.ignore_eos,
    )


def shows_progress() -> bool:
    """Whether there are progress bars."""
    return sys.stderr.isatty() if FLAGS.progress is None else bool(FLAGS.progress)


def open_llm(*, config: EngineConfig | None = None, history: str | None = None) -> LLM:
    """The model that the flags describe, compiled; raises PensieveError or ModelError.

    `config` overrides that of the flags.
    """
    return LLM(
        FLAGS.model,
        dtype=FLAGS.dtype,
        history=history,
        config=config or engine_config(),
        progress=shows_progress(),
    )


def open_parts(config: EngineConfig) -> Assembled:
    """An engine of the flags' model without a history file, and its parts; errors as of `open_llm`."""
    return assemble(
        FLAGS.model,
        dtype=FLAGS.dtype,
        history=None,
        synchronous="normal",
        config=config,
        progress=shows_progress(),
    )


def parse_bytes(text: str) -> int:
    """Bytes of "16GiB", "40 GB", "1.5e9" or "4096"; raises ValueError."""
    found = re.fullmatch(r"([\d_.]+(?:e\d+)?)\s*([KMGT]?i?B?)", text.strip(), re.IGNORECASE)
    units = {unit.lower(): size for unit, size in _BYTES_OF.items()}
    unit = None if found is None else units.get(found[2].lower())
    size = math.inf if found is None or unit is None else float(found[1]) * unit
    if not math.isfinite(size):
        raise ValueError(f"{text!r} is no number of bytes")
    return int(size)


def _cpu_bytes() -> int | None:
    text = FLAGS.cpu_bytes
    if text is None:
        return None
    if FLAGS.cpu_pages:
        raise ConfigError("--cpu_bytes", text, "left out beside --cpu_pages")
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(
            "--cpu_bytes", text, "a number of bytes such as 16GiB, 40GB or 17179869184"
        ) from error


def _token_buckets(words: list[str] | None) -> tuple[int, ...] | None:
    if words is None:
        return None
    try:
        return tuple(int(word) for word in words)
    except ValueError as error:
        raise ConfigError("--token_buckets", ",".join(words), "integers with commas between them") from error
