"""Configuration of a re-batching engine.

Owns: the options, with their limits, checks and help texts.
Does not know: models, queries, or devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from pallas_kernels.attention_names import ATTENTION_BACKENDS, RING_DECODE_BACKENDS
from pensieve_jax.core.options import (
    PATH,
    TRUTH,
    Limit,
    check_options,
    count,
    documented,
    is_count,
    one_of,
    option,
    optional,
    require,
)

INSERTIONS = ("embed", "shape", "none")
PREFILLS = ("similar", "together")
PAGE_TOKENS = 32
"""Tokens per page of a prefill. Row lengths are multiples of it."""

_LENGTHS = Limit(
    f"a tuple of rising multiples of {PAGE_TOKENS}",
    lambda value: (
        isinstance(value, tuple)
        and len(value) > 0
        and all(is_count(one, PAGE_TOKENS) and one % PAGE_TOKENS == 0 for one in value)
        and all(a < b for a, b in pairwise(value))
    ),
)


@documented
@dataclass(frozen=True, kw_only=True)
class RebatchingConfig:
    """Limits of a `RebatchingEngine`."""

    max_batch: int = option(8, count(1), "Rows of the batch: queries that decode together.")
    kv_bytes: int = option(
        2**30,
        count(1),
        "Device memory for KV caches. It holds the batch, whose length and width follow from it, and the "
        "rows that enter or leave the batch; the length of one row is always kept free for them. A change "
        "of the batch's shape needs one more layer for a moment.",
        unit="bytes",
    )
    insertion: str = option(
        "embed",
        one_of(INSERTIONS),
        "How a query joins a running batch. embed: it is prefilled separately, and its KV cache is copied "
        "into a row (vector embedding, section 4.2 of Baton). shape: its prompt runs as a step of the whole "
        "batch, and the other rows are padded to it (vector shaping, section 4.1). none: it waits until the "
        "whole batch has finished.",
    )
    prefill: str = option(
        "similar",
        one_of(PREFILLS),
        "Which prompts share a prefill. similar: prompts of similar length, ahead of need. together: prompts "
        "that will decode together, padded to the longest (only with insertion none, as in transformers).",
    )
    preemptive: bool = option(
        False,
        TRUTH,
        "Let a query of higher priority take the row of the query with the lowest priority at once. The "
        "suspended query resumes later where it stopped (section 4.3).",
    )
    prefill_ahead: int | None = option(
        None, optional(count(0)), "Most prefilled queries that wait for a row. None means `max_batch`."
    )
    prefill_batch: int = option(4, count(1), "Most prompts in one prefill.")
    prefill_tokens: int = option(
        4096, count(PAGE_TOKENS), "Most tokens of a prefill with several prompts, padding included."
    )
    max_context_tokens: int | None = option(
        None,
        optional(count(2)),
        "Most tokens of one query, prompt and reply. None means what the model and `kv_bytes` allow.",
    )
    lengths: tuple[int, ...] | None = option(
        None,
        optional(_LENGTHS),
        "Row lengths, in columns, to compile programs for. None means 1 and 1.5 times every power of two "
        "from 512 up, or from 64 up if the context is short.",
    )
    host_bytes: int = option(
        2**32,
        count(0),
        "Host memory for waiting rows: prefilled rows without room on the device, and suspended rows. Rows "
        "that do not fit are recomputed.",
        unit="bytes",
    )
    max_logprobs: int = option(8, count(0), "Most `logprobs` that a query may request per token.")
    max_banned_ids: int = option(8, count(1), "Most ending ids of a query that sets `min_tokens`.")
    attention_backend: str = option(
        "auto", one_of(ATTENTION_BACKENDS), "Attention kernel for prompts that are prefilled separately."
    )
    decode_backend: str = option(
        "auto",
        one_of(RING_DECODE_BACKENDS),
        "Attention kernel for decode steps. xla reads the whole ring for every row. pallas_triton reads "
        "only each row's own columns; auto chooses it if the device and the heads allow it. Insertion shape "
        "leaves holes in rows and always uses xla.",
    )
    tensor_parallel_size: int = option(1, count(1), "Devices that every layer is split over.")
    max_position_embeddings: int | None = option(
        None,
        optional(count(2)),
        "Context of the model, in tokens; None keeps its own. A sliding window may need a shorter one; only "
        "learned positions cannot have a longer one.",
    )
    random_seed: int = option(0, count(0), "Seed of `random:` weights.")
    compilation_cache_dir: str | None = option(
        None, optional(PATH), "Directory for compiled programs; None compiles them at every start."
    )

    def __post_init__(self) -> None:
        """Raise ConfigError for values that cannot work."""
        check_options(self, "")
        require(
            self.prefill == "similar" or self.insertion == "none",
            "prefill",
            self.prefill,
            f"'similar' with insertion {self.insertion!r}, whose queries join one by one",
        )
        require(
            not self.preemptive or self.insertion != "none",
            "preemptive",
            self.preemptive,
            "False with insertion 'none', where no query joins a running batch",
        )
        require(
            self.decode_backend != "pallas_triton" or self.insertion != "shape",
            "decode_backend",
            self.decode_backend,
            "'auto' or 'xla' with insertion 'shape', which leaves holes in rows",
        )

    @property
    def num_ahead(self) -> int:
        """Most prefilled queries that wait: `prefill_ahead`, or `max_batch` if it is None."""
        return self.max_batch if self.prefill_ahead is None else self.prefill_ahead
