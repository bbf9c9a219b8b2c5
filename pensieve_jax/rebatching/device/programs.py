"""What is computed on a device: steps over the ring, prefills, and how rows come and go.

Owns: the traced functions, and how words are read.
Does not know: when something runs, or who is in a row.
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

from model_defs.attention import PagedAttention, RaggedBatch
from pallas_kernels.ragged_paged_attention import TileSpec
from pensieve_jax.decoding.device.choose import Scores
from pensieve_jax.decoding.device.structure import ModelStructure
from pensieve_jax.decoding.sampling_rows import COLUMNS, SAMPLING_WORDS, SamplingRows
from pensieve_jax.rebatching.config import PAGE_TOKENS
from pensieve_jax.rebatching.device.attention import RingAttention
from pensieve_jax.rebatching.device.ring_state import RingState
from pensieve_jax.rebatching.launches import COUNTS, HEADER, WordsLayout


@dataclass(frozen=True)
class Statics:
    """What makes programs of one engine differ from another's, apart from array shapes.

    Attributes:
      structure: of the model.
      layout: of a step's words.
      mesh: what the model is split over.
      backend: of the prompts' attention, as configured.
      decode_backend: of the steps' attention, resolved.
    """

    structure: ModelStructure
    layout: WordsLayout
    mesh: Mesh
    backend: str
    decode_backend: str


class _Words(NamedTuple):
    """A step's words; rows of all fields are those of the largest batch."""

    place: jax.Array
    num_new: jax.Array
    row: jax.Array
    counts: dict[str, jax.Array]
    rows: SamplingRows[jax.Array]


def _read(words: jax.Array, layout: WordsLayout) -> _Words:
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
    return _Words(header[0], header[1], header[2], counts, rows)


def _scores(statics: Statics, logits: jax.Array, rows: SamplingRows[jax.Array]) -> Scores:
    """As many rows as the largest batch has, so that a few samplers serve all shapes."""
    padded = jnp.pad(logits, ((0, statics.layout.width - logits.shape[0]), (0, 0)))
    replicated = NamedSharding(statics.mesh, PartitionSpec())
    return lax.with_sharding_constraint(Scores(padded, rows), replicated)


@functools.partial(jax.jit, static_argnames=("statics",), donate_argnames=("state",))
def decode(
    leaves: list[jax.Array], state: RingState, ids: jax.Array, words: jax.Array, *, statics: Statics
) -> tuple[RingState, Scores]:
    """A step in which every row takes one token.

    Args:
      leaves: the model's arrays.
      state: the ring; donated, and updated in place.
      ids: i32[width], what the rows' last step sampled.
      words: i32[layout.size].
      statics: structure, layout and mesh.
    """
    step, batch = _read(words, statics.layout), state.keys[0].shape[0]
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
    statics: Statics,
) -> tuple[RingState, Scores]:
    """A step in which one row takes a prompt and the others a token each, padded to it (section 4.1).

    Args:
      leaves: as of `decode`.
      state: as of `decode`, with `valid`.
      ids: as of `decode`.
      token_ids: i32[Q], the prompt and padding.
      words: `num_new` is the prompt's length, and `row` whose it is.
      statics: as of `decode`.
    """
    step, (batch, _, length, _) = _read(words, statics.layout), state.keys[0].shape
    num_queries = token_ids.shape[0]
    index = jnp.arange(num_queries)
    fills = (jnp.arange(batch) == step.row)[:, None]
    is_token = (fills | (index == 0)) & (index < step.num_new)
    tokens = jnp.where(fills, token_ids, jnp.where(index == 0, ids[:batch, None], 0))
    positions = jnp.where(is_token, step.counts["position"][:batch, None] + index, 0)
    assert state.valid is not None
    places = jnp.where(index < step.num_new, (step.place + index) % length, length)
    fresh = state.valid & ~fills  # the row is somebody else's now
    state = state._replace(valid=fresh.at[:, places].set(is_token, mode="drop"))
    model = statics.structure.merge(leaves)
    attention = RingAttention(state, step.place, step.num_new, step.counts["num_columns"][:batch])
    hidden = model(tokens.reshape(-1), positions.reshape(-1), attention)
    last = jnp.where(fills[:, 0], step.num_new - 1, 0) + jnp.arange(batch) * num_queries
    return attention.state, _scores(statics, model.compute_logits(hidden[last]), step.rows)


