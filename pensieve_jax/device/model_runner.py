"""The runner that executes steps with JAX. It compiles all executables before serving.

Owns: the pools, the transfers to and from them, the ids sampled by the previous step (they never leave the
device between steps), and the executables.
Does not know: requests, conversations, or which page holds which chunk; a plan contains all of that.
Called by: the engine, through `engine.runner.Runner`, and measurements of steps.

`launch` copies the packed plan to the device in one copy. It runs the bucket's embedding, the layers group by
group, and the logits. `choose` runs the sampler of the batch's mode, and one packed copy of the result to the
host starts at once; only `fetch` waits for it.
Right before each group of layers, the chunks that the step waits for are scattered into the group's pools.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs.config import ModelConfig
from model_defs.registry import Model
from pallas_kernels.ragged_paged_attention import build_tiles, import_backend
from pensieve_jax.config import CacheConfig, EngineConfig
from pensieve_jax.core.errors import ConfigError, StepFailedError
from pensieve_jax.decoding.adjustments import Adjustment
from pensieve_jax.decoding.device import sampler
from pensieve_jax.decoding.device.choose import Scores, lost_a_device, unpack_result
from pensieve_jax.decoding.device.prompt_scores import unpack_scores
from pensieve_jax.decoding.device.structure import ModelStructure
from pensieve_jax.decoding.prompt_rows import PromptRows
from pensieve_jax.decoding.sampling_rows import SamplerMode, StepResult
from pensieve_jax.device.adjuster import Adjuster
from pensieve_jax.device.exchange import Exchange
from pensieve_jax.device.kernel_choices import choose_kernels
from pensieve_jax.device.kv_storage import DevicePools, KVStorage, num_layer_groups_on
from pensieve_jax.device.page_budget import PageBudget, reserved_bytes
from pensieve_jax.device.step_programs import StepExecutables, StepPrograms, bucket_layouts, bucket_tile_specs
from pensieve_jax.device.transfers.device_transfers import DeviceTransfers
from pensieve_jax.device.transfers.in_flight import is_ready
from pensieve_jax.engine.runner import Progress
from pensieve_jax.engine.transfers import Transfers
from pensieve_jax.runtime.compilation import CompilationCounter, compile_all
from pensieve_jax.runtime.device_memory import bytes_per_device, least_device, step_memory
from pensieve_jax.runtime.errors import step_failed
from pensieve_jax.runtime.executable_store import ExecutableStore
from pensieve_jax.scheduler.plan import FLAG_LOGPROBS, FLAG_SAMPLES, FLAG_TRUNCATES, PlanLayout, StepPlan

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class StepHandle:
    """One step in flight.

    Attributes:
      mode: what its choice computes.
      num_samples: S, its rows to sample.
      scores: output of its forward pass; None after `choose`.
      adjustment: biases and penalties of its rows; None if no row has any.
      words: i32[S * (2 + 2 * K) + 1], the packed result, whose copy to the host has started; None before
        `choose`.
      prompt_words: packed scores of prompt tokens, i32[128, 2 + 2 * K] for each run of their program; none in
        most steps.
      num_prompt_rows: number of positions that it scores.
    """

    mode: SamplerMode
    num_samples: int
    scores: Scores | None
    adjustment: Adjustment | None = None
    words: jax.Array | None = None
    prompt_words: tuple[jax.Array, ...] = ()
    num_prompt_rows: int = 0


class ModelRunner:
    """A runner for steps of one model on one mesh; see `Runner` for the protocol.

    Attributes:
      dtype: dtype of the computation, and of weights that are not in 8 bits.
      weights_dtype: format in 8 bits in which layers keep their weights; None is `dtype`.
      kernels: the implementation of each kernel that the programs call, and the reason for the choice.
      weights_bytes: bytes of the model's arrays, per device.
      layouts: plan layout of each bucket, by the bucket's number of tokens.
      storage: shape and size of the pools.
      device_pools: the pools as the last dispatched program leaves them.
      transfers: transfers of chunks between the pools and host memory; idle without `cache.cpu_pages`.
    """

    def __init__(
        self, model: Model, config: EngineConfig, mesh: Mesh, *, given: CacheConfig | None = None
    ) -> None:
        """Split the model and allocate the pools. `warm_up` compiles the steps later.

        Args:
          model: the model, with its arrays on `mesh` and its configuration in `model.config`.
          config: engine configuration; `cache.cpu_bytes` is already converted to pages.
          mesh: mesh with one axis, "tp".
          given: the sizes (a memory fraction or bytes) that `config.cache` was derived from. Error messages
            name them.

        Raises:
          ConfigError: weights and pools exceed the device's memory, `cache.cpu_pages` exceeds the machine's
            memory, a limit exceeds the model's, or a selected back end cannot serve this model here.
        """
        self._compilations = CompilationCounter()
        model_config: ModelConfig = model.config
        self._num_top = _checked_num_top(config, model_config)
        every_leaf = ModelStructure.split(model)[1]
        self.dtype, self.weights_dtype = model.compute_dtype, model.weights_dtype
        dtype = self.dtype
        self._replicated, self._device = NamedSharding(mesh, PartitionSpec()), mesh.devices.flat[0]
        self.kernels = choose_kernels(model_config, config, dtype, mesh, weights_dtype=self.weights_dtype)
        attention = self.kernels.attention
        _log.info("attention back end: %s (%s)", attention.name, attention.reason)
        self._tile_specs = bucket_tile_specs(model_config, config, dtype, attention.name, mesh.devices.size)
        self.layouts: Mapping[int, PlanLayout] = bucket_layouts(model_config, config, self._tile_specs)
        num_groups = num_layer_groups_on(mesh.devices.size, config.runner.num_layer_groups)
        self.storage = KVStorage(model_config, config.cache, dtype, mesh, num_groups)
        self._exchange = Exchange(self.kernels.all_reduce, model_config, dtype, mesh)
        self._programs = StepPrograms(
            model,
            self.storage,
            self.layouts,
            self._tile_specs,
            mesh,
            backend=config.runner.attention_backend,
            cutoff_backend=self.kernels.sampling_cutoff.name,
            num_top=self._num_top,
            exchange=self._exchange,
            small_batch_matmul=self.kernels.decode_matmul.name,
            experts="xla" if self.kernels.experts is None else self.kernels.experts.name,
        )
        self._adjuster = Adjuster(
            model_config.vocab_size,
            mesh,
            (layout.max_num_samples for layout in self.layouts.values()),
            max_num_samples=self._programs.max_num_samples,
            num_slots=config.num_count_slots,
        )
        self._cache_dir, self._mesh = config.runner.compilation_cache_dir, mesh
        self._hidden_size = model_config.hidden_size
        self.weights_bytes = sum(bytes_per_device(leaf) for leaf in every_leaf)
        self.device_pools = DevicePools(self.storage)
        self._transfers = self._new_transfers(config, given.cpu_bytes if given else None)
        self.transfers: Transfers = self._transfers
        self._budget = self._new_budget(config, given.gpu_memory_fraction if given else None)
        self._budget.check()
        self._executables = StepExecutables({}, {}, {}, {}, {}, {})
        self._next_step_id: int | None = None
        self._launched: jax.Array | None = None  # the result of the previous step
        self._prompt_words: tuple[jax.Array, ...] = ()  # scores of prompt tokens in the last forward pass
        self._unchosen: StepHandle | None = None  # the launched step that waits for `choose`
        self._last_words: deque[jax.Array] = deque(maxlen=1)
        weakref.finalize(self, _await_copies, self._last_words)
        try:
            self.reset()
        except StepFailedError as error:
            raise self._budget.no_pools(error) from error

    def fill_tiles(self, plan: StepPlan) -> None:
        """Write `plan.tiles`, the attention kernel's work lists, from the row lengths in the plan."""
        num_rows = int(plan.num_rows[0])
        for spec, tiles in zip(self._tile_specs[plan.layout.num_tokens], plan.tiles, strict=True):
            build_tiles(spec, plan.cu_q_lens, plan.kv_lens, num_rows, tiles, plan.page_indices)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Load or compile every executable and run each once on an empty plan; see `Runner`.

        Raises:
          ConfigError: weights, pools and temporaries of a step exceed the device's memory, the host memory
            for `cache.cpu_pages` cannot be allocated, or others may write to
            `runner.compilation_cache_dir`.
        """
        for specs in self._tile_specs.values():
            import_backend(specs[0].backend)
        store = None
        if self._cache_dir is not None:
            store = ExecutableStore(self._cache_dir, list(self._mesh.devices.flat))
        self._prepare(self._transfers.grow(), store, progress)
        try:
            self._rehearse()
        except (jax.errors.JaxRuntimeError, StepFailedError) as error:
            if store is None or not store.num_loaded:
                raise
            _log.warning(
                "executables from %s do not run here; compiling all of them again: %s", self._cache_dir, error
            )
            store.discard_used()
            self.reset()
            self._prepare((), store, progress)
            self._rehearse()
        if self._exchange.sums is not None:
            self._exchange.begin()
            self._rehearse()
        if store is not None:
            store.tidy()
        self._prev_ids = self._no_ids()

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start the forward pass of a step; see `Runner`."""
        assert self._next_step_id in (None, plan.step_id), (self._next_step_id, plan.step_id)
        self._next_step_id = plan.step_id + 1
        flags = plan.flags
        mode = sampler.mode_for(
            bool(flags[FLAG_SAMPLES]), bool(flags[FLAG_TRUNCATES]), bool(flags[FLAG_LOGPROBS])
        )
        return self._launch(plan, mode)

    def choose(self, handle: StepHandle, words: np.ndarray | None) -> None:
        """Start the choice of a launched step's ids; see `Runner`."""
        assert handle is self._unchosen and handle.scores is not None, "not the last launched step"
        self._unchosen, scores, handle.scores = None, handle.scores, None
        try:
            run, logits = self._executables.choose[handle.num_samples, handle.mode], scores.logits
            adjusted = self._adjuster.scores(logits, self._prev_ids, handle.adjustment, words)
            self._prev_ids, result = run(logits, adjusted, scores.rows, *self._exchange.arrays[1:])
            if self._device.platform != "cpu":  # a CPU result is read in place
                result.copy_to_host_async()
            self._launched = handle.words = result
            self._last_words.append(result)
        except jax.errors.JaxRuntimeError as error:
            raise step_failed("a step could not be started", error) from error

    def fetch(self, handle: StepHandle) -> StepResult:
        """Wait for a step and return its result; see `Runner`."""
        assert handle.words is not None, "its ids were not chosen"
        try:
            # `np.asarray` reads one device's copy; only `block_until_ready` raises another device's error.
            words = np.asarray(handle.words.block_until_ready())
        except jax.errors.JaxRuntimeError as error:
            raise step_failed("a step failed on the device", error) from error
        if lost_a_device(words):
            raise StepFailedError("a step failed: a device timed out waiting for its peer's partial sum")
        result = unpack_result(words, handle.num_samples)
        if not handle.prompt_words:
            return result
        try:
            scored = [np.asarray(each.block_until_ready()) for each in handle.prompt_words]
        except jax.errors.JaxRuntimeError as error:
            raise step_failed("a step failed on the device", error) from error
        return result._replace(prompt=unpack_scores(scored, handle.num_prompt_rows, self._num_top))

    def reset(self) -> None:
        """Allocate new pools; see `Runner`."""
        self._transfers.reset()  # before the pools, so that its staging memory is free as well
        self.device_pools.reset()
        try:
            self._exchange.renew()
            self._adjuster.reset()
            self._prev_ids = self._no_ids()
        except jax.errors.JaxRuntimeError as error:
            raise step_failed("the device could not be prepared for steps again", error) from error
        self._next_step_id = self._launched = self._unchosen = None

    @property
    def pools(self) -> list[jax.Array]:
        """Pools of every layer, as the last dispatched program leaves them."""
        return self.device_pools.by_layer

    @property
    def num_compilations(self) -> int:
        return self._compilations.value

    def memory_analysis(self) -> dict[str, Any]:
        """Return bytes per device: weights, pools, counts of ids, and XLA's figures for each compiled bucket.

        See `step_memory` for the figures of a bucket.
        """
        resident_bytes = self.weights_bytes + self.storage.pool_bytes + self._adjuster.num_bytes
        buckets = {}
        for bucket in self.layouts:
            executables = self._executables.of_step(bucket, self._programs.group_kinds)
            if not executables:
                continue
            # The hidden state is float32, as the models' residual stream. All programs share one plan.
            handed_bytes = 4 * (bucket * self._hidden_size + self.layouts[bucket].size)
            buckets[bucket] = step_memory(executables, resident_bytes, handed_bytes)
        return {
            "weights_bytes": self.weights_bytes,
            "kv_pool_bytes": self.storage.pool_bytes,
            "counts_bytes": self._adjuster.num_bytes,
            "page_bytes": self.storage.page_bytes,
            "buckets": {bucket: sizes for bucket, sizes in buckets.items() if sizes},
        }

    def forward(self, plan: StepPlan) -> Scores:
        """Start the layers of a step without its sampler. `launch` and measurements use it.

        Raises:
          StepFailedError: as in `launch`.
        """
        bucket, programs, executables = plan.layout.num_tokens, self._programs, self._executables
        try:
            if self._launched is not None and is_ready(self._launched):
                # On several devices, a step after a failed one would wait for the failed device.
                self._launched.block_until_ready()
            # Send the plan before the chunks that this step does not wait for, or it arrives after them.
            words = jax.device_put(plan.buffer, self._replicated)
            self._transfers.start()
            hidden = executables.embed[bucket](programs.front, self._prev_ids, words)
            for group, leaves in enumerate(programs.groups):
                self._transfers.land(group)
                pools = self.device_pools.groups[group]
                run = executables.run_layers[bucket, programs.group_kinds[group]]
                table = self._exchange.arrays[:1]
                self.device_pools.groups[group], hidden = run(leaves, pools, hidden, words, *table)
            scores: Scores = executables.score[bucket](programs.back, hidden, words)
            self._prompt_words = tuple(self._score_prompt(plan.prompt_rows, hidden))
        except jax.errors.JaxRuntimeError as error:
            raise step_failed("a step could not be started", error) from error
        return scores

    def _score_prompt(self, rows: PromptRows | None, hidden: jax.Array) -> Iterator[jax.Array]:
        """Start the scores of prompt tokens, as many at a time as the program has rows.

        Each run has its own small copies to the device. A step without scores pays for nothing.
        """
        if rows is None:
            return
        programs, executables, size = self._programs, self._executables, self._programs.num_scored
        for begin in range(0, len(rows.tokens), size):
            parts = [np.zeros(size, np.int32), np.zeros(size, np.int32)]
            for part, column in zip(parts, (rows.tokens, rows.targets), strict=True):
                of_run = column[begin : begin + size]
                part[: len(of_run)] = of_run
            tokens, targets = jax.device_put(parts, self._replicated)
            taken = executables.take_rows[hidden.shape[0]](hidden, tokens)
            words = executables.score_prompt[size](programs.back, taken, targets)
            if self._device.platform != "cpu":
                words.copy_to_host_async()
            yield words

    def _prepare(
        self, grown: Iterable[str], store: ExecutableStore | None, progress: Progress | None
    ) -> None:
        """Allocate host memory by iterating over `grown`, then load or compile every executable.

        Doing both at once, in two threads, saves no time: while the driver pins memory, calls that map or
        unmap memory wait for seconds, and lowering and compiling make many such calls.
        """
        programs = self._programs, self._adjuster
        num_all = self._transfers.num_preparations + sum(one.num_programs for one in programs)
        jobs = itertools.chain(
            self._programs.jobs(self._executables), self._adjuster.jobs(), self._transfers.jobs()
        )
        guard = self._budget.out_of_memory_as_config_error(self._step_bytes)
        with guard, contextlib.closing(compile_all(jobs, store)) as compiled:
            for num_done, name in enumerate(itertools.chain(grown, compiled), start=1):
                if progress is not None:
                    progress(num_done, num_all, name)
        self._budget.check(self._step_bytes())

    def _rehearse(self) -> None:
        """Run every executable once, which loads kernels and allocates workspaces before any request."""
        with self._budget.out_of_memory_as_config_error(self._step_bytes):
            self._transfers.rehearse()
            self._adjuster.reset()
            for layout, mode in itertools.product(self.layouts.values(), sampler.all_modes()):
                handle = self._launch(self._empty_plan(layout), mode)
                self.choose(handle, None)
                self.fetch(handle)
            for layout in {one.max_num_samples: one for one in self.layouts.values()}.values():
                for adjustment, words in self._adjuster.rehearsals(layout.max_num_samples):
                    handle = self._launch(self._empty_plan(layout), sampler.all_modes()[0])
                    handle.adjustment = adjustment
                    self.choose(handle, words)
                    self.fetch(handle)
            for layout in self.layouts.values():
                plan = self._empty_plan(layout)
                plan.prompt_rows = PromptRows(np.zeros(1, np.int32), np.zeros(1, np.int32))
                handle = self._launch(plan, sampler.all_modes()[0])
                self.choose(handle, None)
                self.fetch(handle)

    def _launch(self, plan: StepPlan, mode: SamplerMode) -> StepHandle:
        assert self._unchosen is None, "the ids of the step before were not chosen"
        scores, rows = self.forward(plan), plan.prompt_rows
        self._unchosen = StepHandle(
            mode,
            plan.layout.max_num_samples,
            scores,
            plan.adjustment,
            prompt_words=self._prompt_words,
            num_prompt_rows=0 if rows is None else len(rows.tokens),
        )
        return self._unchosen

    def _empty_plan(self, layout: PlanLayout) -> StepPlan:
        """Return a plan without rows; it writes and samples nothing."""
        plan = StepPlan(layout, 0, self.storage.padding_slot)
        self.fill_tiles(plan)
        return plan

    def _no_ids(self) -> jax.Array:
        """Return i32[S_max] zeros in place of the previous step's ids, for the first step."""
        return jax.device_put(np.zeros(self._programs.max_num_samples, np.int32), self._replicated)

    def _step_bytes(self) -> int:
        """Return the largest step's memory beside weights and pools, in bytes; 0 if XLA does not report it.

        Only compiled steps count. Programs that move pages run between steps and may be given memory before
        the previous step has freed its own, so their temporaries are added.
        """
        buckets = self.memory_analysis()["buckets"].values()
        return max((bucket["step_bytes"] for bucket in buckets), default=0) + self._transfers.temp_bytes

    def _new_budget(self, config: EngineConfig, fraction: float | None) -> PageBudget:
        devices = list(self._mesh.devices.flat)
        return PageBudget(
            least_device(devices),
            config.cache.num_gpu_pages,
            fraction,
            page_bytes=self.storage.page_bytes,
            weights_bytes=self.weights_bytes,
            staging_bytes=self._transfers.staging_bytes,
            max_step_tokens=max(self.layouts),
            reserved_bytes=reserved_bytes(config.cache.gpu_reserved_bytes, len(devices)),
            counts_bytes=self._adjuster.num_bytes,
        )

    def _new_transfers(self, config: EngineConfig, cpu_bytes: int | None) -> DeviceTransfers:
        assert config.cache.cpu_bytes is None, "cache.cpu_bytes must be converted to pages before this call"
        return DeviceTransfers(
            self.storage,
            self.device_pools,
            cpu_pages=config.cache.num_cpu_pages,
            max_num_staged_pages=config.runner.max_num_staged_pages,
            retrieval_priority=config.cache.retrieval_priority,
            cpu_bytes=cpu_bytes,
        )


def _checked_num_top(config: EngineConfig, model: ModelConfig) -> int:
    num_top = config.runner.max_logprobs
    if num_top > model.vocab_size:
        raise ConfigError("runner.max_logprobs", num_top, f"at most the model's {model.vocab_size} ids")
    return num_top


def _await_copies(words: Iterable[jax.Array]) -> None:
    """Wait for the last step, and so for all earlier ones, when the runner or the process ends.

    A step that no caller fetches may still be running. The thread that finishes its copy to the host needs
    the interpreter, and crashes the process if the interpreter is gone.
    """
    for each in words:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # no caller is left to report it to
            np.asarray(each)
