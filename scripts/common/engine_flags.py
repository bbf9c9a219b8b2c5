"""The command-line flags that a launcher turns into an `LLM` and `SamplingParams`.

Owns: names, defaults and help of these flags, and the way back from flags to configuration.
Does not know: what a launcher does with the model. Called by: generate, chat, check_serving. The flags are
those of whoever calls, so that its `--help` lists them.
"""

from __future__ import annotations

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
from pensieve_jax.assembly import resolve_model
from pensieve_jax.config import POLICIES

FLAGS = flags.FLAGS
flags.disclaim_key_flags()
BACKENDS = ["auto", "xla", "pallas_triton"]
_CACHE, _SCHEDULER, _RUNNER = CacheConfig(), SchedulerConfig(), RunnerConfig()


def define_engine_flags(*, model: str = "random:llama-tiny") -> None:
    """Flags of the model and the engine; those left out keep the library's defaults."""
    flags.DEFINE_string("model", model, "Model directory, hub name, or random:<preset>.")
    flags.DEFINE_enum("dtype", "auto", ["auto", "float32", "bfloat16", "float16"], "Of weights and KV state.")
    flags.DEFINE_bool("stateful", True, "Keep KV state between turns.")
    flags.DEFINE_integer("gpu_pages", _CACHE.gpu_pages, "Pages of device memory.")
    flags.DEFINE_integer("chunk_tokens", _CACHE.chunk_tokens, "Tokens of a page: 16, 32 or 64.")
    flags.DEFINE_enum("policy", _CACHE.policy, POLICIES, "Whose state is dropped first.")
    flags.DEFINE_integer("max_num_running", _SCHEDULER.max_num_running, "Requests in the batch at once.")
    flags.DEFINE_integer("max_num_batched_tokens", None, "Query tokens of a step.")
    flags.DEFINE_integer("max_num_buckets", _SCHEDULER.max_num_buckets, "Step sizes compiled, if derived.")
    flags.DEFINE_list("token_buckets", None, "Step sizes compiled, ascending, e.g. 64,256,1024.")
    flags.DEFINE_integer(
        "max_context_tokens", None, "Longest history + turn; default: what model and pool allow."
    )
    flags.DEFINE_enum("attention_backend", _RUNNER.attention_backend, BACKENDS, "What computes attention.")
    flags.DEFINE_integer(
        "tensor_parallel_size", _RUNNER.tensor_parallel_size, "Devices that share each layer."
    )
    flags.DEFINE_integer("max_position_embeddings", None, "Raises the context of a random: preset.")
    flags.DEFINE_integer("random_seed", _RUNNER.random_seed, "Of random: weights and of drawn seeds.")
    flags.DEFINE_string("compilation_cache_dir", None, "Directory where compiled steps outlive the process.")
    flags.DEFINE_bool("progress", None, "Show progress bars; default: on a terminal.")


def define_history_flag() -> None:
    """Where conversations are kept."""
    flags.DEFINE_string("history", None, "SQLite file that keeps the conversations; default: memory only.")


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
            chunk_tokens=FLAGS.chunk_tokens,
            policy=FLAGS.policy,
        ),
        scheduler=SchedulerConfig(
            max_num_running=FLAGS.max_num_running,
            max_num_batched_tokens=max_tokens,
            max_num_buckets=FLAGS.max_num_buckets,
            token_buckets=buckets,
            max_context_tokens=FLAGS.max_context_tokens,
        ),
        runner=RunnerConfig(
            attention_backend=FLAGS.attention_backend,
            tensor_parallel_size=FLAGS.tensor_parallel_size,
            max_position_embeddings=FLAGS.max_position_embeddings,
            random_seed=FLAGS.random_seed,
            compilation_cache_dir=FLAGS.compilation_cache_dir,
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


def _token_buckets(words: list[str] | None) -> tuple[int, ...] | None:
    if words is None:
        return None
    try:
        return tuple(int(word) for word in words)
    except ValueError as error:
        raise ConfigError("--token_buckets", ",".join(words), "integers with commas between them") from error
