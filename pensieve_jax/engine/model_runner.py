"""The runner that executes steps with JAX: one forward executable per bucket, compiled before serving.

Owns: the pools, the previous step's sampled ids (they never leave the device between steps), the
executables, and the refusal of a pool that cannot fit.
Does not know: requests, conversations or which page holds what; a plan says everything.
Called by: the engine loop, from one thread, through the `Runner` protocol.

A step is one copy of the packed plan to the device, the bucket's forward executable, the sampler of the
batch's mode, and one packed copy back that is started at once and awaited only by `fetch`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs.config import ModelConfig
from model_defs.registry import Model
from pallas_kernels.ragged_paged_attention import build_tiles
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.errors import ConfigError, StepFailedError
from pensieve_jax.engine import sampler, step
from pensieve_jax.engine.compilation import CompilationCounter
from pensieve_jax.engine.kv_storage import KVStorage
from pensieve_jax.engine.layouts import bucket_layouts, bucket_tile_specs
from pensieve_jax.engine.runner import Progress
from pensieve_jax.engine.sampler import SamplerMode, SamplingRows
from pensieve_jax.engine.step import ForwardStatics, ModelStructure
from pensieve_jax.scheduler.plan import (
    FLAG_LOGPROBS,
    FLAG_SAMPLES,
    FLAG_TRUNCATES,
    PlanLayout,
    StepPlan,
    StepResult,
)


class StepHandle(NamedTuple):
    """A step in flight."""

    words: jax.Array  # i32[S * (2 + 2 * K)], on its way to the host
    num_samples: int  # S


class ModelRunner:
    """Runs steps of one model on one mesh; see `Runner` for the protocol.

    Attributes:
      layouts: the plan layout of every bucket, by its number of tokens.
      storage: shape and size of the pools.
      pools: the pools of every layer, as the last dispatched step leaves them.
    """

    def __init__(self, model: Model, config: EngineConfig, mesh: Mesh) -> None:
        """Split the model and make the pools; nothing of a step is compiled before `warm_up`.

        Args:
          model: with its arrays on `mesh`; `model.config` says what it is.
          config: of the engine.
          mesh: one axis, "tp".

        Raises:
          ConfigError: weights and pools exceed the device's memory, a limit exceeds the model's, or the
            attention back end cannot serve this model on this device.
        """
        self._compilations = CompilationCounter()
        model_config: ModelConfig = model.config
        self._gpu_pages, self._mesh = config.cache.gpu_pages, mesh
        self._backend = config.runner.attention_backend
        self._num_top = config.runner.max_logprobs
        if self._num_top > model_config.vocab_size:
            limit = f"at most the model's {model_config.vocab_size} ids"
            raise ConfigError("runner.max_logprobs", self._num_top, limit)
        self._structure, self._leaves = ModelStructure.split(model)
        dtype = self._leaves[0].dtype
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._device = mesh.devices.flat[0]
        num_shards = mesh.devices.size
        self._tile_specs = bucket_tile_specs(model_config, config, dtype, self._device, num_shards)
        self.layouts: Mapping[int, PlanLayout] = bucket_layouts(model_config, config, self._tile_specs)
        self._max_num_samples = max(layout.max_num_samples for layout in self.layouts.values())
        self.storage = KVStorage(model_config, config.cache, dtype, mesh)
        self._weights_bytes = sum(_bytes_per_device(leaf) for leaf in self._leaves)
        self._check_memory(0)
        self._forward: dict[int, jax.stages.Compiled] = {}
        self._choose: dict[tuple[int, SamplerMode], jax.stages.Compiled] = {}
        self._next_step_id: int | None = None
        try:
            self.reset()
        except StepFailedError as error:
            limit = f"fewer: pools of {self.storage.pool_bytes:,} bytes could not be made"
            raise ConfigError("cache.gpu_pages", self._gpu_pages, limit, str(error.__cause__)) from error

    def fill_tiles(self, plan: StepPlan) -> None:
        """Write `plan.tiles`, the attention kernel's work list, from the lengths of the plan's rows."""
        spec = self._tile_specs[plan.layout.num_tokens]
        build_tiles(spec, plan.cu_q_lens, plan.kv_lens, int(plan.num_rows[0]), out=plan.tiles)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every executable and run each once on an empty plan; see `Runner`.

        Raises:
          ConfigError: weights, pools and a step's temporaries exceed the device's memory.
        """
        num_samplers = len({layout.max_num_samples for layout in self.layouts.values()})
        num_all = len(self.layouts) + num_samplers * len(sampler.all_modes())
        for num_done, name in enumerate(self._compile_all(), start=1):
            if progress is not None:
                progress(num_done, num_all, name)
        buckets = self.memory_analysis()["buckets"].values()
        step_bytes = (bucket["temp_bytes"] + bucket["new_output_bytes"] for bucket in buckets)
        self._check_memory(max(step_bytes, default=0))
        # A first run loads kernels and allocates workspaces; requests should not pay for that.
        for layout, mode in itertools.product(self.layouts.values(), sampler.all_modes()):
            self.fetch(self._launch(self._empty_plan(layout), mode))
        self._prev_ids = self._no_ids()

    def dispatch(self, plan: StepPlan) -> StepHandle:
        """Start a step; see `Runner`."""
        assert self._next_step_id in (None, plan.step_id), (self._next_step_id, plan.step_id)
        self._next_step_id = plan.step_id + 1
        flags = plan.flags
        mode = sampler.mode_for(
            bool(flags[FLAG_SAMPLES]), bool(flags[FLAG_TRUNCATES]), bool(flags[FLAG_LOGPROBS])
        )
        return self._launch(plan, mode)

    def fetch(self, handle: StepHandle) -> StepResult:
        """Wait for a step; see `Runner`."""
        try:
            words = np.asarray(handle.words)
        except jax.errors.JaxRuntimeError as error:
            raise StepFailedError(f"a step failed on the device: {error}") from error
        return step.unpack_result(words, handle.num_samples, self._num_top)

    def reset(self) -> None:
        """New pools; see `Runner`."""
        self.pools: list[jax.Array] = []  # freed first: two sets may not fit
        try:
            self.pools = jax.block_until_ready(self.storage.new_pools())
        except jax.errors.JaxRuntimeError as error:
            raise StepFailedError(f"new pools could not be made on the device: {error}") from error
        self._prev_ids = self._no_ids()
        self._next_step_id = None

    @property
    def num_compilations(self) -> int:
        """See `Runner`."""
        return self._compilations.value

    def memory_analysis(self) -> dict[str, Any]:
        """Bytes per device: of weights and pools, and of every compiled bucket what XLA says.

        A bucket's `peak_bytes` is weights + pools + temporaries + outputs that are not the donated pools.
        """
        resident = self._weights_bytes + self.storage.pool_bytes
        buckets = {}
        for bucket, executable in self._forward.items():
            stats = executable.memory_analysis()
            if stats is None:
                continue
            new_output = stats.output_size_in_bytes - stats.alias_size_in_bytes
            buckets[bucket] = {
                "argument_bytes": stats.argument_size_in_bytes,
                "output_bytes": stats.output_size_in_bytes,
                "alias_bytes": stats.alias_size_in_bytes,
                "new_output_bytes": new_output,
                "temp_bytes": stats.temp_size_in_bytes,
                "peak_bytes": resident + stats.temp_size_in_bytes + new_output,
            }
        return {
            "weights_bytes": self._weights_bytes,
            "kv_pool_bytes": self.storage.pool_bytes,
            "page_bytes": self.storage.page_bytes,
            "buckets": buckets,
        }

    def _launch(self, plan: StepPlan, mode: SamplerMode) -> StepHandle:
        layout = plan.layout
        try:
            # The executable takes the numpy buffer itself: a `device_put` before it costs the host as much
            # again as the whole launch.
            self.pools, logits, rows = self._forward[layout.num_tokens](
                self._leaves, self.pools, self._prev_ids, plan.buffer
            )
            self._prev_ids, words = self._choose[layout.max_num_samples, mode](logits, rows)
            words.copy_to_host_async()
        except jax.errors.JaxRuntimeError as error:
            raise StepFailedError(f"a step could not be started: {error}") from error
        return StepHandle(words, layout.max_num_samples)

    def _compile_all(self) -> Iterator[str]:
        """Compile every executable, the largest bucket first; yields the name of each when it is ready."""
        for bucket in sorted(self.layouts, reverse=True):
            layout = self.layouts[bucket]
            words = jax.ShapeDtypeStruct((layout.size,), np.int32, sharding=self._replicated)
            statics = ForwardStatics(
                self._structure, layout, self._tile_specs[bucket], self._mesh, self._backend
            )
            lowered = step.forward.lower(self._leaves, self.pools, self._prev_ids, words, statics=statics)
            self._forward[bucket] = lowered.compile()
            yield f"step of {bucket} tokens"
        vocab_size = lowered.out_info[1].shape[1]
        for layout in {layout.max_num_samples: layout for layout in self.layouts.values()}.values():
            for mode in sampler.all_modes():
                self._compile_sampler(layout, mode, vocab_size)
                yield f"sampler of {layout.max_num_samples} rows"

    def _compile_sampler(self, layout: PlanLayout, mode: SamplerMode, vocab_size: int) -> None:
        num_samples = layout.max_num_samples
        fields = [layout.fields[name] for name in SamplingRows._fields]
        rows = SamplingRows(
            *(jax.ShapeDtypeStruct(field.shape, field.dtype, sharding=self._replicated) for field in fields)
        )
        logits = jax.ShapeDtypeStruct((num_samples, vocab_size), np.float32, sharding=self._replicated)
        lowered = step.choose.lower(
            logits, rows, mode=mode, num_top=self._num_top, max_num_samples=self._max_num_samples
        )
        self._choose[num_samples, mode] = lowered.compile()

    def _empty_plan(self, layout: PlanLayout) -> StepPlan:
        """A plan of no rows, which writes and samples nothing."""
        plan = StepPlan(layout, 0)
        plan.prev_samples[:] = -1
        plan.write_slots[:] = self.storage.padding_slot
        plan.banned_ids[:] = -1
        plan.top_p[:] = 1.0
        self.fill_tiles(plan)
        return plan

    def _no_ids(self) -> jax.Array:
        """i32[S_max]: what "the step before" sampled when there was none."""
        return jax.device_put(np.zeros(self._max_num_samples, np.int32), self._replicated)

    def _check_memory(self, step_bytes: int) -> None:
        """Refuse pools that do not fit beside the weights and `step_bytes`, where the limit is known."""
        limit_bytes = _memory_limit_bytes(self._device)
        if limit_bytes is None:
            return
        free_bytes = limit_bytes - self._weights_bytes - step_bytes
        num_pages = free_bytes // self.storage.page_bytes - 1
        if self._gpu_pages > num_pages:
            raise ConfigError(
                "cache.gpu_pages",
                self._gpu_pages,
                f"at most {max(num_pages, 0)}: of the device's {limit_bytes:,} bytes, weights take "
                f"{self._weights_bytes:,}, a step {step_bytes:,}, and a page {self.storage.page_bytes:,}",
                "lower it, or raise runner.tensor_parallel_size or the share of memory that JAX may use",
            )


def _memory_limit_bytes(device: jax.Device) -> int | None:
    """What JAX may use of the device, or None where the device does not say."""
    return (device.memory_stats() or {}).get("bytes_limit")


def _bytes_per_device(leaf: jax.Array) -> int:
    return int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
