"""The programs of a step: what each is lowered from, and the shapes of a runner's buckets.

Owns: the list of executables that a runner needs (for each bucket the embedding, the layer groups and the
logits, and the samplers) and the model arrays that each takes. It also owns how limits of the model and the
configuration become shapes: the attention kernel's spec and the plan layout of each bucket.
Does not know: when the programs run, or which back end serves them (`kernel_choices` decides that).
Called by: `model_runner` and the measurements of steps.

Everything is lowered from shapes alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs.config import LayerKind, ModelConfig
from model_defs.registry import Model
from pallas_kernels.ragged_paged_attention import TileSpec, tile_spec
from pensieve_jax.config import EngineConfig
from pensieve_jax.decoding.device import sampler
from pensieve_jax.decoding.device.choose import choose, logits_spec
from pensieve_jax.decoding.device.structure import ModelStructure
from pensieve_jax.decoding.prompt_rows import MAX_SCORED_ROWS
from pensieve_jax.decoding.sampling_rows import SamplerMode, SamplingRows
from pensieve_jax.device import step
from pensieve_jax.device.exchange import Exchange
from pensieve_jax.device.kv_storage import KVStorage
from pensieve_jax.device.step import EndArguments, LayerArguments, PromptArguments
from pensieve_jax.runtime.compilation import CompilationJob
from pensieve_jax.runtime.program import Program
from pensieve_jax.scheduler.buckets import bucket_layout, bucket_rows, token_buckets
from pensieve_jax.scheduler.plan import PlanLayout

type Kinds = tuple[LayerKind, ...]
"""Kinds of consecutive layers."""

type Executables[K] = dict[K, jax.stages.Compiled]
"""Executables of one kind by key, such as the bucket."""


class StepExecutables(NamedTuple):
    """All executables of one runner."""

    embed: Executables[int]  # by bucket
    run_layers: Executables[tuple[int, Kinds]]  # by bucket and kinds of the group's layers
    score: Executables[int]  # by bucket
    choose: Executables[tuple[int, SamplerMode]]  # by number of rows and mode
    take_rows: Executables[int]  # by bucket
    score_prompt: Executables[int]  # by number of rows; all buckets share one

    def of_step(self, bucket: int, groups: Sequence[Kinds]) -> list[jax.stages.Compiled]:
        """Return the executables of a forward pass in running order, or [] until all are present.

        `groups` are the kinds of every group's layers.
        """
        layers = [self.run_layers.get((bucket, kinds)) for kinds in groups]
        scores = [self.score.get(bucket), self.take_rows.get(bucket), *self.score_prompt.values()]
        all_of_them = [self.embed.get(bucket), *layers, *scores]
        found = [executable for executable in all_of_them if executable is not None]
        return found if len(found) == len(all_of_them) else []


class StepPrograms:
    """Step programs of one model on one mesh, for given buckets.

    Attributes:
      front: model arrays used before the layers.
      groups: model arrays of each group of layers.
      group_kinds: kinds of each group's layers.
      back: model arrays used after the layers.
      max_num_samples: S_max, the maximum over all buckets: the length of the ids passed from step to step.
      num_scored: number of rows of the program that scores prompt tokens.
      num_programs: number of `jobs`.
    """

    def __init__(
        self,
        model: Model,
        storage: KVStorage,
        layouts: Mapping[int, PlanLayout],
        tile_specs: Mapping[int, tuple[TileSpec, ...]],
        mesh: Mesh,
        *,
        backend: str,
        cutoff_backend: str,
        num_top: int,
        exchange: Exchange,
        small_batch_matmul: str,
        experts: str,
    ) -> None:
        """Keep the inputs of the programs.

        Args:
          model: the model with its arrays.
          storage: shape and placement of the pools, and the layer groups.
          layouts: plan layout of each bucket.
          tile_specs: attention specs of each bucket, one for each distinct window.
          mesh: mesh with one axis, "tp".
          backend: the attention back end that the configuration selects.
          cutoff_backend: the back end that searches for the sampler's cutoffs.
          num_top: number of most likely ids that a sampler returns.
          exchange: the implementation that adds up the devices' partial sums.
          small_batch_matmul: the back end that multiplies small batches with weights.
          experts: the back end of a mixture of experts.
        """
        self._config, self._storage = model.config, storage
        self._front, self.front = ModelStructure.split(model, model.front)
        self._back, self.back = ModelStructure.split(model, model.back)
        split = [ModelStructure.split_layers(model, layers) for layers in storage.groups]
        self.groups = [leaves for _, leaves in split]
        kinds = model.config.kinds
        self.group_kinds = [kinds[layers.start : layers.stop] for layers in storage.groups]
        # Groups whose layers are of the same kinds share one program. Equally many layers are not enough.
        self._layers = dict(zip(self.group_kinds, split, strict=True))
        self._layouts, self._tile_specs, self._mesh = layouts, tile_specs, mesh
        self._backend, self._cutoff_backend, self._num_top = backend, cutoff_backend, num_top
        self._sums, self._exchanged = exchange.sums, exchange.arrays
        self._small_batch_matmul, self._experts = small_batch_matmul, experts
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self.max_num_samples = max(layout.max_num_samples for layout in layouts.values())
        self._sampler_layouts = {layout.max_num_samples: layout for layout in layouts.values()}
        num_samplers = len(self._sampler_layouts) * len(sampler.all_modes())
        self.num_scored = min(MAX_SCORED_ROWS, max(layouts))
        self.num_programs = len(layouts) * (3 + len(self._layers)) + num_samplers + 1

    def jobs(self, into: StepExecutables) -> Iterator[CompilationJob]:
        """Yield all compilations; results go `into`. Large buckets and slow layer programs come first."""
        buckets = sorted(self._layouts, reverse=True)
        for bucket, kinds in itertools.product(buckets, self._layers):
            yield CompilationJob(
                f"step of {bucket} tokens, {len(kinds)} layers",
                self._run_layers(bucket, kinds),
                functools.partial(into.run_layers.__setitem__, (bucket, kinds)),
            )
        for bucket in buckets:
            ends = {
                "embedding": (self._embed, into.embed),
                "logits": (self._score, into.score),
                "rows of prompts": (self._take_rows, into.take_rows),
            }
            for name, (program_of, kept) in ends.items():
                keep = functools.partial(kept.__setitem__, bucket)
                yield CompilationJob(f"step of {bucket} tokens, {name}", program_of(bucket), keep)
        yield CompilationJob(
            f"scores of {self.num_scored} prompt tokens",
            self._score_prompt(),
            functools.partial(into.score_prompt.__setitem__, self.num_scored),
        )
        for (num_samples, layout), mode in itertools.product(
            self._sampler_layouts.items(), sampler.all_modes()
        ):
            yield CompilationJob(
                f"sampler of {num_samples} rows",
                self._sampler(layout, mode),
                functools.partial(into.choose.__setitem__, (num_samples, mode)),
            )

    def _run_layers(self, bucket: int, kinds: Kinds) -> Program:
        (structure, leaves), storage, layout = self._layers[kinds], self._storage, self._layouts[bucket]
        statics = LayerArguments(
            structure,
            kinds,
            layout,
            self._tile_specs[bucket],
            self._mesh,
            self._backend,
            self._sums,
            self._small_batch_matmul,
            self._experts,
        )
        pool: Any = jax.ShapeDtypeStruct(storage.shape, storage.dtype, sharding=storage.sharding)
        given = leaves, [pool] * len(kinds), self._hidden(bucket), self._words(bucket), *self._exchanged[:1]
        return Program(step.run_layers, given, {"statics": statics})

    def _embed(self, bucket: int) -> Program:
        statics = EndArguments(self._front, self._layouts[bucket], self._mesh)
        prev_ids = self._abstract((self.max_num_samples,), np.int32)
        return Program(step.embed, (self.front, prev_ids, self._words(bucket)), {"statics": statics})

    def _score(self, bucket: int) -> Program:
        statics = EndArguments(self._back, self._layouts[bucket], self._mesh)
        given = self.back, self._hidden(bucket), self._words(bucket)
        return Program(step.score, given, {"statics": statics})

    def _take_rows(self, bucket: int) -> Program:
        return Program(step.take_rows, (self._hidden(bucket), self._scored()), {})

    def _score_prompt(self) -> Program:
        statics = PromptArguments(self._back, self._mesh, self._num_top)
        given = self.back, self._hidden(self.num_scored), self._scored()
        return Program(step.score_prompt, given, {"statics": statics})

    def _scored(self) -> Any:
        return self._abstract((self.num_scored,), np.int32)

    def _hidden(self, bucket: int) -> Any:
        """Return the hidden state's shape; float32, as the models' residual stream."""
        return self._abstract((bucket, self._config.hidden_size), np.float32)

    def _words(self, bucket: int) -> Any:
        return self._abstract((self._layouts[bucket].size,), np.int32)

    def _sampler(self, layout: PlanLayout, mode: SamplerMode) -> Program:
        fields = [layout.fields[name] for name in SamplingRows._fields]
        rows = SamplingRows(*(self._abstract(field.shape, field.dtype) for field in fields))
        spec = logits_spec(self._config.vocab_size, self._mesh)
        shape = (layout.max_num_samples, self._config.vocab_size)
        logits: Any = jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(self._mesh, spec))
        statics = {
            "mode": mode,
            "num_top": self._num_top,
            "max_num_samples": self.max_num_samples,
            "cutoff_backend": self._cutoff_backend,
            "split_over": self._mesh if self._mesh.size > 1 and any(spec) else None,
        }
        return Program(choose, (logits, logits, rows, *self._exchanged[1:]), statics)

    def _abstract(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the shape of an array that one executable passes to the next: replicated, except logits."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._replicated)


def bucket_tile_specs(
    model: ModelConfig, config: EngineConfig, dtype: np.dtype, backend: str, num_shards: int
) -> dict[int, tuple[TileSpec, ...]]:
    """Return each bucket's specs for an attention back end that serves this model; heads are per shard."""
    buckets = token_buckets(config.scheduler)
    return {bucket: specs_of_bucket(model, config, dtype, backend, num_shards, bucket) for bucket in buckets}


