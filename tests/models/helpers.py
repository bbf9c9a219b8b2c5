"""Runs a model as the engine does: split once, merged inside one compiled step, pools donated."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs import KV_PAGES_SPEC, DenseAttention, Model, ModelConfig, PagedAttention, RaggedBatch
from model_defs.sharding import tensor_parallel_size
from pallas_kernels.ragged_paged_attention import TileSpec, build_tiles, tile_spec

GOLDEN = Path(__file__).parent / "golden"
VARIANTS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
PAGE_SIZE = 16


def golden(variant: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (input ids i32[T], logits f32[T, vocab_size])."""
    with np.load(GOLDEN / variant / "logits.npz") as arrays:
        return arrays["input_ids"].astype(np.int32), arrays["logits"]


def dense_logits(model: Model, token_ids: np.ndarray) -> np.ndarray:
    """Return f32[T, vocab_size] of one whole sequence through DenseAttention."""
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)

    @jax.jit
    def run(leaves: list[jax.Array], token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        merged = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
        return merged.compute_logits(merged(token_ids, positions, DenseAttention()))

    return np.asarray(run(leaves, token_ids, np.arange(len(token_ids), dtype=np.int32)))


class PagedStep:
    """One ahead-of-time compiled step over paged pools: `capacity` tokens, `max_num_rows` rows.

    The model's leaves are arguments; pools are donated. Unwritten pages hold NaN.
    """

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        *,
        capacity: int = 32,
        max_num_rows: int = 3,
        pages_per_row: int = 6,
        num_pages: int = 16,
        dtype: str = "float32",
    ) -> None:
        config, self.mesh = model.config, mesh
        self.capacity, self.max_num_rows = capacity, max_num_rows
        self.pages_per_row, self.num_pages = pages_per_row, num_pages
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.specs = make_tile_specs(config, mesh, capacity, max_num_rows, dtype, "xla")
        graph, state = nnx.split(model)
        self.leaves, treedef = jax.tree.flatten(state)
        pool_shape = (num_pages, PAGE_SIZE, 2 * config.num_kv_heads, config.head_dim)
        pool_sharding = NamedSharding(mesh, KV_PAGES_SPEC)
        self.pools = [
            jax.device_put(jnp.full(pool_shape, jnp.nan, dtype), pool_sharding)
            for _ in range(config.num_layers)
        ]

        def step(
            leaves: list[jax.Array],
            pools: list[jax.Array],
            token_ids: jax.Array,
            positions: jax.Array,
            batch: RaggedBatch,
        ) -> tuple[jax.Array, list[jax.Array]]:
            merged = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
            attention = PagedAttention(pools, batch, mesh=mesh, tile_specs=self.specs, backend="xla")
            hidden = merged(token_ids, positions, attention)
            return merged.compute_logits(hidden), attention.kv_pages

        tokens = jax.ShapeDtypeStruct((capacity,), jnp.int32, sharding=self.replicated)
        lowered = jax.jit(step, donate_argnums=1).lower(
            [abstract(leaf) for leaf in self.leaves],
            [abstract(pool) for pool in self.pools],
            tokens,
            tokens,
            abstract_batch(self.replicated, capacity, max_num_rows, pages_per_row, self.specs),
        )
        self.compiled = lowered.compile()

    def __call__(self, rows: Sequence[tuple[np.ndarray, int, np.ndarray]]) -> list[np.ndarray]:
        """Run rows of (new ids, first position, page list); return logits f32[len, vocab_size] of each."""
        token_ids, positions = np.zeros((2, self.capacity), np.int32)
        write_slots = np.full(self.capacity, self.num_pages * PAGE_SIZE, np.int32)
        kv_lens = np.zeros(self.max_num_rows, np.int32)
        page_indices = np.zeros((self.max_num_rows, self.pages_per_row), np.int32)
        lengths = [len(ids) for ids, _, _ in rows]
        ends = np.cumsum(lengths)
        cu_q_lens = np.full(self.max_num_rows + 1, ends[-1], np.int32)
        cu_q_lens[0], cu_q_lens[1 : len(rows) + 1] = 0, ends
        for row, (ids, start, pages) in enumerate(rows):
            where = slice(cu_q_lens[row], cu_q_lens[row + 1])
            token_ids[where] = ids
            positions[where] = at = np.arange(start, start + len(ids))
            write_slots[where] = pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
            kv_lens[row] = start + len(ids)
            page_indices[row, : len(pages)] = pages
        num_seqs = np.array([len(rows)], np.int32)
        tiles = tuple(build_tiles(spec, cu_q_lens, kv_lens, num_seqs) for spec in self.specs)
        batch = RaggedBatch(write_slots, kv_lens, page_indices, cu_q_lens, num_seqs, tiles)
        args = jax.device_put((token_ids, positions, batch), self.replicated)
        logits, self.pools = self.compiled(self.leaves, self.pools, *args)
        return np.split(np.asarray(logits)[: ends[-1]], ends[:-1])


def make_tile_specs(
    config: ModelConfig, mesh: Any, num_tokens: int, max_num_rows: int, dtype: str, backend: Any
) -> tuple[TileSpec, ...]:
    """Return the per-shard tile specs of a step, one for each distinct window."""
    tp = tensor_parallel_size(mesh)
    return tuple(
        tile_spec(
            num_tokens=num_tokens,
            max_num_seqs=max_num_rows,
            num_q_heads=config.num_heads // tp,
            num_kv_heads=config.num_kv_heads // tp,
            head_dim=config.head_dim,
            page_size=PAGE_SIZE,
            dtype=dtype,
            backend=backend,
            window=window,
            softcap=config.attention_softcap,
            has_sinks=config.has_sinks,
        )
        for window in config.windows
    )


def abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and sharding of an array."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def abstract_batch(
    sharding: NamedSharding, num_tokens: int, num_rows: int, pages_per_row: int, specs: Sequence[TileSpec]
) -> RaggedBatch:
    """Return the shapes of a step's metadata."""

    def of(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    rows = of(num_rows), of(num_rows, pages_per_row), of(num_rows + 1), of(1)
    return RaggedBatch(of(num_tokens), *rows, tuple(of(spec.tiles_len) for spec in specs))
