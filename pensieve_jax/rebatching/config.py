"""What an engine of padded batches is told before it starts.

Owns: the limits, their checks and their help.
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
"""A prefill computes over pages of so many tokens, so lengths are multiples of it."""

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
        "All KV state in device memory: the batch, whose length and width follow from it, and rows on their "
        "way in or out, for which the length of one row is always kept free; a layer more while its shape "
        "changes.",
        unit="bytes",
    )
    insertion: str = option(
        "embed",
        one_of(INSERTIONS),
        "How a query joins a running batch. embed: prefilled apart, its KV state is put into a row (vector "
        "embedding, section 4.2 of Baton); shape: its prompt runs as a step of the whole batch, and others "
        "are padded to it (vector shaping, section 4.1); none: it waits until the whole batch has ended.",
    )
    prefill: str = option(
        "similar",
        one_of(PREFILLS),
        "What is prefilled together: prompts of similar length, ahead of need, or those that will decode "
        "together, padded to the longest of them (with insertion none: what transformers does).",
    )
    preemptive: bool = option(
        False,
        TRUTH,
        "A query of higher priority takes the row of the lowest one at once; that one goes on later from "
        "where it was (section 4.3).",
    )
    prefill_ahead: int | None = option(
        None, optional(count(0)), "Queries that wait prefilled at most. None is as many as `max_batch`."
    )
    prefill_batch: int = option(4, count(1), "Prompts that are prefilled in one program at most.")
    prefill_tokens: int = option(
        4096, count(PAGE_TOKENS), "Tokens of a program that prefills several prompts, padding included."
    )
    max_context_tokens: int | None = option(
        None,
        optional(count(2)),
        "Prompt and reply of the longest query. None is what the model and `kv_bytes` allow.",
    )
    lengths: tuple[int, ...] | None = option(
        None,
        optional(_LENGTHS),
        "Lengths of a row, in columns, that programs are compiled for. None is 1 and 1.5 times every power "
        "of two from 512 on, or from 64 on where the context is short.",
    )
    host_bytes: int = option(
        2**32,
        count(0),
        "Host memory for rows that wait: prefilled ones for which the device has no room, and suspended "
        "ones. What it cannot hold is computed again.",
        unit="bytes",
    )
    max_logprobs: int = option(8, count(0), "Most likely ids that a query may ask for.")
    max_banned_ids: int = option(8, count(1), "Ending ids of a query that sets `min_tokens`.")
    attention_backend: str = option(
        "auto", one_of(ATTENTION_BACKENDS), "What computes attention of prompts that are prefilled apart."
    )
    decode_backend: str = option(
        "auto",
        one_of(RING_DECODE_BACKENDS),
        "What computes attention of steps. xla reads every row's whole ring; pallas_triton, which auto takes "
        "where the device and the heads allow, each row's own columns. With insertion shape, whose rows have "
        "holes, it is always xla.",
    )
    tensor_parallel_size: int = option(1, count(1), "Devices that share every layer.")
    max_position_embeddings: int | None = option(
        None,
        optional(count(2)),
        "Positions of the model, where they are to be more than its checkpoint says.",
    )
    random_seed: int = option(0, count(0), "Of `random:` weights.")
    compilation_cache_dir: str | None = option(
        None, optional(PATH), "Directory for compiled programs; None compiles them at every start."
    )

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        check_options(self, "")
        require(
            self.prefill == "similar" or self.insertion == "none",
            "prefill",
            self.prefill,
            f"'similar' with insertion {self.insertion!r}, whose queries come one by one",
        )
        require(
            not self.preemptive or self.insertion != "none",
            "preemptive",
            self.preemptive,
            "False with insertion 'none', which lets nobody join a running batch",
        )
        require(
            self.decode_backend != "pallas_triton" or self.insertion != "shape",
            "decode_backend",
            self.decode_backend,
            "'auto' or 'xla' with insertion 'shape', which leaves holes in rows",
        )

    @property
    def num_ahead(self) -> int:
        """What `prefill_ahead` stands for."""
        return self.max_batch if self.prefill_ahead is None else self.prefill_ahead
