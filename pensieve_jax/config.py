"""What an engine is told before it starts: three frozen groups, and the whole that is made of them.

Owns: how the groups fit together, and what is left to a device or a model until both are known. A value that
cannot work is a `ConfigError` that names the field, at construction; what depends on the model (context
length against pages, heads against devices) is checked where both are known, in `resolve_context_tokens` and
in the runner.
Does not know: models, devices, policies' code.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pallas_kernels.attention_names import ATTENTION_BACKENDS
from pensieve_jax.config_groups import (
    CHUNK_SIZES_TOKENS,
    NUM_BUCKETS_GPU,
    POLICIES,
    CacheConfig,
    RunnerConfig,
    SchedulerConfig,
)
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.core.options import TRUTH, check_options, documented, option, part, require

__all__ = [
    "ATTENTION_BACKENDS",
    "CHUNK_SIZES_TOKENS",
    "POLICIES",
    "CacheConfig",
    "EngineConfig",
    "RunnerConfig",
    "SchedulerConfig",
    "checked_config",
]

_STAGED_BYTES = 10**9  # of chunks in transit, each way and device: some 20 ms of copying
_LEAST_STAGED_PAGES = 64  # a history of 2,000 tokens in chunks of 32
_NUM_BUCKETS_ELSEWHERE = 4  # where models are small, and compiling is most of what is waited for


@documented
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The whole."""

    stateful: bool = option(
        True,
        TRUTH,
        "Keep a conversation's KV state between turns; False frees it when its turn ends and recomputes the "
        "history with every turn: the baseline of the paper's section 6.",
    )
    cache: CacheConfig = field(
        default_factory=CacheConfig, metadata=part(CacheConfig, "The cache of conversation state.")
    )
    scheduler: SchedulerConfig = field(
        default_factory=SchedulerConfig, metadata=part(SchedulerConfig, "What a step may hold.")
    )
    runner: RunnerConfig = field(
        default_factory=RunnerConfig, metadata=part(RunnerConfig, "How steps run on the device.")
    )

    def __post_init__(self) -> None:
        """Refuse groups that do not fit together."""
        check_options(self, "")
        least = self.scheduler.max_num_running + self.cache.chunk_tokens
        require(
            self.scheduler.max_num_batched_tokens >= least,
            "scheduler.max_num_batched_tokens",
            self.scheduler.max_num_batched_tokens,
            f"at least max_num_running + cache.chunk_tokens ({least}), so that the oldest request advances",
        )

    def with_gpu_pages(self, num_pages: int) -> EngineConfig:
        """The same with `cache.gpu_memory_fraction` turned into pages."""
        return replace(self, cache=replace(self.cache, gpu_pages=num_pages, gpu_memory_fraction=None))

    def with_num_buckets(self, *, on_gpu: bool) -> EngineConfig:
        """The same with what `scheduler.max_num_buckets` stands for here in place of None."""
        if self.scheduler.max_num_buckets is not None:
            return self
        num_buckets = NUM_BUCKETS_GPU if on_gpu else _NUM_BUCKETS_ELSEWHERE
        return replace(self, scheduler=replace(self.scheduler, max_num_buckets=num_buckets))

    def with_staged_pages(self, page_bytes: int) -> EngineConfig:
        """The same with `runner.max_num_staged_pages` lowered to what keeps a device's transfers busy.

        Args:
          page_bytes: of a device's share of a page.
        """
        enough = max(_STAGED_BYTES // page_bytes, _LEAST_STAGED_PAGES)
        num_pages = min(self.runner.max_num_staged_pages, enough)
        return replace(self, runner=replace(self.runner, max_num_staged_pages=num_pages))

    def with_cpu_pages(self, page_bytes: int) -> EngineConfig:
        """The same with `cache.cpu_bytes` turned into pages of `page_bytes`, all devices together.

        Raises:
          ConfigError: `cpu_bytes` does not hold a single page.
        """
        num_bytes = self.cache.cpu_bytes
        if num_bytes is None:
            return self
        require(
            num_bytes == 0 or num_bytes >= page_bytes,
            "cache.cpu_bytes",
            num_bytes,
            f"0 or at least the {page_bytes:,} bytes of a chunk",
        )
        return replace(self, cache=replace(self.cache, cpu_pages=num_bytes // page_bytes, cpu_bytes=None))

    def resolve_context_tokens(self, model_max_tokens: int) -> int:
        """The longest context served, in tokens: what is asked for, else what model and pool allow.

        A pool that is still to be sized (`cache.gpu_memory_fraction`) allows anything.

        Raises:
          ConfigError: `max_context_tokens` exceeds the model's positions or the whole page pool.
        """
        is_sized = self.cache.gpu_memory_fraction is None
        pool_tokens = self.cache.gpu_pages * self.cache.chunk_tokens if is_sized else model_max_tokens
        wanted = self.scheduler.max_context_tokens
        if wanted is None:
            return min(model_max_tokens, pool_tokens)
        require(
            wanted <= model_max_tokens,
            "scheduler.max_context_tokens",
            wanted,
            f"at most the model's {model_max_tokens} positions",
        )
        require(
            wanted <= pool_tokens,
            "cache.gpu_pages",
            self.cache.gpu_pages,
            f"at least {-(-wanted // self.cache.chunk_tokens)}, the pages of one sequence of "
            f"max_context_tokens ({wanted})",
        )
        return wanted


def checked_config(config: object) -> EngineConfig:
    """`config` itself, or the defaults for None; raises ConfigError for anything else."""
    if config is None:
        return EngineConfig()
    if not isinstance(config, EngineConfig):
        raise ConfigError("config", config, "an EngineConfig", "wrap the group: EngineConfig(cache=...)")
    return config
