"""Tile classes of a step on each GPU; they fit GPUs whose programs have 99 KiB of shared memory."""

from __future__ import annotations

import types
from typing import Any

import jax
import pytest

from pallas_kernels.ragged_paged_attention import TileClass, tile_spec
from pallas_kernels.ragged_paged_attention.block_sizes import default_block_sizes

MOST = 96 * 1024  # of 99 KiB that a program has
GROUPS = (1, 2, 3, 4, 7, 8, 16, 17, 32, 33, 64)


def gpu(capability: str) -> Any:
    return types.SimpleNamespace(platform="gpu", device_kind="kind", compute_capability=capability)


def classes(group: int, head_dim: int, num_tokens: int = 512) -> tuple[TileClass, ...]:
    return tile_spec(
        num_tokens=num_tokens, max_num_seqs=64, num_q_heads=2 * group, num_kv_heads=2, head_dim=head_dim,
        page_size=32, dtype="bfloat16", backend="pallas_triton",
    ).blocks.classes  # fmt: skip


def bytes_held(tile_class: TileClass, head_dim: int) -> int:
    """Return the bytes of queries and of the pipeline's blocks of keys and values.

    Triton's compiler adds up to 4 KiB. The block that a product reads and those of the next iterations are
    held together: with two stages, one block.
    """
    blocks = 2 * max(tile_class.num_stages - 1, 1) * tile_class.block_kv
    return 2 * head_dim * (tile_class.rows + blocks)


@pytest.mark.parametrize("capability", ["8.6", "8.9", "12.0"])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_every_class_fits_little_shared_memory(
    capability: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's compiler reports for sm_89 68 KiB for the widest heads, 96 for prompts with heads of 128."""
    monkeypatch.setattr(jax, "devices", lambda: [gpu(capability)])
    for group in GROUPS:
        for num_tokens in (16, 64, 512, 2048):
            for tile_class in classes(group, head_dim, num_tokens):
                assert bytes_held(tile_class, head_dim) <= MOST, (group, num_tokens, tile_class)
                if head_dim > 128:  # compiled, and fits
                    assert tile_class.rows <= 64 and (tile_class.block_kv, tile_class.num_stages) == (32, 2)


@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0"])
def test_the_choice_for_large_shared_memory_is_unchanged(
    capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [gpu(capability)])
    assert [(c.rows, c.block_kv, c.num_stages) for c in classes(8, 256)] == [(16, 32, 4), (64, 32, 2)]
    assert [(c.rows, c.block_kv, c.num_stages) for c in classes(64, 256)] == [(64, 32, 4), (128, 32, 2)]


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_narrower_heads_have_the_same_classes_everywhere(head_dim: int) -> None:
    for group in GROUPS:
        sizes: dict[str, Any] = dict(
            num_tokens=512,
            max_num_seqs=64,
            num_q_heads=2 * group,
            num_kv_heads=2,
            head_dim=head_dim,
            itemsize=2,
        )
        assert default_block_sizes(**sizes) == default_block_sizes(**sizes, large_shared_memory=False)
