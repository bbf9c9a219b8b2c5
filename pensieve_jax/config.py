"""What an engine is told before it starts: three frozen groups, and the whole that is made of them.

Owns: every tunable with its default, unit, limit and help, beside each other; how the groups fit together;
and what is left to a device or a model until both are known. A value that cannot work is a `ConfigError` that
names the field, at construction; what depends on the model (context length against pages, heads against
devices) is checked where both are known, in `resolve_context_tokens` and in the runner.
Does not know: models, devices, policies' code. Checks, docstrings and command-line flags are made of the
fields by `core.options` and `commands.engine_flags`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from pallas_kernels.attention_names import ATTENTION_BACKENDS, KV_DTYPES
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.core.options import (
    PATH,
    TRUTH,
    Limit,
    beside_others,
    check_options,
    count,
    documented,
    is_count,
    number,
    one_of,
    option,
    optional,
    part,
    require,
)

__all__ = [
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
CHUNK_SIZES_TOKENS = (16, 32, 64)
NUM_BUCKETS_GPU = 12  # fewer cost more padding, more take longer to compile: lab/docs/steps.md
ALL_REDUCES = ("auto", "xla", "jax_triton")
DECODE_MATMULS = ("auto", "xla")
COST_CHOICES = ("auto", "analytic")
POLICIES = ("retention", "learned", "lru", "conversation", "trailing")
_PART = number("in [0, 1)", lambda value: 0 <= value < 1)
_SHARE = number("above 0 and at most 1", lambda value: 0 < value <= 1)
_COST_PROFILE = Limit(
    f"one of {COST_CHOICES}, or a path as a string", lambda value: isinstance(value, str) and value != ""
)
_SECONDS = number("above 0 seconds", lambda value: value > 0)


@documented
@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The cache of conversation state."""

    gpu_pages: int = option(
        512,
        count(2),
        "Pages of device memory for KV state; a page holds one chunk. A dummy page comes on top.",
    )
    gpu_memory_fraction: float | None = option(
        None,
        optional(_SHARE),
        "Instead of `gpu_pages`, which is not looked at then: the share that weights, pages and chunks in "
        "transit may take of what JAX may use of a device (75% of a GPU, unless the environment variable "
        "XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise). The rest is for a step's temporaries.",
    )
    gpu_reserved_bytes: int | None = option(
        None,
        optional(count(0)._replace(words="an integer number of bytes, at least 0")),
        "Of every device, what that share leaves to exchanges between devices and to what compiling tries "
        "out; None is nothing on one device and 1 GiB on each of several.",
        unit="bytes",
    )
    cpu_pages: int = option(
        0,
        count(0),
        "Chunks that pinned host memory holds beside them; 0 is no host tier (the paper's \"Pensieve (GPU "
        'cache)").',
    )
    cpu_bytes: int | None = option(
        None,
        optional(count(0)._replace(words="an integer number of bytes, at least 0")),
        "Instead of `cpu_pages`: bytes of host memory, all devices together; on a command line 16GiB or "
        "40GB, say. Chunks in transit come on top, up to `max_num_staged_pages` of them.",
        unit="bytes",
    )
    chunk_tokens: int = option(
        32,
        one_of(CHUNK_SIZES_TOKENS),
        "Consecutive tokens of a chunk, the unit of caching and eviction, and so of a page.",
    )
    kv_dtype: str | None = option(
        None,
        optional(one_of(KV_DTYPES)),
        "What both tiers store KV state as: int8 or float8_e4m3fn, with a scale for the key and the value of "
        "each token and KV head, hold nearly twice the tokens that 16 bits do, and answers differ a little. "
        "None is the model's dtype, in which nothing is lost.",
    )
    pack_host: bool | None = option(
        None,
        optional(TRUTH),
        "Chunks leave the device in three quarters of their bytes, and every bit of them comes back: host "
        "memory holds a third more, and links carry a quarter less. It is for state in bfloat16; None is on "
        "wherever it can be.",
    )
    policy: str = option(
        "retention",
        one_of(POLICIES),
        "Whose chunks leave a tier first: retention (the paper's section 4.3.1), learned (by how soon "
        "conversations like these have returned so far), lru, conversation (whole histories, as "
        "CachedAttention) or trailing (tail first, as prefix caches).",
    )
    cost_profile: str = option(
        "auto",
        _COST_PROFILE,
        "The cost of recomputing a chunk, for the policies retention and learned. auto takes the profile "
        "that the package has of this model and device. Without one it measures a few steps at the start "
        "on an accelerator, which takes seconds, and keeps the result for later starts; on a CPU it is as "
        "analytic. analytic counts operations. A path is a JSON file that `pensieve profile` wrote.",
    )
    reserve_fraction: float = option(
        0.10,
        _PART,
        "New requests join only while at least this share of the pages, rounded up to whole ones, stays "
        "available behind them (the paper's section 4.3.5 wants more than it); waived while nothing runs.",
    )
    swap_out_fraction: float = option(
        0.25,
        _PART,
        "While less than this share of the pages is free or has a copy in host memory, idle chunks are "
        "copied out ahead of time (the paper's section 4.3.2), few a step unless over half of it is missing.",
    )
    retrieval_priority: bool = option(
        True,
        TRUTH,
        "No chunk is copied out ahead of time while one is being copied in (the paper's section 5).",
    )
    prefetch: bool = option(True, TRUTH, "Copy in what queued requests will need while others run.")
    max_idle_conversations: int | None = option(
        None,
        optional(count(1)),
        "Conversations kept while no turn of theirs runs; the least recently active is ended, history "
        "included, when one more goes idle. None keeps all.",
    )
    idle_ttl_s: float | None = option(
        None,
        optional(_SECONDS),
        "A conversation idle for longer, in seconds, is ended, history included. None keeps it for ever.",
    )

    def __post_init__(self) -> None:
        """Refuse what cannot work by itself."""
        check_options(self, "cache.")
        require(
            self.cpu_bytes is None or not self.cpu_pages,
            "cache.cpu_bytes",
            self.cpu_bytes,
            f"None beside cache.cpu_pages ({self.cpu_pages}): give one of the two",
        )
        require(
            not self.pack_host or self.kv_dtype is None,
            "cache.pack_host",
            self.pack_host,
            f"None or False beside cache.kv_dtype ({self.kv_dtype!r}): only bfloat16 is packed",
        )

    @property
    def reserve_pages(self) -> int:
        """Pages that stay available when a request joins running ones."""
        # A tenth of 70 pages is above 7 in binary, and still 7 pages.
        return math.ceil(round(self.gpu_pages * self.reserve_fraction, 6))

    @property
    def clean_pages(self) -> int:
        """Pages that swapping out ahead of time keeps free or copied."""
        return int(self.gpu_pages * self.swap_out_fraction)


