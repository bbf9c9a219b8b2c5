"""All programs of a re-batching engine, compiled before it serves.

Owns: the list of programs for all shapes, and the arguments that each is lowered with.
Does not know: when programs run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels.ragged_paged_attention import TileSpec, build_tiles, tile_spec
from pensieve_jax.decoding.device import sampler
from pensieve_jax.decoding.device.choose import choose
from pensieve_jax.decoding.sampling_rows import COLUMNS, SamplerMode, SamplingRows
from pensieve_jax.rebatching.config import PAGE_TOKENS, RebatchingConfig
from pensieve_jax.rebatching.device import programs
from pensieve_jax.rebatching.device.programs import StaticArguments
from pensieve_jax.rebatching.device.ring_state import RingStorage
from pensieve_jax.rebatching.prefilling import prefill_widths
from pensieve_jax.rebatching.ring_shapes import RingShape, RingShapes, lengths_up_to
from pensieve_jax.runtime.compilation import CompilationJob
from pensieve_jax.runtime.program import Program

_NUM_WHERE = 5  # length of the `where` argument of `programs.insert`


class PrefillShape(NamedTuple):
    """Number of prompts in a prefill, and the length of their rows."""

    num_rows: int
    length: int


class ProgramSet:
    """Programs of one engine. Each dictionary maps the shapes of a program to its executable.

    Attributes:
      decode, shape, prefill, insert, take_row, relayout, relayout_valid, reorder_ids, choose: executables.
      tiles: work list of the attention kernel, for every prefill.
    """

    def __init__(
        self,
        config: RebatchingConfig,
        ring_shapes: RingShapes,
        storage: RingStorage,
        statics: StaticArguments,
        leaves: list[jax.Array],
        *,
        backend: str,
        cutoff_backend: str,
    ) -> None:
        """List the programs without compiling them.

        Args:
          config: insertion, and sizes of prefills.
          ring_shapes: shapes of the ring.
          storage: abstract arrays of the ring.
          statics: static arguments of the programs that run the model.
          leaves: the model's arrays.
          backend: resolved attention back end for prefills.
          cutoff_backend: back end that searches for the sampler's cutoffs.
        """
        self._config, self._ring_shapes, self._storage = config, ring_shapes, storage
        self._statics, self._leaves, self._cutoff_backend = statics, leaves, cutoff_backend
        self.decode: dict[RingShape, Any] = {}
        self.shape: dict[tuple[RingShape, int], Any] = {}
        self.prefill: dict[PrefillShape, Any] = {}
        self.insert: dict[tuple[RingShape, int], Any] = {}
        self.take_row: dict[tuple[RingShape, int], Any] = {}
        self.relayout: dict[tuple[RingShape, RingShape], Any] = {}
        self.relayout_valid: dict[tuple[RingShape, RingShape], Any] = {}
        self.reorder_ids: dict[RingShape, Any] = {}
        self.choose: dict[SamplerMode, Any] = {}
        lengths = [shape.length for shape in ring_shapes.shapes]
        self._prefills = [
            PrefillShape(width, length) for length in lengths for width in prefill_widths(config, length)
        ]
        self._tile_specs = {one: self._tile_spec(one, backend) for one in self._prefills}
        self.tiles = {one: self._tiles_of(one) for one in self._prefills}

    @property
    def num_programs(self) -> int:
        """Number of programs that `jobs` yields."""
        return sum(1 for _ in self._entries())

    def jobs(self) -> Iterator[CompilationJob]:
        """Yield a compilation job for every program, the slowest to compile first."""
        for name, kept, key, program in self._entries():
            yield CompilationJob(name, program, functools.partial(kept.__setitem__, key))

    def _entries(self) -> Iterator[tuple[str, dict[Any, Any], Any, Program]]:
        yield from self._with_model()
        storage, width = self._storage, self._config.max_batch
        ids, scalar = storage.whole(width), storage.whole()
        for shape in reversed(self._ring_shapes.shapes):
            ring = storage.ring(shape)
            for length in lengths_up_to(self._ring_shapes.shapes, shape.length):
                name = f"{length} tokens of {_named(shape)}"
                where = storage.whole(_NUM_WHERE)
                arguments: tuple[Any, ...] = (ring, ids, storage.row(length), ids, where)
                yield f"insert {name}", self.insert, (shape, length), Program(programs.insert, arguments, {})
                arguments = (ring, scalar, storage.whole(length))
                program = Program(programs.take_row, arguments, {})
                yield f"take {name}", self.take_row, (shape, length), program
            yield from self._relayouts(shape)
            program = Program(programs.reorder_ids, (ids, storage.whole(shape.batch)), {})
            yield f"ids of {_named(shape)}", self.reorder_ids, shape, program
        for mode in sampler.all_modes():
            yield "sampler", self.choose, mode, self._sampler(mode)

    def _with_model(self) -> Iterator[tuple[str, dict[Any, Any], Any, Program]]:
        """Yield the programs that run all layers of the model."""
        storage, statics = self._storage, {"statics": self._statics}
        ids, words = storage.whole(self._config.max_batch), storage.whole(self._statics.layout.size)
        for one in reversed(self._prefills):
            token_ids = storage.whole(one.num_rows * one.length)
            arguments: tuple[Any, ...] = (self._leaves, token_ids, words, self.tiles[one])
            more = {"num_rows": one.num_rows, "tile_spec": self._tile_specs[one]}
            program = Program(programs.prefill, arguments, statics | more)
            yield f"prefill of {one.num_rows} x {one.length}", self.prefill, one, program
        for shape in reversed(self._ring_shapes.shapes):
            arguments = (self._leaves, storage.ring(shape), ids, words)
            program = Program(programs.decode, arguments, statics)
            yield f"step of {_named(shape)}", self.decode, shape, program
            if self._config.insertion != "shape":
                continue
            for length in lengths_up_to(self._ring_shapes.shapes, shape.length):
                arguments = (self._leaves, storage.ring(shape), ids, storage.whole(length), words)
                program = Program(programs.shape, arguments, statics)
                yield f"shaping {length} of {_named(shape)}", self.shape, (shape, length), program

    def _relayouts(self, new: RingShape) -> Iterator[tuple[str, dict[Any, Any], Any, Program]]:
        storage = self._storage
        for old in self._ring_shapes.shapes:
            if old == new:
                continue
            name, indices = f"{_named(old)} to {_named(new)}", map(storage.whole, new)
            layer, (rows, columns) = storage.layer(old), indices
            sharding = {"sharding": layer.sharding}
            program = Program(programs.relayout, (layer, rows, columns), sharding)
            yield name, self.relayout, (old, new), program
            if (valid := storage.ring(old).valid) is not None:
                program = Program(programs.relayout_valid, (valid, rows, columns), {})
                yield name, self.relayout_valid, (old, new), program

    def _sampler(self, mode: SamplerMode) -> Program:
        storage, width = self._storage, self._config.max_batch
        rows = SamplingRows(
            **{
                name: storage.whole(width, dtype=np.dtype(column.dtype).type)
                for name, column in COLUMNS.items()
            },
            seed=storage.whole(width, 2, dtype=np.uint32),
            sample_positions=storage.whole(width),
            banned_ids=storage.whole(width, self._config.max_banned_ids),
        )
        logits = storage.whole(width, storage.model.vocab_size, dtype=np.float32)
        statics = {
            "mode": mode,
            "num_top": self._config.max_logprobs,
            "max_num_samples": width,
            "cutoff_backend": self._cutoff_backend,
        }
        return Program(choose, (logits, logits, rows), statics)

    def _tile_spec(self, one: PrefillShape, backend: str) -> TileSpec:
        model, num_shards = self._storage.model, self._storage.mesh.devices.size
        return tile_spec(
            num_tokens=one.num_rows * one.length,
            max_num_seqs=one.num_rows,
            num_q_heads=model.num_heads // num_shards,
            num_kv_heads=model.num_kv_heads // num_shards,
            head_dim=model.head_dim,
            page_size=PAGE_TOKENS,
            dtype=self._storage.dtype,
            backend=backend,
        )

    def _tiles_of(self, one: PrefillShape) -> jax.Array:
        ends = np.arange(one.num_rows + 1, dtype=np.int32) * one.length
        lens = np.full(one.num_rows, one.length, np.int32)
        tiles = build_tiles(self._tile_specs[one], ends, lens, one.num_rows)
        return jax.device_put(tiles, self._storage.replicated)


def _named(shape: RingShape) -> str:
    return f"{shape.batch} x {shape.length}"
