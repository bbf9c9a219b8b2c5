"""The engine configuration: three immutable groups of options, and `EngineConfig`, which contains them.

Owns: every option with its default, unit, limit and help text, the checks across groups, and the conversion
of options that depend on the device or the model. A value that cannot work raises a `ConfigError` that names
the field, at construction. Checks that need the model (context length against pages, heads against devices)
follow in `resolve_context_tokens` and in the runner.
Does not know: models, devices, or the code of policies.
Called by nearly all packages; `core.options` and `commands.engine_flags` derive checks, docstrings and
command-line flags from the fields.
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
_STAGED_BYTES = 10**9  # chunks in transit per direction and device: about 20 ms of copying
_MIN_STAGED_PAGES = 64  # a history of 2,000 tokens in chunks of 32
_NUM_BUCKETS_ELSEWHERE = 4  # few, because models are small there and compiling dominates the start
_NUM_RUNNING = 64  # of simulations and of runners without a device
MAX_NUM_RUNNING = 256
"""The most requests in the batch that a start derives."""
SMALL_STEP_TOKENS = 256
"""The most tokens of a step beside replies over `target_tpot_ms`: a step of decodes takes nearly as long."""
USUAL_STEP_TOKENS = 512
"""The most tokens of a step beside replies within `target_tpot_ms`, unless enough prompts wait."""
CHUNK_SIZES_TOKENS = (16, 32, 64)
NUM_BUCKETS_GPU = 12  # fewer cause more padding, more take longer to compile: lab/docs/step_sizes.md
ALL_REDUCES = ("auto", "xla", "jax_triton")
DECODE_MATMULS = EXPERT_MATMULS = ("auto", "xla")
WEIGHTS_DTYPES = ("int8", "fp8")
COST_CHOICES = ("auto", "analytic")
TOOL_CALL_PARSERS = (
    *("auto", "none", "hermes", "qwen3_xml", "llama3_json", "pythonic", "mistral", "mistral_v3"),
    *("deepseek_v3", "deepseek_v31", "kimi_k2", "harmony"),
)
REASONING_PARSERS = ("auto", "none", "think", "mistral", "harmony")
PROMPT_ORDERS = ("arrival", "work_left")
POLICIES = ("retention", "learned", "lru", "conversation", "trailing")
SPECULATIONS = ("off", "history")
_MAX_DRAFT_TOKENS = 8
_MOST_DRAFT_TOKENS = 32
_MAX_DRAFT_SAMPLES = 128  # above it a further token costs a step more than most drafts save
_PART = number("in [0, 1)", lambda value: 0 <= value < 1)
_SHARE = number("above 0 and at most 1", lambda value: 0 < value <= 1)
_COST_PROFILE = Limit(
    f"one of {COST_CHOICES}, or a path as a string", lambda value: isinstance(value, str) and value != ""
)
_SECONDS = number("above 0 seconds", lambda value: value > 0)


@documented
@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache of conversations."""

    gpu_pages: int | None = option(
        None,
        optional(count(2)),
        "Pages of device memory for the KV cache; a page holds one chunk. A dummy page is added. None: as "
        "many as `gpu_memory_fraction` of a GPU holds, and on a CPU as many as a quarter of the machine's or "
        "the container's memory holds, for at most 16,384 tokens or four contexts.",
    )
    gpu_memory_fraction: float | None = option(
        None,
        optional(_SHARE),
        "Replaces `gpu_pages` on GPUs: the share of each GPU's memory that weights, steps, chunks in transit "
        "and pages take together. None: 0.9, or what JAX may use if that is less.",
    )
    gpu_reserved_bytes: int | None = option(
        None,
        optional(count(0)._replace(words="an integer number of bytes, at least 0")),
        "Bytes of every device within `gpu_memory_fraction` that are left to communication between devices "
        "and to the trials of the compiler. None: 0 on one device, and 1 GiB on each of several.",
        unit="bytes",
    )
    cpu_pages: int | None = option(
        None,
        optional(count(0)),
        "Chunks that pinned host memory holds in addition; 0 disables the host tier (the paper's \"Pensieve "
        '(GPU cache)"). None: as many as `cpu_memory_fraction` holds; 0 beside `gpu_pages`.',
    )
    cpu_bytes: int | None = option(
        None,
        optional(count(0)._replace(words="an integer number of bytes, at least 0")),
        "Replaces `cpu_pages`: bytes of host memory for all devices together, on a command line also as "
        "16GiB or 40GB. Up to `max_num_staged_pages` chunks in transit are added.",
        unit="bytes",
    )
    cpu_memory_fraction: float | None = option(
        None,
        optional(_SHARE),
        "Replaces `cpu_pages`: the share of free host memory that the host tier takes, chunks in transit "
        "included. None: for GPUs 0.5, at most 64 GiB for each; on a CPU an eighth of its memory, at most 1 "
        "GiB; nothing beside `gpu_pages`, or without `stateful`.",
    )
    engines_on_host: int = option(
        1,
        count(1),
        "Engines that run on this machine at the same time, at least the number of `--replicas`. Shares of "
        "its memory, given or by default, are divided among them, except those of GPUs. Exact numbers count "
        "for each engine.",
    )
    chunk_tokens: int = option(
        32,
        one_of(CHUNK_SIZES_TOKENS),
        "Tokens per chunk, the unit of caching and eviction, and per page.",
    )
    kv_dtype: str | None = option(
        None,
        optional(one_of(KV_DTYPES)),
        "Storage type of the KV cache in both tiers. int8 and float8_e4m3fn, with a scale for the key and "
        "the value of each token and KV head, hold nearly twice the tokens of 16-bit types, and answers "
        "differ slightly. None: the model's dtype, which is lossless.",
    )
    pack_host: bool | None = option(
        None,
        optional(TRUTH),
        "Pack chunks losslessly to 3/4 of their bytes before they leave the device. Host memory then holds "
        "1/3 more chunks, and copies are 1/4 smaller. Only for a KV cache in bfloat16; None enables it "
        "wherever possible.",
    )
    policy: str = option(
        "retention",
        one_of(POLICIES),
        "Eviction policy: retention (the paper's section 4.3.1), learned (by observed return times of "
        "similar conversations), lru, conversation (whole histories, as CachedAttention) or trailing (tail "
        "first, as prefix caches).",
    )
    cost_profile: str = option(
        "auto",
        _COST_PROFILE,
        "The cost of recomputing a chunk, for the policies retention and learned. auto uses the package's "
        "profile of this model and device. Without one, on an accelerator, it measures a few steps at the "
        "start, which takes seconds, and stores the result for later starts; on a CPU it equals analytic. "
        "analytic counts operations. A path names a JSON file written by `pensieve profile`.",
    )
    reserve_fraction: float = option(
        0.10,
        _PART,
        "A new request is admitted only if at least this share of the pages, rounded up, stays available "
        "afterwards (the paper's section 4.3.5 requires more than the share). Waived while nothing runs.",
    )
    swap_out_fraction: float = option(
        0.25,
        _PART,
        "While less than this share of the pages is free or has a copy in host memory, idle chunks are "
        "copied out ahead of time (the paper's section 4.3.2): a few per step, or more if over half of the "
        "share is missing.",
    )
    retrieval_priority: bool = option(
        True,
        TRUTH,
        "Copy no chunk out ahead of time while one is being copied in (the paper's section 5).",
    )
    prefetch: bool = option(True, TRUTH, "Copy in the chunks of queued requests while others run.")
    max_idle_conversations: int | None = option(
        None,
        optional(count(1)),
        "The most idle conversations to keep. When one more becomes idle, the least recently active one is "
        "ended, including its history. None keeps all.",
    )
    idle_ttl_s: float | None = option(
        None,
        optional(_SECONDS),
        "Idle time in seconds after which a conversation is ended, including its history. None: never.",
    )

    def __post_init__(self) -> None:
        """Raise ConfigError for invalid values within the group."""
        check_options(self, "cache.")
        require(
            self.cpu_bytes is None or not self.cpu_pages,
            "cache.cpu_bytes",
            self.cpu_bytes,
            f"None beside cache.cpu_pages ({self.cpu_pages}): give one of the two",
        )
        for share, exact in (
            ("gpu_memory_fraction", "gpu_pages"),
            ("cpu_memory_fraction", "cpu_pages"),
            ("cpu_memory_fraction", "cpu_bytes"),
        ):
            number = getattr(self, exact)
            require(
                getattr(self, share) is None or number is None,
                f"cache.{share}",
                getattr(self, share),
                f"None beside cache.{exact} ({number}): give one of the two",
            )
        require(
            not self.pack_host or self.kv_dtype is None,
            "cache.pack_host",
            self.pack_host,
            f"None or False beside cache.kv_dtype ({self.kv_dtype!r}): only bfloat16 is packed",
        )

    @property
    def num_gpu_pages(self) -> int:
        """Pages of the device; the configuration must have a number of them, as that of a running engine."""
        assert self.gpu_pages is not None, "cache.gpu_pages is not derived from the machine yet"
        return self.gpu_pages

    @property
    def num_cpu_pages(self) -> int:
        """Slots of host memory; 0 if the configuration has no number of them."""
        return self.cpu_pages or 0

    @property
    def has_given_host_tier(self) -> bool:
        """Whether a field says how much host memory to take, if any."""
        return any(one is not None for one in (self.cpu_pages, self.cpu_bytes, self.cpu_memory_fraction))

    @property
    def reserve_pages(self) -> int:
        """Pages that must stay available when a request joins running ones."""
        # Round first: 0.1 * 70 is slightly above 7 in floating point, and must give 7 pages.
        return math.ceil(round(self.num_gpu_pages * self.reserve_fraction, 6))

    @property
    def clean_pages(self) -> int:
        """Pages that swap-out ahead of time keeps free or copied."""
        return int(self.num_gpu_pages * self.swap_out_fraction)