@documented
@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What a step may hold."""

    max_num_running: int = option(64, count(1), "Requests in the batch at once.")
    max_num_batched_tokens: int = option(
        512,
        count(1),
        "Query tokens of a step. Prompts take more steps where it is smaller, and those who decode wait less "
        "for each. It must leave a chunk's worth of room beside one decode token for every running request, "
        "so that the oldest request always advances.",
    )
    prompt_steps: int = option(
        0,
        count(0),
        "0: a step computes all of prompts and recomputation that fits. Above: while others decode it takes "
        "one part in so many of what is missing, or what fills a step of 256 tokens if that is more.",
    )
    max_num_rows: int | None = option(
        None,
        beside_others("None or at least max_num_running"),
        "Sub-requests of a step; None is twice `max_num_running`.",
    )
    max_context_tokens: int | None = option(
        None,
        optional(count(2)),
        "The longest history + turn; None is what the model and the pool allow.",
    )
    token_buckets: tuple[int, ...] | None = option(
        None,
        beside_others("None or ascending integers that end with max_num_batched_tokens"),
        "Padded step sizes, such as 64,256,1024; None derives up to `max_num_buckets` of them.",
    )
    max_num_buckets: int | None = option(
        None,
        optional(count(1)),
        "How many sizes are derived. Each is compiled before serving, once for all groups of as many "
        "layers. None is 12 on GPUs, and 4 where an engine is assembled for anything else.",
    )
    unified: bool = option(
        True,
        TRUTH,
        "False pauses generation while a new or returning request can compute what it misses: a step holds "
        "prompts and recomputation, or decodes, never both. For comparison (the paper's Figure 13).",
    )

    def __post_init__(self) -> None:
        """Refuse what cannot work by itself."""
        check_options(self, "scheduler.")
        require(
            self.max_num_rows is None or is_count(self.max_num_rows, self.max_num_running),
            "scheduler.max_num_rows",
            self.max_num_rows,
            f"None or at least max_num_running ({self.max_num_running})",
        )
        buckets = self.token_buckets
        if buckets is not None:
            require(
                isinstance(buckets, tuple)
                and len(buckets) > 0
                and all(is_count(bucket, 1) for bucket in buckets)
                and list(buckets) == sorted(set(buckets))
                and buckets[-1] == self.max_num_batched_tokens,
                "scheduler.token_buckets",
                buckets,
                "a tuple of ascending integers that ends with max_num_batched_tokens "
                f"({self.max_num_batched_tokens})",
            )

    @property
    def row_limit(self) -> int:
        """Sub-requests of a step: `max_num_rows`, or what it stands for."""
        return self.max_num_rows or 2 * self.max_num_running

    @property
    def bucket_limit(self) -> int:
        """Sizes that are derived: `max_num_buckets`, or what it stands for on GPUs."""
        return self.max_num_buckets or NUM_BUCKETS_GPU


@documented
@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """How steps run on the device."""

    attention_backend: str = option(
        "auto",
        one_of(ATTENTION_BACKENDS),
        "What computes attention: auto (the fastest that serves this model here), xla, pallas_triton, "
        "pallas_mosaic_gpu (NVIDIA Hopper) or jax_triton (needs the extra `triton`).",
    )
    tensor_parallel_size: int = option(1, count(1), "Devices that share each layer (axis `tp` of the mesh).")
    all_reduce: str = option(
        "auto",
        one_of(ALL_REDUCES),
        "What adds up the partial sums of several devices: auto (the fastest that runs here), xla (its own "
        "collectives) or jax_triton (kernels that reach into the other devices' memory; NVIDIA GPUs of one "
        "process, at most four, with the extra `triton`).",
    )
    decode_matmul: str = option(
        "auto",
        one_of(DECODE_MATMULS),
        "What multiplies the tokens of a small step with a layer's weights: auto (the fastest here) or xla.",
    )
    num_layer_groups: int | None = option(
        None,
        optional(count(1)),
        "Parts of a step, each with its share of the layers, at most as many as there are layers. Chunks "
        "move between tiers in as many pieces, so that a part computes while the next one's pieces are "
        "copied; more and smaller pieces cost the host more, on each device, and bulk copies are slower. "
        "None: 2 on one device, 1 on several, where a device's pieces are small as it is.",
    )
    max_num_staged_pages: int = option(
        128,
        count(1),
        "The most chunks on their way in, or out, at once. Three times as many are set aside in device "
        "memory beside the pool; so a real model gets no more than 1 GB of a device holds, but 64 in any "
        "case.",
    )
    max_logprobs: int = option(8, count(1), "The most top alternatives that a request may ask logprobs for.")
    max_banned_ids: int = option(
        8,
        count(1),
        "The most ids that `min_tokens` may have to keep from being sampled (end-of-sequence and stop ids of "
        "one request).",
    )
    max_position_embeddings: int | None = option(
        None, optional(count(2)), "Raises the context of a `random:` preset; None keeps the model's own."
    )
    random_seed: int = option(0, count(0), "Of `random:` weights, and of what a launcher draws.")
    compilation_cache_dir: str | None = option(
        None,
        optional(PATH),
        "Directory where compiled steps outlive the process; None keeps none. They are run as they are "
        "found, so it must be your own, and nobody else may be able to write to it. Beside the steps of the "
        "last start it holds up to 1 GiB of others, the latest, and whatever JAX's own cache keeps.",
    )

    def __post_init__(self) -> None:
        """Refuse what cannot work by itself."""
        check_options(self, "runner.")


@documented
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Hold the complete engine configuration."""

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