@functools.partial(jax.jit, static_argnames=("statics", "num_rows", "tile_spec"))
def prefill(
    leaves: list[jax.Array],
    token_ids: jax.Array,
    words: jax.Array,
    tiles: jax.Array,
    *,
    statics: Statics,
    num_rows: int,
    tile_spec: TileSpec,
) -> tuple[list[jax.Array], Scores]:
    """Prompts by themselves, each into a row of its own (section 4.2).

    What stands behind a prompt is padding, which causality keeps from mattering; its columns hold finite
    numbers that no mask lets through.

    Args:
      leaves: as of `decode`.
      token_ids: i32[num_rows * length].
      words: `position` is that of each prompt's last token.
      tiles: the attention kernel's work list, the same for every prefill of this shape.
      statics: as of `decode`.
      num_rows: prompts.
      tile_spec: of the attention kernel.
    """
    model = statics.structure.merge(leaves)
    config, step, num_tokens = model.config, _read(words, statics.layout), token_ids.shape[0]
    length = num_tokens // num_rows
    num_pages = num_tokens // PAGE_TOKENS
    pages_shape = (num_pages, PAGE_TOKENS, 2 * config.num_kv_heads, config.head_dim)
    dtype = leaves[0].dtype
    batch = RaggedBatch(
        write_slots=jnp.arange(num_tokens, dtype=jnp.int32),
        kv_lens=jnp.full(num_rows, length, jnp.int32),
        page_indices=jnp.arange(num_pages, dtype=jnp.int32).reshape(num_rows, -1),
        cu_q_lens=jnp.arange(num_rows + 1, dtype=jnp.int32) * length,
        num_seqs=jnp.full(1, num_rows, jnp.int32),
        tiles=tiles,
    )
    attention = _RowAttention(
        [jnp.zeros(pages_shape, dtype)] * config.num_layers,
        batch,
        mesh=statics.mesh,
        tile_spec=tile_spec,
        backend=statics.backend,
        num_rows=num_rows,
    )
    positions = jnp.tile(jnp.arange(length, dtype=jnp.int32), num_rows)
    hidden = model(token_ids, positions, attention)
    last = jnp.arange(num_rows) * length + step.counts["position"][:num_rows]
    return attention.rows, _scores(statics, model.compute_logits(hidden[last]), step.rows)


class _RowAttention(PagedAttention):
    """Attention over pages, whose contents become rows layer by layer, so that few pools live at once.

    Attributes:
      rows: [num_layers, 2, num_kv_heads, length, head_dim] of each prompt.
    """

    def __init__(
        self, kv_pages: list[jax.Array], batch: RaggedBatch, *, num_rows: int, **options: object
    ) -> None:
        super().__init__(kv_pages, batch, **options)  # type: ignore[arg-type]
        pages, page, heads, head_dim = kv_pages[0].shape
        sizes = (len(kv_pages), 2, heads // 2, pages * page // num_rows, head_dim)
        self.rows = [jnp.zeros(sizes, kv_pages[0].dtype) for _ in range(num_rows)]

    def __call__(self, layer_index: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = super().__call__(layer_index, q, k, v)
        num_heads, head_dim = k.shape[1:]
        both = jnp.stack([k, v]).astype(self.rows[0].dtype)  # what was written into the pages
        by_row = both.reshape(2, len(self.rows), -1, num_heads, head_dim).transpose(1, 0, 3, 2, 4)
        self.rows = [row.at[layer_index].set(new) for row, new in zip(self.rows, by_row, strict=True)]
        return out


@functools.partial(jax.jit, donate_argnames=("state",))
def insert(
    state: RingState, ids: jax.Array, row: jax.Array, row_ids: jax.Array, where: jax.Array
) -> tuple[RingState, jax.Array]:
    """Vector embedding: the whole row of the ring is written, so that nothing stale is left.

    Args:
      state: the ring; donated, and updated in place.
      ids: i32[width], what goes into the next step.
      row: [num_layers, 2, num_kv_heads, length, head_dim].
      row_ids: i32[width], of the program that sampled the row's next token.
      where: i32[5]: the ring's row, where in it the row begins, its tokens, the place of its token in
        `row_ids`, and that token itself where it is known, else -1.

    Returns:
      The ring, and ids with that of the row.
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
    """A row of the ring as one of its own, its holes left out: the columns at `places`, in order."""

    def taken(pool: jax.Array) -> jax.Array:
        return jnp.take(lax.dynamic_index_in_dim(pool, index, keepdims=False), places, axis=1)

    sizes = (len(state.keys), 2, state.keys[0].shape[1], places.shape[0], state.keys[0].shape[3])
    row = jnp.zeros(sizes, state.keys[0].dtype)
    for layer, (keys, values) in enumerate(zip(state.keys, state.values, strict=True)):
        row = row.at[layer].set(jnp.stack([taken(keys), taken(values)]))
    return row


@functools.partial(jax.jit, static_argnames=("sharding",))
def relayout(pool: jax.Array, rows: jax.Array, columns: jax.Array, *, sharding: NamedSharding) -> jax.Array:
    """A layer of a ring of another shape; columns below 0 hold anything finite."""
    moved = jnp.take(jnp.take(pool, rows, axis=0), jnp.maximum(columns, 0), axis=2)
    return lax.with_sharding_constraint(moved, sharding)


@jax.jit
def relayout_valid(valid: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """The same of `RingState.valid`."""
    return jnp.where(columns >= 0, valid[rows][:, jnp.maximum(columns, 0)], False)


@jax.jit
def reorder_ids(ids: jax.Array, rows: jax.Array) -> jax.Array:
    """The ids of rows that have moved."""
    return ids.at[: rows.shape[0]].set(ids[rows])
