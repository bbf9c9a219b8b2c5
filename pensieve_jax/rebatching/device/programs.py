"""Device programs: steps over the ring, prefills, and copies of rows into and out of the ring.

Owns: the traced functions, and the unpacking of a step's words.
Does not know: when a program runs, or which query holds a row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs.attention import FULL, AttentionOptions, PagedAttention, RaggedBatch
from pallas_kernels.ragged_paged_attention import TileSpec
from pensieve_jax.decoding.device.choose import Scores
from pensieve_jax.decoding.device.structure import ModelStructure
from pensieve_jax.decoding.sampling_rows import COLUMNS, SAMPLING_WORDS, SamplingRows
from pensieve_jax.rebatching.config import PAGE_TOKENS
from pensieve_jax.rebatching.device.attention import RingAttention
from pensieve_jax.rebatching.device.ring_state import RingState
from pensieve_jax.rebatching.launches import COUNTS, HEADER, WordsLayout


@dataclass(frozen=True)
class StaticArguments:
    """Static arguments of an engine's programs.

    Attributes:
      structure: structure of the model.
      layout: layout of a step's words.
      mesh: devices that the model is split over.
      backend: attention back end for prefills, as configured.
      decode_backend: attention back end for steps, resolved.
    """

    structure: ModelStructure
    layout: WordsLayout
    mesh: Mesh
    backend: str
    decode_backend: str


class _UnpackedStep(NamedTuple):
    """Unpacked words of a step. Every field has as many rows as the largest batch."""

    place: jax.Array
    num_new: jax.Array
    row: jax.Array
    counts: dict[str, jax.Array]
    rows: SamplingRows[jax.Array]


def _unpack(words: jax.Array, layout: WordsLayout) -> _UnpackedStep:
    header, fields = words[: len(HEADER)], words[len(HEADER) :].reshape(layout.num_fields, layout.width)
    counts = dict(zip(COUNTS, fields, strict=False))
    named = dict(zip(SAMPLING_WORDS, fields[len(COUNTS) :], strict=False))
    seeds = jnp.stack([named["seed_low"], named["seed_high"]], axis=1)
    rows = SamplingRows(
        **{
            name: lax.bitcast_convert_type(named[name], np.dtype(column.dtype))
            for name, column in COLUMNS.items()
        },
        seed=lax.bitcast_convert_type(seeds, jnp.uint32),
        sample_positions=counts["sample_position"],
        banned_ids=fields[len(COUNTS) + len(SAMPLING_WORDS) :].T,
    )
    return _UnpackedStep(header[0], header[1], header[2], counts, rows)


def _scores(statics: StaticArguments, logits: jax.Array, rows: SamplingRows[jax.Array]) -> Scores:
    """Pad logits to the rows of the largest batch, so that a few samplers serve all shapes."""
    padded = jnp.pad(logits, ((0, statics.layout.width - logits.shape[0]), (0, 0)))
    replicated = NamedSharding(statics.mesh, PartitionSpec())
    return lax.with_sharding_constraint(Scores(padded, rows), replicated)


@functools.partial(jax.jit, static_argnames=("statics",), donate_argnames=("state",))
def decode(
    leaves: list[jax.Array], state: RingState, ids: jax.Array, words: jax.Array, *, statics: StaticArguments
) -> tuple[RingState, Scores]:
    """Run a step in which every row takes one token.

    Args:
      leaves: the model's arrays.
      state: the ring; donated, and updated in place.
      ids: i32[width], the token that each row sampled last.
      words: i32[layout.size].
      statics: structure, layout and mesh.
    """
    step, batch = _unpack(words, statics.layout), state.keys[0].shape[0]
    if state.valid is not None:
        state = state._replace(valid=state.valid.at[:, step.place].set(True))
    model = statics.structure.merge(leaves)
    attention = RingAttention(
        state,
        step.place,
        step.num_new,
        step.counts["num_columns"][:batch],
        mesh=statics.mesh,
        backend=statics.decode_backend,
    )
    hidden = model(ids[:batch], step.counts["position"][:batch], attention)
    return attention.state, _scores(statics, model.compute_logits(hidden), step.rows)


@functools.partial(jax.jit, static_argnames=("statics",), donate_argnames=("state",))
def shape(
    leaves: list[jax.Array],
    state: RingState,
    ids: jax.Array,
    token_ids: jax.Array,
    words: jax.Array,
    *,
    statics: StaticArguments,
) -> tuple[RingState, Scores]:
    """Run a step in which one row takes a prompt, and the others one token padded to it (section 4.1).

    Args:
      leaves: as in `decode`.
      state: as in `decode`, with `valid`.
      ids: as in `decode`.
      token_ids: i32[Q], the prompt and padding.
      words: `num_new` is the prompt's length, and `row` is its row.
      statics: as in `decode`.
    """
    step, (batch, _, length, _) = _unpack(words, statics.layout), state.keys[0].shape
    num_queries = token_ids.shape[0]
    index = jnp.arange(num_queries)
    fills = (jnp.arange(batch) == step.row)[:, None]
    is_token = (fills | (index == 0)) & (index < step.num_new)
    tokens = jnp.where(fills, token_ids, jnp.where(index == 0, ids[:batch, None], 0))
    positions = jnp.where(is_token, step.counts["position"][:batch, None] + index, 0)
    assert state.valid is not None
    places = jnp.where(index < step.num_new, (step.place + index) % length, length)
    fresh = state.valid & ~fills  # forget the columns of the row's previous query
    state = state._replace(
        # Masked columns must hold finite numbers, and the previous query may have ended with others.
        keys=[_cleared(pool, step.row) for pool in state.keys],
        values=[_cleared(pool, step.row) for pool in state.values],
        valid=fresh.at[:, places].set(is_token, mode="drop"),
    )
    model = statics.structure.merge(leaves)
    attention = RingAttention(state, step.place, step.num_new, step.counts["num_columns"][:batch])
    hidden = model(tokens.reshape(-1), positions.reshape(-1), attention)
    last = jnp.where(fills[:, 0], step.num_new - 1, 0) + jnp.arange(batch) * num_queries
    return attention.state, _scores(statics, model.compute_logits(hidden[last]), step.rows)


def _cleared(pool: jax.Array, row: jax.Array) -> jax.Array:
    """Return a ring pool with zeros in one row."""
    return lax.dynamic_update_slice(pool, jnp.zeros((1, *pool.shape[1:]), pool.dtype), (row, 0, 0, 0))


@functools.partial(jax.jit, static_argnames=("statics", "num_rows", "tile_spec"))
def prefill(
    leaves: list[jax.Array],
    token_ids: jax.Array,
    words: jax.Array,
    tiles: jax.Array,
    *,
    statics: StaticArguments,
    num_rows: int,
    tile_spec: TileSpec,
) -> tuple[list[jax.Array], Scores]:
    """Prefill prompts outside the ring, each into a row of its own (section 4.2).

    Padding follows each prompt. The causal mask keeps prompts from seeing it. Its columns hold finite
    numbers, which later masks exclude.

    Args:
      leaves: as in `decode`.
      token_ids: i32[num_rows * length].
      words: `position` is the position of each prompt's last token.
      tiles: the attention kernel's work list, the same for every prefill of this shape.
      statics: as in `decode`.
      num_rows: number of prompts.
      tile_spec: tiles of the attention kernel.
    """
    model = statics.structure.merge(leaves)
    config, step, num_tokens = model.config, _unpack(words, statics.layout), token_ids.shape[0]
    length = num_tokens // num_rows
    num_pages = num_tokens // PAGE_TOKENS
    pages_shape = (num_pages, PAGE_TOKENS, 2 * config.num_kv_heads, config.head_dim)
    dtype = model.compute_dtype
    batch = RaggedBatch(
        write_slots=jnp.arange(num_tokens, dtype=jnp.int32),
        kv_lens=jnp.full(num_rows, length, jnp.int32),
        page_indices=jnp.arange(num_pages, dtype=jnp.int32).reshape(num_rows, -1),
        cu_q_lens=jnp.arange(num_rows + 1, dtype=jnp.int32) * length,
        num_seqs=jnp.full(1, num_rows, jnp.int32),
        tiles=(tiles,),
    )
    attention = _RowAttention(
        [jnp.zeros(pages_shape, dtype)] * config.num_layers,
        batch,
        mesh=statics.mesh,
        tile_specs=(tile_spec,),
        backend=statics.backend,
        num_rows=num_rows,
    )
    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), num_rows)
    hidden = model(token_ids, positions, attention)
    last = jnp.arange(num_rows) * length + step.counts["position"][:num_rows]
    return attention.rows, _scores(statics, model.compute_logits(hidden[last]), step.rows)


class _RowAttention(PagedAttention):
    """Paged attention that copies keys and values to rows after each layer, so that few pools live at once.

    Attributes:
      rows: one array [num_layers, 2, num_kv_heads, length, head_dim] per prompt.
    """

    def __init__(
        self, kv_pages: list[jax.Array], batch: RaggedBatch, *, num_rows: int, **options: object
    ) -> None:
        super().__init__(kv_pages, batch, **options)  # type: ignore[arg-type]
        pages, page, heads, head_dim = kv_pages[0].shape
        sizes = (len(kv_pages), 2, heads // 2, pages * page // num_rows, head_dim)
        self.rows = [jnp.zeros(sizes, kv_pages[0].dtype) for _ in range(num_rows)]

    def __call__(
        self,
        layer_index: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        options: AttentionOptions = FULL,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        out = super().__call__(layer_index, q, k, v, options=options, sinks=sinks)
        num_heads, head_dim = k.shape[1:]
        both = jnp.stack([k, v]).astype(self.rows[0].dtype)  # the same values as in the pages
        by_row = both.reshape(2, len(self.rows), -1, num_heads, head_dim).transpose(1, 0, 3, 2, 4)
        self.rows = [row.at[layer_index].set(new) for row, new in zip(self.rows, by_row, strict=True)]
        return out


@functools.partial(jax.jit, donate_argnames=("state",))
def insert(
    state: RingState, ids: jax.Array, row: jax.Array, row_ids: jax.Array, where: jax.Array
) -> tuple[RingState, jax.Array]:
    """Copy a row into the ring (vector embedding), overwriting the whole ring row, so nothing stale remains.

    Args:
      state: the ring; donated, and updated in place.
      ids: i32[width], inputs of the next step.
      row: [num_layers, 2, num_kv_heads, length, head_dim].
      row_ids: i32[width], output of the program that sampled the row's next token.
      where: i32[5]: index of the ring row, place of the row's first column, number of its tokens, index of
        its next token in `row_ids`, and that token's id if the host knows it, else -1.

    Returns:
      The ring, and `ids` with the row's next token.
    """
    index, place, num_tokens, id_place, known_id = where
    length = state.keys[0].shape[2]
    padding = ((0, 0), (0, length - row.shape[3]), (0, 0))

    def written(pool: jax.Array, new: jax.Array) -> jax.Array:
        whole = jnp.roll(jnp.pad(new, padding), place, axis=1)
        return lax.dynamic_update_slice(pool, whole[None], (index, 0, 0, 0))

    keys = [written(pool, row[layer, 0]) for layer, pool in enumerate(state.keys)]
    values = [written(pool, row[layer, 1]) for layer, pool in enumerate(state.values)]
    valid = state.valid
    if valid is not None:
        age = (jnp.arange(length) - place) % length
        valid = valid.at[index].set(age < num_tokens)
    next_id = jnp.where(known_id >= 0, known_id, row_ids[id_place])
    return RingState(keys, values, valid), ids.at[index].set(next_id)


@jax.jit
def take_row(state: RingState, index: jax.Array, places: jax.Array) -> jax.Array:
    """Copy a row of the ring without its holes: the columns at `places`, in order."""

    def columns_of(pool: jax.Array) -> jax.Array:
        return jnp.take(lax.dynamic_index_in_dim(pool, index, keepdims=False), places, axis=1)

    sizes = (len(state.keys), 2, state.keys[0].shape[1], places.shape[0], state.keys[0].shape[3])
    row = jnp.zeros(sizes, state.keys[0].dtype)
    for layer, (keys, values) in enumerate(zip(state.keys, state.values, strict=True)):
        row = row.at[layer].set(jnp.stack([columns_of(keys), columns_of(values)]))
    return row


@functools.partial(jax.jit, static_argnames=("sharding",))
def relayout(pool: jax.Array, rows: jax.Array, columns: jax.Array, *, sharding: NamedSharding) -> jax.Array:
    """Rearrange one layer for a ring of another shape. Columns below 0 receive arbitrary finite values."""
    moved = jnp.take(jnp.take(pool, rows, axis=0), jnp.maximum(columns, 0), axis=2)
    return lax.with_sharding_constraint(moved, sharding)


@jax.jit
def relayout_valid(valid: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Rearrange `RingState.valid` for a ring of another shape."""
    return jnp.where(columns >= 0, valid[rows][:, jnp.maximum(columns, 0)], False)


@jax.jit
def reorder_ids(ids: jax.Array, rows: jax.Array) -> jax.Array:
    """Move ids to the new indices of their rows."""
    return ids.at[: rows.shape[0]].set(ids[rows])
