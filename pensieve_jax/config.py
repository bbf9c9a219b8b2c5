"""What an engine is told before it starts: three frozen groups, and the whole that is made of them.

Owns: every tunable with its default, unit and limit. A value that cannot work is a `ConfigError` that
names the field, at construction; what depends on the model (context length against pages, heads against
devices) is checked where both are known, in `resolve_context_tokens` and in the runner.
Does not know: models, devices, policies' code.
Called by: people, scripts, and every layer above `core`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeGuard

from pallas_kernels.attention_names import ATTENTION_BACKENDS
from pensieve_jax.core.errors import ConfigError

CHUNK_SIZES_TOKENS = (16, 32, 64)
_STAGED_BYTES = 10**9  # of chunks in transit, each way and device: some 20 ms of copying
_LEAST_STAGED_PAGES = 64  # a history of 2,000 tokens in chunks of 32
_NUM_BUCKETS_GPU = 8  # where 4 would cost twice as much padding or more: docs/steps.md
_NUM_BUCKETS_ELSEWHERE = 4  # where models are small, and compiling is most of what is waited for
POLICIES = ("retention", "lru", "conversation", "trailing")


def _require(ok: bool, field_name: str, value: object, limit: str) -> None:
    if not ok:
        raise ConfigError(field_name, value, limit)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The cache of conversation state.

    Attributes:
      gpu_pages: pages of device memory for KV state; a page holds one chunk. A dummy page comes on top.
      gpu_memory_fraction: instead of `gpu_pages`, which is not looked at then: the share that weights, pages
        and chunks in transit may take of what JAX may use of a device (75% of a GPU, unless the environment
        variable XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise). The rest is for a step's temporaries.
      cpu_pages: chunks that pinned host memory holds beside them; 0 is no host tier (the paper's
        "Pensieve (GPU cache)").
      cpu_bytes: the same as bytes of host memory, all devices together; give one of the two. Chunks in
        transit come on top, up to `runner.max_num_staged_pages` of them.
      chunk_tokens: consecutive tokens of a chunk, the unit of caching and eviction: 16, 32 or 64.
      policy: whose chunks leave a tier first: "retention" (the paper's section 4.3.1), "lru",
        "conversation" (whole histories, as CachedAttention) or "trailing" (tail first, as prefix caches).
      cost_profile: what `scripts/profile_costs.py` measured, as a JSON file; None is an analytic estimate.
      reserve_fraction: new requests join only while more than this share of `gpu_pages` stays available
        (the paper's section 4.3.5); waived while nothing runs.
      swap_out_fraction: while less than this share of `gpu_pages` is free or has a copy in host memory,
        idle chunks are copied out ahead of time (the paper's section 4.3.2), few a step unless over half of
        it is missing.
      retrieval_priority: no chunk is copied out ahead of time while one is being copied in (the paper's
        section 5).
      prefetch: copy in what queued requests will need while others run.
      max_idle_conversations: conversations kept while no turn of theirs runs; the least recently active
        is ended, history included, when one more goes idle. None keeps all.
      idle_ttl_s: a conversation idle for longer is ended, history included. None keeps it for ever.
    """

    gpu_pages: int = 512
    gpu_memory_fraction: float | None = None
    cpu_pages: int = 0
    cpu_bytes: int | None = None
    chunk_tokens: int = 32
    policy: str = "retention"
    cost_profile: str | None = None
    reserve_fraction: float = 0.10
    swap_out_fraction: float = 0.25
    retrieval_priority: bool = True
    prefetch: bool = True
    max_idle_conversations: int | None = None
    idle_ttl_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work by itself."""
        _require(_is_count(self.gpu_pages, 2), "cache.gpu_pages", self.gpu_pages, "an integer of at least 2")
        fraction = self.gpu_memory_fraction
        _require(
            fraction is None or (_is_number(fraction) and 0 < fraction <= 1),
            "cache.gpu_memory_fraction",
            fraction,
            "None, or above 0 and at most 1",
        )
        _require(_is_count(self.cpu_pages, 0), "cache.cpu_pages", self.cpu_pages, "an integer of at least 0")
        _require(
            self.cpu_bytes is None or _is_count(self.cpu_bytes, 0),
            "cache.cpu_bytes",
            self.cpu_bytes,
            "None or an integer number of bytes, at least 0",
        )
        _require(
            self.cpu_bytes is None or not self.cpu_pages,
            "cache.cpu_bytes",
            self.cpu_bytes,
            f"None beside cache.cpu_pages ({self.cpu_pages}): give one of the two",
        )
        _require(
            _is_count(self.chunk_tokens, 1) and self.chunk_tokens in CHUNK_SIZES_TOKENS,
            "cache.chunk_tokens",
            self.chunk_tokens,
            f"one of {CHUNK_SIZES_TOKENS}",
        )
        _require(self.policy in POLICIES, "cache.policy", self.policy, f"one of {POLICIES}")
        for name in ("reserve_fraction", "swap_out_fraction"):
            fraction = getattr(self, name)
            _require(_is_number(fraction) and 0 <= fraction < 1, f"cache.{name}", fraction, "in [0, 1)")
        for name in ("retrieval_priority", "prefetch"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"cache.{name}", value, "True or False")
        profile = self.cost_profile
        _require(
            profile is None or isinstance(profile, str),
            "cache.cost_profile",
            profile,
            "None or a path as a string",
        )
        bound, ttl_s = self.max_idle_conversations, self.idle_ttl_s
        _require(
            bound is None or _is_count(bound, 1),
            "cache.max_idle_conversations",
            bound,
            "None or an integer of at least 1",
        )
        _require(
            ttl_s is None or (_is_number(ttl_s) and ttl_s > 0),
            "cache.idle_ttl_s",
            ttl_s,
            "None or above 0 seconds",
        )

    @property
    def reserve_pages(self) -> int:
        """Pages that stay available when a request joins running ones."""
        return int(self.gpu_pages * self.reserve_fraction)

    @property
    def clean_pages(self) -> int:
        """Pages that swapping out ahead of time keeps free or copied."""
        return int(self.gpu_pages * self.swap_out_fraction)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What a step may hold.

    Attributes:
      max_num_running: requests in the batch at once.
      max_num_batched_tokens: query tokens of a step. It must leave a chunk's worth of room beside one
        decode token for every running request, so that the oldest request always advances.
      max_num_rows: sub-requests of a step, at least `max_num_running`; None is twice that.
      max_context_tokens: the longest history + turn; None is what the model and the pool allow.
      token_buckets: padded step sizes, ascending, the last one `max_num_batched_tokens`; None derives
        `max_num_buckets` of them (`scheduler.buckets`).
      max_num_buckets: how many sizes are derived. Each is compiled before serving, once for every group of
        layers. None is 8 on GPUs, and 4 where an engine is assembled for anything else.
      unified: False pauses generation while a new or returning request can compute what it misses: a step
        holds prompts and recomputation, or decodes, never both. For comparison (the paper's Figure 13).
    """

    max_num_running: int = 64
    max_num_batched_tokens: int = 1024
    max_num_rows: int | None = None
    max_context_tokens: int | None = None
    token_buckets: tuple[int, ...] | None = None
    max_num_buckets: int | None = None
    unified: bool = True

    @property
    def row_limit(self) -> int:
        """Sub-requests of a step: `max_num_rows`, or what it stands for."""
        return self.max_num_rows or 2 * self.max_num_running

    @property
    def bucket_limit(self) -> int:
        """Sizes that are derived: `max_num_buckets`, or what it stands for on GPUs."""
        return self.max_num_buckets or _NUM_BUCKETS_GPU

    def __post_init__(self) -> None:
        """Refuse what cannot work by itself."""
        for name in ("max_num_running", "max_num_batched_tokens"):
            value = getattr(self, name)
            _require(_is_count(value, 1), f"scheduler.{name}", value, "an integer of at least 1")
        _require(
            self.max_num_buckets is None or _is_count(self.max_num_buckets, 1),
            "scheduler.max_num_buckets",
            self.max_num_buckets,
            "None or an integer of at least 1",
        )
        _require(
            self.max_num_rows is None or _is_count(self.max_num_rows, self.max_num_running),
            "scheduler.max_num_rows",
            self.max_num_rows,
            f"None or at least max_num_running ({self.max_num_running})",
        )
        _require(
            self.max_context_tokens is None or _is_count(self.max_context_tokens, 2),
            "scheduler.max_context_tokens",
            self.max_context_tokens,
            "None or an integer of at least 2",
        )
        buckets = self.token_buckets
        if buckets is not None:
            _require(
                isinstance(buckets, tuple)
                and len(buckets) > 0
                and all(_is_count(bucket, 1) for bucket in buckets)
                and list(buckets) == sorted(set(buckets))
                and buckets[-1] == self.max_num_batched_tokens,
                "scheduler.token_buckets",
                buckets,
                "a tuple of ascending integers that ends with max_num_batched_tokens "
                f"({self.max_num_batched_tokens})",
            )
        _require(isinstance(self.unified, bool), "scheduler.unified", self.unified, "True or False")


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """How steps run on the device.

    Attributes:
      attention_backend: "auto" (the fastest that serves this model here), "xla", "pallas_triton",
        "pallas_mosaic_gpu" (NVIDIA Hopper) or "jax_triton" (needs the extra `triton`).
      tensor_parallel_size: devices that share each layer (axis `tp` of the mesh).
      num_layer_groups: parts of a step, each with its share of the layers, at most as many as there are
        layers. Chunks move between tiers in as many pieces, so that a part computes while the next one's
        pieces are copied; more and smaller pieces cost the host more, and bulk copies are slower.
      max_num_staged_pages: the most chunks on their way in, or out, at once. Three times as many are set
        aside in device memory beside the pool; so a real model gets no more than 1 GB of a device holds, but
        64 in any case.
      max_logprobs: the most top alternatives that a request may ask logprobs for.
      max_banned_ids: the most ids that `min_tokens` may have to keep from being sampled (end-of-sequence
        and stop ids of one request).
      max_position_embeddings: raises the context of a `random:` preset; None keeps the model's own.
      random_seed: of `random:` weights.
      compilation_cache_dir: where compiled steps outlive the process; None keeps none. They are run as they
        are found, so it must be a directory of one's own that nobody else can write to. Beside the steps of
        the last start it holds up to 1 GiB of others, the latest, and whatever JAX's own cache keeps.
    """

    attention_backend: str = "auto"
    tensor_parallel_size: int = 1
    num_layer_groups: int = 2
    max_num_staged_pages: int = 128
    max_logprobs: int = 8
    max_banned_ids: int = 8
    max_position_embeddings: int | None = None
    random_seed: int = 0
    compilation_cache_dir: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work by itself."""
        _require(
            self.attention_backend in ATTENTION_BACKENDS,
            "runner.attention_backend",
            self.attention_backend,
            f"one of {ATTENTION_BACKENDS}",
        )
        for name, at_least in (
            ("tensor_parallel_size", 1),
            ("num_layer_groups", 1),
            ("max_num_staged_pages", 1),
            ("max_logprobs", 1),
            ("max_banned_ids", 1),
            ("random_seed", 0),
        ):
            value = getattr(self, name)
            _require(
                _is_count(value, at_least), f"runner.{name}", value, f"an integer of at least {at_least}"
            )
        _require(
            self.max_position_embeddings is None or _is_count(self.max_position_embeddings, 2),
            "runner.max_position_embeddings",
            self.max_position_embeddings,
            "None or an integer of at least 2",
        )
        directory = self.compilation_cache_dir
        _require(
            directory is None or isinstance(directory, str),
            "runner.compilation_cache_dir",
            directory,
            "None or a path as a string",
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The whole.

    Attributes:
      stateful: False frees a conversation's KV state when its turn ends and recomputes the history with
        every turn: the baseline of the paper's section 6.
      cache, scheduler, runner: the groups above.
    """

    stateful: bool = True
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)

    def __post_init__(self) -> None:
        """Refuse groups that do not fit together."""
        _require(isinstance(self.stateful, bool), "stateful", self.stateful, "True or False")
        for name, kind in (("cache", CacheConfig), ("scheduler", SchedulerConfig), ("runner", RunnerConfig)):
            _require(isinstance(getattr(self, name), kind), name, getattr(self, name), f"a {kind.__name__}")
        least = self.scheduler.max_num_running + self.cache.chunk_tokens
        _require(
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
        num_buckets = _NUM_BUCKETS_GPU if on_gpu else _NUM_BUCKETS_ELSEWHERE
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
        _require(
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
        _require(
            wanted <= model_max_tokens,
            "scheduler.max_context_tokens",
            wanted,
            f"at most the model's {model_max_tokens} positions",
        )
        _require(
            wanted <= pool_tokens,
            "cache.gpu_pages",
            self.cache.gpu_pages,
            f"at least {-(-wanted // self.cache.chunk_tokens)}, the pages of one sequence of "
            f"max_context_tokens ({wanted})",
        )
        return wanted
