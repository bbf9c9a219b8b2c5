"""JAX runner, which executes launches with programs that are compiled before serving.

Owns: the ring, parked rows in both memories, and the ids that the last program sampled.
Does not know: queries, priorities or budgets.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from model_defs import Model, ModelConfig, UnsupportedModelError
from model_defs.attention import refuse_features
from pallas_kernels import sampling_cutoffs
from pallas_kernels.ragged_paged_attention import AttentionHeads, import_backend
from pensieve_jax.core.errors import ConfigError, StepFailedError
from pensieve_jax.decoding.device.choose import unpack_result
from pensieve_jax.decoding.device.sampler import all_modes
from pensieve_jax.decoding.device.structure import ModelStructure
from pensieve_jax.decoding.sampling_rows import SamplerMode, StepResult
from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.device.backends import AttentionBackends
from pensieve_jax.rebatching.device.program_set import PrefillShape, ProgramSet
from pensieve_jax.rebatching.device.programs import StaticArguments
from pensieve_jax.rebatching.device.ring_state import RingState, RingStorage
from pensieve_jax.rebatching.launches import (
    Decode,
    FreeRow,
    Insert,
    Launch,
    PackedStep,
    Park,
    Prefill,
    Resize,
    Return,
    Shape,
    Suspend,
    WordsLayout,
)
from pensieve_jax.rebatching.ring import Relayout
from pensieve_jax.rebatching.ring_shapes import RingShape, RingShapes
from pensieve_jax.runtime.compilation import CompilationCounter, compile_all
from pensieve_jax.runtime.device_memory import bytes_per_device
from pensieve_jax.runtime.errors import in_a_line, is_out_of_memory, step_failed
from pensieve_jax.runtime.executable_store import ExecutableStore

Progress = Callable[[int, int, str], None]
_log = logging.getLogger(__name__)
_LOWER = "kv_bytes, prefill_tokens or the longest of lengths"


def _refuse_experts(config: ModelConfig) -> None:
    """Raise UnsupportedModelError for a model with experts.

    Padding lies anywhere in a padded batch, and would choose experts: they skip only what follows all tokens.
    """
    experts = config.experts
    if experts is not None and any(kind.mlp == "moe" for kind in config.kinds):
        raise UnsupportedModelError(
            f"a mixture of experts ({experts.num_experts}, {experts.num_chosen} chosen) is not supported by "
            f"padded batches; use LLM"
        )


@dataclass
class _Row:
    """Parked row.

    Attributes:
      kv: array in device memory; None once the row has left.
      host: array in pinned host memory, if the row is there or is being copied there.
      ids, place: the row's next token is `ids[place]`; `ids` is what its last program sampled.
    """

    kv: jax.Array | None
    host: jax.Array | None
    ids: jax.Array
    place: int


class DeviceRunner:
    """`rebatching.runner.RebatchingRunner` for one model on one mesh.

    Attributes:
      backends: attention back ends, and why they were chosen.
      ring_shapes: possible shapes of the ring.
      mesh: devices of the model.
      storage: shape and placement of ring and rows.
      weights_bytes: bytes of the model's arrays on one device.
      programs: all compiled programs.
    """

    def __init__(self, model: Model, config: RebatchingConfig, mesh: Mesh, dtype: Any) -> None:
        """Prepare the runner. `warm_up` compiles the programs.

        Raises:
          ConfigError: the budget, the context, or the attention back end cannot work.
          UnsupportedModelError: a layer has experts or a window, or its attention is not plain for another
            reason.
        """
        self._compilations = CompilationCounter()
        self._config, self.mesh = config, mesh
        model_config = model.config
        refuse_features(model_config, "padded batches")
        _refuse_experts(model_config)
        if config.max_logprobs > model_config.vocab_size:
            limit = f"at most the model's {model_config.vocab_size} ids"
            raise ConfigError("max_logprobs", config.max_logprobs, limit)
        structure, self._leaves = ModelStructure.split(model)
        self.storage = RingStorage(model_config, dtype, mesh, has_holes=config.insertion == "shape")
        self.ring_shapes = RingShapes(config, self.storage.token_bytes, model_config.max_position_embeddings)
        self.layout = WordsLayout(config.max_batch, config.max_banned_ids)
        self._device = mesh.devices.flat[0]
        num_shards = mesh.devices.size
        heads = AttentionHeads(
            model_config.num_heads // num_shards,
            model_config.num_kv_heads // num_shards,
            model_config.head_dim,
            self.storage.dtype,
        )
        self.backends = AttentionBackends.chosen(config, heads, self._device)
        backend, decode_backend = (choice.name for choice in self.backends)
        statics = StaticArguments(structure, self.layout, mesh, config.attention_backend, decode_backend)
        cutoff = sampling_cutoffs.choose_backend(self._device)
        self.programs = ProgramSet(
            config,
            self.ring_shapes,
            self.storage,
            statics,
            self._leaves,
            backend=backend,
            cutoff_backend=cutoff,
        )
        self.weights_bytes = sum(bytes_per_device(leaf) for leaf in self._leaves)
        self._rows: dict[int, _Row] = {}
        self._shape: RingShape | None = None
        self._state: RingState | None = None
        self._ids = self._no_ids()

    @property
    def num_compilations(self) -> int:
        """Compilations in this process since this runner was created."""
        return self._compilations.value

    @property
    def ring(self) -> RingState | None:
        """State of the ring after the last launch, for checks."""
        return self._state

    def warm_up(self, progress: Progress | None = None) -> None:
        """Load or compile every program, and run each once.

        Raises:
          ConfigError: the weights, the budget and the programs need more than the device's memory.
        """
        import_backend(self.backends.attention_backend.name)
        store, directory = None, self._config.compilation_cache_dir
        if directory is not None:
            store = ExecutableStore(directory, list(self.mesh.devices.flat))
        with self._refusing():
            self._compile(store, progress)
            try:
                self._rehearse()
            except (jax.errors.JaxRuntimeError, StepFailedError) as error:
                if store is None or not store.num_loaded:
                    raise
                _log.warning("Programs from %s do not run here; all are compiled again: %s", directory, error)
                store.discard_used()
                self._compile(store, progress)
                self._rehearse()
        if store is not None:
            store.tidy()
        self.reset(())

    def launch(self, launch: Launch) -> Any:
        try:
            match launch:
                case Decode():
                    return self._decode(launch)
                case Prefill():
                    return self._prefill(launch)
                case Shape():
                    return self._shaped(launch)
                case Insert():
                    self._insert(launch)
                case Suspend():
                    self._suspend(launch)
                case Park():
                    self._park(launch)
                case Return():
                    row = self._rows[launch.serial]
                    row.kv, row.host = jax.device_put(row.host, self.storage.row_sharding), None
                case FreeRow():
                    del self._rows[launch.serial]
                case Resize():
                    self._resize(launch.shape, launch.relayout)
        except jax.errors.JaxRuntimeError as error:
            raise step_failed(f"a {type(launch).__name__} could not be launched", error, _LOWER) from error
        return None

    def fetch(self, handle: jax.Array) -> StepResult:
        try:
            words = np.asarray(handle)
        except jax.errors.JaxRuntimeError as error:
            raise step_failed("a step failed on the device", error, _LOWER) from error
        return unpack_result(words, self._config.max_batch)

    def has_left(self, serial: int) -> bool:
        row = self._rows.get(serial)
        if row is None or row.host is None:
            return False
        host: Any = row.host  # mypy's arrays have no `is_ready`
        if not host.is_ready():
            return False
        row.kv = None
        return True

    def reset(self, kept_serials: Collection[int]) -> None:
        self._shape = self._state = None
        self._ids = self._no_ids()
        # The host knows these rows' next tokens and passes them in `Insert`. Device ids may be invalid.
        self._rows = {
            serial: _Row(None, row.host, self._ids, 0)
            for serial, row in self._rows.items()
            if serial in kept_serials
        }

    # Launches

    def _decode(self, launch: Decode) -> jax.Array:
        assert self._shape is not None and self._state is not None
        words = self._put(launch.words)
        program = self.programs.decode[self._shape]
        self._state, scores = program(self._leaves, self._state, self._ids, words)
        self._ids, result = self._sample(scores, launch.sampler_mode)
        return result

    def _shaped(self, launch: Shape) -> jax.Array:
        assert self._shape is not None and self._state is not None
        token_ids, words = self._put(launch.token_ids), self._put(launch.words)
        program = self.programs.shape[self._shape, len(launch.token_ids)]
        self._state, scores = program(self._leaves, self._state, self._ids, token_ids, words)
        self._ids, result = self._sample(scores, launch.sampler_mode)
        return result

    def _prefill(self, launch: Prefill) -> jax.Array:
        shape = PrefillShape(launch.num_rows, launch.length)
        token_ids, words = self._put(launch.token_ids), self._put(launch.words)
        rows, scores = self.programs.prefill[shape](
            self._leaves, token_ids, words, self.programs.tiles[shape]
        )
        ids, result = self._sample(scores, launch.sampler_mode)
        for place, (serial, kv) in enumerate(zip(launch.serials, rows, strict=False)):
            self._rows[serial] = _Row(kv, None, ids, place)
        return result

    def _insert(self, launch: Insert) -> None:
        assert self._shape is not None and self._state is not None
        row = self._rows.pop(launch.serial)
        assert row.kv is not None
        where = np.array([launch.row, launch.place, launch.num_tokens, row.place, launch.last_id], np.int32)
        program = self.programs.insert[self._shape, row.kv.shape[3]]
        self._state, self._ids = program(self._state, self._ids, row.kv, row.ids, self._put(where))

    def _suspend(self, launch: Suspend) -> None:
        assert self._shape is not None
        program = self.programs.take_row[self._shape, len(launch.places)]
        kv = program(self._state, self._put(np.int32(launch.row)), self._put(launch.places))
        self._rows[launch.serial] = _Row(kv, None, self._ids, launch.row)

    def _park(self, launch: Park) -> None:
        row = self._rows[launch.serial]
        if row.host is None:
            row.host = jax.device_put(row.kv, self.storage.host_sharding)
        if launch.waits:
            row.host.block_until_ready()
            row.kv = None

    def _resize(self, shape: RingShape, relayout: Relayout | None) -> None:
        old, state, storage = self._shape, self._state, self.storage
        self._shape = shape
        if relayout is None or state is None:
            self._state = None  # free the old ring before allocating the new one
            del state
            self._state = self._zeros(shape)
            return
        assert old is not None
        rows, columns = self._put(relayout.rows), self._put(relayout.columns)
        move = self.programs.relayout[old, shape]
        for layers in (state.keys, state.values):
            for index in range(storage.model.num_layers):
                moved = move(layers[index], rows, columns)
                moved.block_until_ready()  # so that the old layer is free before the next one is allocated
                layers[index] = moved
        valid = state.valid
        if valid is not None:
            valid = self.programs.relayout_valid[old, shape](valid, rows, columns)
        self._state = RingState(state.keys, state.values, valid)
        self._ids = self.programs.reorder_ids[shape](self._ids, rows)

    # Private methods

    def _sample(self, scores: Any, sampler_mode: SamplerMode) -> tuple[jax.Array, jax.Array]:
        """Sample; return the ids for the next step, and the packed result on its way to the host."""
        ids, result = self.programs.choose[sampler_mode](scores.logits, *scores)
        if self._device.platform != "cpu":  # a CPU's results are read in place
            result.copy_to_host_async()
        return ids, result

    def _put(self, values: Any) -> jax.Array:
        return jax.device_put(values, self.storage.replicated)

    def _zeros(self, shape: RingShape) -> RingState:
        ring = self.storage.ring(shape)
        return jax.tree.map(lambda one: jax.numpy.zeros(one.shape, one.dtype, device=one.sharding), ring)

    def _no_ids(self) -> jax.Array:
        return self._put(np.zeros(self._config.max_batch, np.int32))

    def _compile(self, store: ExecutableStore | None, progress: Progress | None) -> None:
        num_all = self.programs.num_programs
        with contextlib.closing(compile_all(self.programs.jobs(), store)) as compiled:
            for num_done, name in enumerate(compiled, start=1):
                if progress is not None:
                    progress(num_done, num_all, name)

    def _rehearse(self) -> None:
        """Run every program once to load kernels and allocate workspaces before the first query."""
        words = PackedStep(self.layout).words
        shapes, greedy = self.ring_shapes.shapes, SamplerMode()
        for mode in all_modes():
            self._resize(shapes[0], None)
            self.fetch(self._decode(Decode(words, mode, ())))
        for one in self.programs.prefill:
            token_ids = np.zeros(one.num_rows * one.length, np.int32)
            serials = tuple(range(one.num_rows))
            self.fetch(
                self._prefill(
                    Prefill(serials, one.length, one.num_rows, token_ids, words, greedy, (), one.length)
                )
            )
            self._rows.clear()
        for old, new in [(a, b) for a in shapes for b in shapes if a != b]:
            self._resize(old, None)
            relayout = Relayout(np.zeros(new.batch, np.int32), np.zeros(new.length, np.int32))
            self._resize(new, relayout)
        for shape in shapes:
            self._resize(shape, None)
            self.fetch(self._decode(Decode(words, greedy, ())))
            for length in [one for kept, one in self.programs.insert if kept == shape]:
                self._suspend(Suspend(0, 0, np.zeros(length, np.int32), length))
                self._insert(Insert(0, 0, 0, length, 0))
                if self._config.insertion == "shape":
                    token_ids = np.zeros(length, np.int32)
                    self.fetch(self._shaped(Shape(0, token_ids, words, greedy, (), 1)))
            jax.block_until_ready(self._state)

    @contextlib.contextmanager
    def _refusing(self) -> Any:
        """Turn an out-of-memory error into a ConfigError that names the budget."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, StepFailedError) as error:
            if not is_out_of_memory(error):
                raise
            limit = (
                f"less: with {self.weights_bytes:,} bytes of weights and the programs' memory it does not fit"
            )
            raise ConfigError("kv_bytes", self._config.kv_bytes, limit, in_a_line(error)) from error
