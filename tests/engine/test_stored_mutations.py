"""Planted bugs of an 8-bit KV cache: the random driver's judge detects the scale of another row."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.page_copies import scatter_pages
from pallas_kernels.ragged_paged_attention import page_formats
from pallas_kernels.ragged_paged_attention.page_formats import Stored, split_pages
from pensieve_jax.device.transfers import page_copies
from tests.engine.driver import run_scenario
from tests.engine.real_models import RealBench
from tests.engine.test_real_models import real_scenario

NUM_SCENARIOS = 4  # the first one or two detect each bug


def neighbours_scales(pages: jax.Array, page_size: int) -> Stored:
    """Return codes with the scales of the tokens before them."""
    codes, scales = split_pages(pages, page_size)
    return Stored(codes, jnp.roll(scales, 1, axis=-2))


def codes_alone(
    pools: Sequence[jax.Array], chunks: Sequence[jax.Array], pages: jax.Array, *, backend: str
) -> list[jax.Array]:
    """Restore a chunk without its scales, so that it gets those of the page's former content."""
    page_size = 16
    stale = [jnp.stack([pool[page, page_size:] for pool in pools]) for page in pages]
    mixed = [
        jnp.concatenate([chunk[:, :page_size], old], 1) for chunk, old in zip(chunks, stale, strict=True)
    ]
    return scatter_pages(pools, mixed, pages, backend=backend)


@pytest.mark.long
@pytest.mark.parametrize("bug", ["neighbour", "stale"])
def test_a_wrong_scale_is_detected(monkeypatch, bug):
    if bug == "neighbour":
        monkeypatch.setattr(page_formats, "split_pages", neighbours_scales)
    else:
        monkeypatch.setattr(page_copies, "scatter_pages", codes_alone)
    jax.clear_caches()  # other tests' traces do not contain the bug
    bench = RealBench("llama-tiny", "int8")
    try:
        with pytest.raises(AssertionError):
            for seed in range(NUM_SCENARIOS):
                run_scenario(real_scenario(seed, "int8"), bench)
    finally:
        jax.clear_caches()