@documented
@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The limits of a step."""

    max_num_running: int | None = option(
        None,
        optional(count(1)),
        "The most requests in the batch. None: the largest power of two from 16 to 256 for which the pages "
        "hold 512 tokens per request and a step's list of pages is at most 1 MiB.",
    )
    max_num_batched_tokens: int = option(
        USUAL_STEP_TOKENS,
        count(1),
        "The most query tokens of a step. With a smaller value, prompts take more steps, and decodes wait "
        "less for each step. It must leave room for one chunk beside one decode token per running request, "
        "so that the oldest request always advances.",
    )
    prompt_order: str = option(
        "work_left",
        one_of(PROMPT_ORDERS),
        "Which prompt of the batch a step computes first. arrival: the oldest. work_left: the one with the "
        "least time left to compute, where each second of waiting outweighs a quarter of a second of work. "
        "Up to 8 prompts are then in progress, and first tokens come sooner on average.",
    )
    target_tpot_ms: float | None = option(
        None,
        optional(number("above 0 milliseconds", lambda value: 0 < value < math.inf)),
        "Milliseconds per later token that running replies should take on average. Beside replies over the "
        "target, a step has at most 256 tokens, or 512 while over a quarter of a second of prompts waits. "
        "Beside others it has at most 512, or up to max_num_batched_tokens while much more waits than it "
        "takes. None: always up to max_num_batched_tokens.",
    )
    prompt_steps: int = option(
        0,
        count(0),
        "0: a step computes all tokens of prompts and recomputation that fit. N > 0: while other requests "
        "decode, a step computes 1/N of the missing tokens, or fills 256 tokens if that is more.",
    )
    max_num_rows: int | None = option(
        None,
        beside_others("None or at least max_num_running"),
        "The most sub-requests of a step; None is twice `max_num_running`.",
    )
    max_context_tokens: int | None = option(
        None,
        optional(count(2)),
        "The longest history + turn in tokens; None: as long as the model and the pool allow.",
    )
    token_buckets: tuple[int, ...] | None = option(
        None,
        beside_others("None or ascending integers that end with max_num_batched_tokens"),
        "Padded step sizes, such as 64,256,1024; None derives up to `max_num_buckets` of them.",
    )
    max_num_buckets: int | None = option(
        None,
        optional(count(1)),
        "The most step sizes to derive. Each is compiled before serving, once for all layer groups of the "
        "same size. None is 12 on GPUs, and 4 for an engine on other devices.",
    )
    speculation: str = option(
        "off",
        one_of(SPECULATIONS),
        "Tokens that a step tries ahead. history drafts what followed where the conversation's last tokens "
        "occurred before, and keeps of it what the model would have sampled, so replies do not change. It "
        "drafts only while few requests run and enough drafts hold.",
    )
    max_draft_tokens: int | None = option(
        None,
        optional(
            Limit(
                f"an integer from 1 to {_MOST_DRAFT_TOKENS}",
                lambda value: is_count(value, 1) and value <= _MOST_DRAFT_TOKENS,
            )
        ),
        f"The most tokens that a request drafts in a step. None: {_MAX_DRAFT_TOKENS}, or 0 without "
        "`speculation`.",
    )
    unified: bool = option(
        True,
        TRUTH,
        "False pauses decodes while a new or returning request can compute missing tokens: a step contains "
        "either prompts and recomputation or decodes. For comparison (the paper's Figure 13).",
    )

    def __post_init__(self) -> None:
        """Raise ConfigError for invalid values within the group."""
        check_options(self, "scheduler.")
        require(
            self.max_num_rows is None or is_count(self.max_num_rows, self.max_num_running or 1),
            "scheduler.max_num_rows",
            self.max_num_rows,
            f"None or at least max_num_running ({self.max_num_running or 1})",
        )
        require(
            self.target_tpot_ms is None or self.max_num_batched_tokens > SMALL_STEP_TOKENS,
            "scheduler.target_tpot_ms",
            self.target_tpot_ms,
            f"None beside max_num_batched_tokens ({self.max_num_batched_tokens}) up to {SMALL_STEP_TOKENS}: "
            "all steps are small then",
        )
        require(
            self.max_draft_tokens is None or self.speculation != "off",
            "scheduler.max_draft_tokens",
            self.max_draft_tokens,
            'None beside scheduler.speculation="off"',
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
    def running_limit(self) -> int:
        """The most requests in the batch: `max_num_running`, or 64 where no machine has determined it."""
        return self.max_num_running or _NUM_RUNNING

    @property
    def row_limit(self) -> int:
        """The most sub-requests of a step: `max_num_rows` or its default."""
        return self.max_num_rows or 2 * self.running_limit

    @property
    def draft_limit(self) -> int:
        """The most tokens that a request drafts in a step; 0 without speculation."""
        return 0 if self.speculation == "off" else self.max_draft_tokens or _MAX_DRAFT_TOKENS

    @property
    def sample_limit(self) -> int:
        """The most ids that a step samples: one for each request, and one more for each drafted token."""
        with_drafts = self.running_limit * (1 + self.draft_limit)
        return max(self.running_limit, min(with_drafts, _MAX_DRAFT_SAMPLES))

    @property
    def bucket_limit(self) -> int:
        """The most step sizes to derive: `max_num_buckets` or its default on GPUs."""
        return self.max_num_buckets or NUM_BUCKETS_GPU


@documented
@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """The execution of steps on the device."""

    attention_backend: str = option(
        "auto",
        one_of(ATTENTION_BACKENDS),
        "Attention kernel: auto (the fastest that supports this model and device), xla, pallas_triton, "
        "pallas_mosaic_gpu (NVIDIA Hopper) or jax_triton (needs the extra `triton`).",
    )
    tensor_parallel_size: int = option(1, count(1), "Devices that share each layer (axis `tp` of the mesh).")
    all_reduce: str = option(
        "auto",
        one_of(ALL_REDUCES),
        "All-reduce over several devices: auto (the fastest supported), xla (its own collectives) or "
        "jax_triton (kernels that access the memory of peer devices; for at most four NVIDIA GPUs of one "
        "process, with the extra `triton`).",
    )
    weights_dtype: str | None = option(
        None,
        optional(one_of(WEIGHTS_DTYPES)),
        "Format in 8 bits in which layers keep their weights, with a scale for each output: int8, or fp8 "
        "(e4m3). They take half the memory of 16-bit types, small steps read half the bytes, and answers "
        "differ slightly. The codes are made while loading. None: as the checkpoint has them.",
    )
    decode_matmul: str = option(
        "auto",
        one_of(DECODE_MATMULS),
        "Matrix multiplication of small steps with a layer's weights: auto (the fastest supported) or xla.",
    )
    expert_matmul: str = option(
        "auto",
        one_of(EXPERT_MATMULS),
        "Products of a mixture of experts: auto (the fastest supported) or xla. Other models have none: "
        "it changes nothing there.",
    )
    num_layer_groups: int | None = option(
        None,
        optional(count(1)),
        "Number of layer groups, at most the number of layers. A step runs one group after the other, and "
        "chunks are copied between tiers one piece per group, so that one group computes while the pieces of "
        "the next are copied. More pieces cost more host time on each device and make bulk copies slower. "
        "None: 2 on one device, and 1 on several, where the pieces of a device are small already.",
    )
    max_num_staged_pages: int = option(
        128,
        count(1),
        "The most chunks in transit per direction. Device memory for three times as many is reserved beside "
        "the pool. For large models the number is lowered to what 1 GB per device holds, but not below 64.",
    )
    max_logprobs: int = option(
        20, count(1), "The most top alternatives whose logprobs a request may ask for."
    )
    max_banned_ids: int = option(
        8,
        count(1),
        "The most token ids that `min_tokens` can ban from sampling (end-of-sequence and stop ids of one "
        "request).",
    )
    penalties: bool = option(
        True,
        TRUTH,
        "Whether turns may have frequency, presence and repetition penalties. For their counts, a device "
        "keeps 17 bits for each id of the vocabulary and each of max_num_running requests.",
    )
    max_position_embeddings: int | None = option(
        None,
        optional(count(2)),
        "Context of the model, in tokens; None keeps its own. Learned positions cannot have a longer one.",
    )
    random_seed: int = option(0, count(0), "Seed of `random:` weights, and of a launcher's random choices.")
    compilation_cache_dir: str | None = option(
        None,
        optional(PATH),
        "Directory in which compiled steps are stored for later starts; None stores none. A start executes "
        "its files, so it must be your own and only you may have write access. Beside the steps of the last "
        "start it contains up to 1 GiB of the most recent others, and the files of JAX's own cache.",
    )

    def __post_init__(self) -> None:
        """Raise ConfigError for invalid values within the group."""
        check_options(self, "runner.")


@documented
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The complete engine configuration."""

    stateful: bool = option(
        True,
        TRUTH,
        "Keep a conversation's KV cache between turns. False frees it when a turn ends and recomputes the "
        "history with every turn, as the baseline of the paper's section 6 does.",
    )
    tool_call_parser: str = option(
        "auto",
        one_of(TOOL_CALL_PARSERS),
        "Format in which the model writes tool calls. auto takes the one whose words the chat template has, "
        "and none reads no calls.",
    )
    reasoning_parser: str = option(
        "auto",
        one_of(REASONING_PARSERS),
        "Format in which the model marks its reasoning. auto takes the one whose words the chat template "
        "has, and none leaves reasoning in the text.",
    )
    cache: CacheConfig = field(
        default_factory=CacheConfig, metadata=part(CacheConfig, "The KV cache of conversations.")
    )
    scheduler: SchedulerConfig = field(
        default_factory=SchedulerConfig, metadata=part(SchedulerConfig, "The limits of a step.")
    )
    runner: RunnerConfig = field(
        default_factory=RunnerConfig, metadata=part(RunnerConfig, "The execution of steps on the device.")
    )

    def __post_init__(self) -> None:
        """Raise ConfigError for groups that do not fit together."""
        check_options(self, "")
        least = (self.scheduler.max_num_running or 1) + self.cache.chunk_tokens
        require(
            self.scheduler.max_num_batched_tokens >= least,
            "scheduler.max_num_batched_tokens",
            self.scheduler.max_num_batched_tokens,
            f"at least max_num_running + cache.chunk_tokens ({least}), so that the oldest request advances",
        )

    def with_gpu_pages(self, num_pages: int) -> EngineConfig:
        """Return a copy with `num_pages` pages in place of `cache.gpu_memory_fraction`."""
        return replace(self, cache=replace(self.cache, gpu_pages=num_pages, gpu_memory_fraction=None))

    def with_cpu_slots(self, num_slots: int) -> EngineConfig:
        """Return a copy with `num_slots` chunks of host memory in place of bytes or a share."""
        cache = replace(self.cache, cpu_pages=num_slots, cpu_bytes=None, cpu_memory_fraction=None)
        return replace(self, cache=cache)

    def with_engines_on_host(self, num_engines: int) -> EngineConfig:
        """Return a copy for one of at least `num_engines` engines that start on one host at the same time."""
        num_engines = max(num_engines, self.cache.engines_on_host)
        return replace(self, cache=replace(self.cache, engines_on_host=num_engines))

    @property
    def wants_host_tier(self) -> bool:
        """Whether host memory is to be derived, as no field says anything of it."""
        return self.stateful and self.cache.gpu_pages is None and not self.cache.has_given_host_tier

    @property
    def asks_for_host_tier(self) -> bool:
        """Whether a field or the default asks for host memory; how much it gets, the machine decides."""
        cache = self.cache
        return bool(cache.cpu_pages or cache.cpu_bytes or cache.cpu_memory_fraction) or self.wants_host_tier

    def with_weights_dtype(self, weights_dtype: str | None) -> EngineConfig:
        """Return a copy with the format that the model's weights have, which a checkpoint may determine."""
        return replace(self, runner=replace(self.runner, weights_dtype=weights_dtype))

    def with_num_running(self, num_running: int | None) -> EngineConfig:
        """Return a copy with at most `num_running` requests in the batch; None leaves the number open."""
        return replace(self, scheduler=replace(self.scheduler, max_num_running=num_running))

    def with_num_buckets(self, *, on_gpu: bool) -> EngineConfig:
        """Return a copy in which `scheduler.max_num_buckets` has its default for this device, if None."""
        if self.scheduler.max_num_buckets is not None:
            return self
        num_buckets = NUM_BUCKETS_GPU if on_gpu else _NUM_BUCKETS_ELSEWHERE
        return replace(self, scheduler=replace(self.scheduler, max_num_buckets=num_buckets))

    def with_staged_pages(self, page_bytes: int) -> EngineConfig:
        """Return a copy with `runner.max_num_staged_pages` lowered to what keeps a device's transfers busy.

        Args:
          page_bytes: bytes of a device's share of a page.
        """
        enough = max(_STAGED_BYTES // page_bytes, _MIN_STAGED_PAGES)
        num_pages = min(self.runner.max_num_staged_pages, enough)
        return replace(self, runner=replace(self.runner, max_num_staged_pages=num_pages))

    def with_cpu_pages(self, page_bytes: int) -> EngineConfig:
        """Return a copy with `cache.cpu_bytes` converted to pages of `page_bytes` on all devices together.

        Raises:
          ConfigError: `cpu_bytes` is smaller than one page.
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
        return self.with_cpu_slots(num_bytes // page_bytes)

    @property
    def num_count_slots(self) -> int:
        """Number of turns whose ids are counted on the device at a time."""
        return self.scheduler.running_limit if self.runner.penalties else 0

    def resolve_context_tokens(self, model_max_tokens: int) -> int:
        """Return the longest context in tokens: the configured one, or what model and pool allow.

        A pool without a size yet does not limit it.

        Raises:
          ConfigError: `max_context_tokens` exceeds the model's positions or the whole page pool.
        """
        num_pages = self.cache.gpu_pages
        pool_tokens = model_max_tokens if num_pages is None else num_pages * self.cache.chunk_tokens
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
    """Return `config`, or the defaults for None; raises ConfigError for another type."""
    if config is None:
        return EngineConfig()
    if not isinstance(config, EngineConfig):
        raise ConfigError("config", config, "an EngineConfig", "wrap the group: EngineConfig(cache=...)")
    return config