def specs_of_bucket(
    model: ModelConfig, config: EngineConfig, dtype: np.dtype, backend: str, num_shards: int, bucket: int
) -> tuple[TileSpec, ...]:
    """Return a bucket's specs, one for each of `model.windows`, in their order."""
    context_tokens = config.resolve_context_tokens(model.max_position_embeddings)
    return tuple(
        tile_spec(
            num_tokens=bucket,
            max_num_seqs=bucket_rows(config.scheduler, bucket),
            num_q_heads=model.num_heads // num_shards,
            num_kv_heads=model.num_kv_heads // num_shards,
            head_dim=model.head_dim,
            page_size=config.cache.chunk_tokens,
            dtype=dtype,
            backend=backend,
            kv_dtype=config.cache.kv_dtype,
            scratch_pages=_scratch_pages(config, bucket, context_tokens),
            window=window,
            softcap=model.attention_softcap,
            has_sinks=model.has_sinks,
        )
        for window in model.windows
    )


def _scratch_pages(config: EngineConfig, bucket: int, context_tokens: int) -> int:
    """Return the most pages in 8 bits that a step decodes before its prompts read them; 0 for 16 bits.

    They hold the longest context beside a step of new prompts, and never more than the pool.
    """
    if config.cache.kv_dtype is None:
        return 0
    chunk_tokens = config.cache.chunk_tokens
    wanted = -(-context_tokens // chunk_tokens) + -(-bucket // chunk_tokens)
    pool_pages = config.cache.gpu_pages
    return wanted if pool_pages is None else min(wanted, pool_pages)


def bucket_layouts(
    model: ModelConfig, config: EngineConfig, tile_specs: Mapping[int, tuple[TileSpec, ...]]
) -> dict[int, PlanLayout]:
    """Return the plan layout of each bucket.

    Raises:
      ConfigError: `scheduler.max_context_tokens` exceeds the model's positions or the page pool.
    """
    context_tokens = config.resolve_context_tokens(model.max_position_embeddings)
    return {
        bucket: bucket_layout(
            config,
            bucket,
            context_tokens=context_tokens,
            tiles_lens=tuple(spec.tiles_len for spec in specs),
        )
        for bucket, specs in tile_specs.items()
    }
