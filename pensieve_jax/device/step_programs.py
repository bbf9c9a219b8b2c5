"""The programs of a step, and what each is lowered from.

Owns: which executables a runner needs: one per bucket and group of layers, and the samplers.
Does not know: when they run, or on which arrays.
Called by: `model_runner`.

Everything is lowered from shapes alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs.config import ModelConfig
from pallas_kernels.ragged_paged_attention import TileSpec
from pensieve_jax.device import sampler, step
from pensieve_jax.device.exchange import Exchange
from pensieve_jax.device.kv_storage import KVStorage
from pensieve_jax.device.sampler import SamplerMode, SamplingRows
from pensieve_jax.device.step import Between, ForwardStatics, ModelStructure, Start
from pensieve_jax.runtime.compilation import CompilationJob
from pensieve_jax.runtime.program import Program
from pensieve_jax.scheduler.plan import PlanLayout

type Executables[K] = dict[K, jax.stages.Compiled]
"""Where a kind of executable is kept, by what tells them apart."""


class StepPrograms:
    """Of one model on one mesh, for given buckets.

    Attributes:
      max_num_samples: S_max, of all buckets: the length of the ids that go from step to step.
      num_programs: the number of `jobs`.
    """

    def __init__(
        self,
        model: ModelConfig,
        parts: Sequence[tuple[ModelStructure, list[jax.Array]]],
        storage: KVStorage,
        layouts: Mapping[int, PlanLayout],
        tile_specs: Mapping[int, TileSpec],
        mesh: Mesh,
        *,
        backend: str,
        cutoff_backend: str,
        num_top: int,
        exchange: Exchange,
        few_rows: str,
    ) -> None:
        """Keep what programs are made of.

        Args:
          model: the architecture and its sizes.
          parts: of every group of layers, its structure and its arrays.
          storage: shape and placement of the pools, and the groups.
          layouts: of a step's plan, by bucket.
          tile_specs: of its attention, by bucket.
          mesh: one axis, "tp".
          backend: the attention back end that was asked for.
          cutoff_backend: what searches for a sampler's cuts.
          num_top: most likely ids that a sampler returns.
          exchange: who adds up the devices' partial sums.
          few_rows: who multiplies few rows with weights.
        """
        self._model, self._parts, self._storage = model, parts, storage
        self._layouts, self._tile_specs, self._mesh = layouts, tile_specs, mesh
        self._backend, self._cutoff_backend, self._num_top = backend, cutoff_backend, num_top
        self._sums, self._exchanged, self._few_rows = exchange.sums, exchange.arrays, few_rows
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self.max_num_samples = max(layout.max_num_samples for layout in layouts.values())
        self._sampler_layouts = {layout.max_num_samples: layout for layout in layouts.values()}
        num_samplers = len(self._sampler_layouts) * len(sampler.all_modes())
        self.num_programs = len(layouts) * len(parts) + num_samplers

    def jobs(
        self, forward: Executables[tuple[int, int]], choose: Executables[tuple[int, SamplerMode]]
    ) -> Iterator[CompilationJob]:
        """All of them, the largest bucket first.

        Args:
          forward: takes executables by bucket and group of layers.
          choose: takes samplers by number of rows and mode.
        """
        for bucket, group in itertools.product(sorted(self._layouts, reverse=True), range(len(self._parts))):
            yield CompilationJob(
                f"step of {bucket} tokens, group {group}",
                self._step(bucket, group),
                functools.partial(forward.__setitem__, (bucket, group)),
            )
        for (num_samples, layout), mode in itertools.product(
            self._sampler_layouts.items(), sampler.all_modes()
        ):
            yield CompilationJob(
                f"sampler of {num_samples} rows",
                self._sampler(layout, mode),
                functools.partial(choose.__setitem__, (num_samples, mode)),
            )

    def _step(self, bucket: int, group: int) -> Program:
        (structure, leaves), storage, layout = self._parts[group], self._storage, self._layouts[bucket]
        layers = storage.groups[group]
        statics = ForwardStatics(
            structure,
            layers,
            storage.num_layers,
            layout,
            self._tile_specs[bucket],
            self._mesh,
            self._backend,
            self._sums,
            self._few_rows,
        )
        words = self._abstract((layout.size,), np.int32)
        given: Start | Between = Start(self._abstract((self.max_num_samples,), np.int32), words)
        if group:
            # Float32, as the models' residual stream.
            given = Between(self._abstract((bucket, self._model.hidden_size), np.float32), words)
        pool: Any = jax.ShapeDtypeStruct(storage.shape, storage.dtype, sharding=storage.sharding)
        table = self._exchanged[:1]
        return Program(step.forward, (leaves, [pool] * len(layers), given, *table), {"statics": statics})

    def _sampler(self, layout: PlanLayout, mode: SamplerMode) -> Program:
        fields = [layout.fields[name] for name in SamplingRows._fields]
        rows = SamplingRows(*(self._abstract(field.shape, field.dtype) for field in fields))
        spec = step.logits_spec(self._model.vocab_size, self._mesh)
        shape = (layout.max_num_samples, self._model.vocab_size)
        logits: Any = jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(self._mesh, spec))
        statics = {
            "mode": mode,
            "num_top": self._num_top,
            "max_num_samples": self.max_num_samples,
            "cutoff_backend": self._cutoff_backend,
            "split_over": self._mesh if self._mesh.size > 1 and any(spec) else None,
        }
        return Program(step.choose, (logits, rows, *self._exchanged[1:]), statics)

    def _abstract(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """What one executable hands to the next lies on every device; only logits are split."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._replicated)
