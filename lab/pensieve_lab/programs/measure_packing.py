"""Measures how many numbers of a KV cache are escapes of the packed form, and which chunks have too many.

    python -m pensieve_lab.programs.measure_packing --model=chat --json=packing.json

Counts escapes in bfloat16 keys and values of a model over texts, unchanged and with outliers planted by
weights of the same function (`kv_quality.channels`), and in normal random numbers with one larger channel. A
*tile* is the part of a page in one layer and head row; a chunk is lost if one of its tiles has too many
escapes. Without `--text` the program uses dialogue lines of ours. The last line is one JSON document (see
`--json`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from model_defs import load_model, make_mesh
from model_defs.registry import Model
from pallas_kernels.page_copies import PackedTile, packed_tile
from pallas_kernels.page_copies.packing import num_escapes
from pensieve_jax import ConfigError
from pensieve_jax.commands.engine_flags import define_model_flag
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_jax.decoding.device.structure import ModelStructure
from pensieve_jax.model_source import resolve_model
from pensieve_lab.kv_quality.channels import planted, with_factors
from pensieve_lab.kv_quality.flags import load_texts, outlier_scales
from pensieve_lab.kv_quality.formats import EXACT, StoredAttention

FLAGS = flags.FLAGS
PARTS = ("keys", "values")
_TILES_AT_ONCE = 500
UNITS = {
    "share": "escapes / numbers",
    "mean, largest": "escapes per tile",
    "tiles_lost, chunks_lost": "share of tiles and chunks with more escapes than their list holds",
}


def counted(tile: PackedTile, counts: Iterable[np.ndarray]) -> dict[str, float]:
    """Return figures of escapes, i32[chunks, tiles of a chunk], given piece by piece."""
    every = np.concatenate(list(counts))
    is_lost = every > tile.num_places
    return {
        "share": float(every.mean() / (tile.page_size * tile.head_dim)),
        "mean": float(every.mean()),
        "largest": int(every.max()),
        "num_tiles": every.size,
        "tiles_lost": float(is_lost.mean()),
        "num_chunks": len(every),
        "chunks_lost": float(is_lost.any(axis=1).mean()),
    }


def normal_counts(tile: PackedTile, factor: float) -> Iterator[np.ndarray]:
    """Yield counts of single tiles of normal numbers, with one channel `factor` times as large."""
    rng = np.random.default_rng(FLAGS.seed)
    for _ in range(FLAGS.num_tiles // _TILES_AT_ONCE):
        numbers = rng.standard_normal((_TILES_AT_ONCE, tile.page_size, tile.head_dim), np.float32)
        numbers[..., 0] *= factor
        yield np.asarray(num_escapes(jnp.asarray(numbers, jnp.bfloat16)))[:, None]


def model_counts(model: Model, texts: Sequence[np.ndarray], tile: PackedTile) -> Iterator[np.ndarray]:
    """Yield counts of the texts' chunks, without incomplete last chunks."""
    structure, leaves = ModelStructure.split(model)
    for ids in texts:
        num_chunks = len(ids) // tile.page_size
        if num_chunks:
            ids = ids[: num_chunks * tile.page_size]
            yield np.asarray(_model_counts(leaves, ids, structure=structure, page_size=tile.page_size))


@functools.partial(jax.jit, static_argnames=("structure", "page_size"))
def _model_counts(
    leaves: list[jax.Array], token_ids: jax.Array, *, structure: ModelStructure, page_size: int
) -> jax.Array:
    attention = StoredAttention(EXACT)
    structure.merge(leaves)(token_ids, jnp.arange(token_ids.shape[0], dtype=jnp.int32), attention)
    rows = jnp.stack([*attention.keys, *attention.values]).astype(
        jnp.bfloat16
    )  # [., tokens, heads, head_dim]
    tiles = rows.reshape(rows.shape[0], -1, page_size, *rows.shape[2:]).transpose(1, 0, 3, 2, 4)
    return num_escapes(tiles.reshape(tiles.shape[0], -1, page_size, tiles.shape[-1]))


def tile_of(head_dim: int) -> PackedTile:
    """Return the packed tile; raises ConfigError if there is none."""
    tile = packed_tile(FLAGS.chunk_tokens, head_dim)
    if tile is None:
        limit = f"a size for which heads of {head_dim} can be packed"
        raise ConfigError("--chunk_tokens", FLAGS.chunk_tokens, limit)
    return tile


def main() -> int:
    factors = outlier_scales()
    random_tile = tile_of(FLAGS.head_dim)
    source = resolve_model(FLAGS.model)
    model = load_model(source, dtype="float32", mesh=make_mesh(1))
    tile = tile_of(model.config.head_dim)
    found_texts = load_texts(source, model, FLAGS.num_texts, FLAGS.context_tokens)
    texts = [text.token_ids for text in found_texts]
    rows: list[dict[str, Any]] = [
        {"of": "normal numbers", "factor": factor, **counted(random_tile, normal_counts(random_tile, factor))}
        for factor in (1.0, *factors)
    ]
    rows.append({"of": "the model", "factor": 1.0, **counted(tile, model_counts(model, texts, tile))})
    for part in PARTS:
        for factor in factors:
            changed = with_factors(model, planted(model, part, factor, FLAGS.seed))
            found = counted(tile, model_counts(changed, texts, tile))
            rows.append({"of": f"the model, {part}", "factor": factor, **found})
    print(table(list(rows[0]), [list(row.values()) for row in rows]))
    document = {
        "model": FLAGS.model,
        "num_texts": len(texts),
        "normal_tile": random_tile._asdict() | {"num_places": random_tile.num_places},
        "model_tile": tile._asdict() | {"num_places": tile.num_places},
        "rows": rows,
    }
    print_document(json_line("measure_packing", document, units=UNITS, device=device_name()))
    return 0


def define_flags() -> None:
    define_model_flag()
    flags.DEFINE_string("text", None, "Dialogues (.jsonl, .jsonl.gz) or plain text; default: lines of ours.")
    flags.DEFINE_integer("num_texts", 30, "Dialogues, or pieces of a plain text.", lower_bound=1)
    flags.DEFINE_integer(
        "context_tokens", 512, "Maximum length of texts, which are cut there.", lower_bound=16
    )
    flags.DEFINE_integer("chunk_tokens", 32, "Tokens per page.", lower_bound=1)
    flags.DEFINE_integer("head_dim", 128, "Head size of normal random numbers.", lower_bound=1)
    flags.DEFINE_integer("num_tiles", 4000, "Tiles of normal random numbers per factor.", lower_bound=1)
    flags.DEFINE_list("outlier_scales", ["16", "32", "64", "128", "256"], "Factors of channels.")
    flags.DEFINE_integer("seed", 0, "Seed of all random draws.", lower_bound=0)
    flags.DEFINE_bool("progress", None, "Show progress bars; default: on a terminal.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
