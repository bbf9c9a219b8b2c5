"""Small queries, configs and ring shapes for tests of one module of the policy."""

from __future__ import annotations

from typing import Any

from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.query import Query
from pensieve_jax.rebatching.ring_shapes import RingShapes

TOKEN_BYTES = 10
ROW_BYTES = 32 * TOKEN_BYTES


def query(serial: int, num_prompt: int = 20, priority: int = 0, **params: Any) -> Query:
    """Make a query whose prompt has ids 1, 2, 3 and so on."""
    options = {"max_tokens": 10, "ignore_eos": True, **params}
    return Query(
        serial,
        list(range(1, num_prompt + 1)),
        SamplingParams(**options),
        seed=0,
        priority=priority,
        ending_ids=(7, 9) if "min_tokens" in params else (),
        max_context_tokens=129,
        tokenizer=None,
    )


def ring_shapes_of(num_rows: int, **config: Any) -> tuple[RebatchingConfig, RingShapes]:
    """Make a config whose budget is `num_rows` rows of 32 columns, and its ring shapes."""
    options = {"max_batch": 4, "lengths": (32, 64, 128), **config}
    made = RebatchingConfig(kv_bytes=num_rows * ROW_BYTES, **options)
    return made, RingShapes(made, TOKEN_BYTES, 10**6)
