"""What a step computes on the device: a forward pass over one packed plan, then a choice of tokens.

Owns: the traced functions every executable is made of, which arrays of a model each part of a step takes, and
the packing of a step's result.
Does not know: when steps run, or who owns the pools and the weights.

The choice is a program of its own because the sampler has few shapes and many modes, and the forward pass is
the other way round: what a batch needs of the sampler is known on the host, and a compiled forward pass is
costly. Layers run in groups, so that copies into a group's pools can be put between them (the paper's section
5, pipelined transfer): the hidden state goes from one to the next. What goes before the first and after the
last is a program each, so that groups of as many layers are one program, compiled once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs.attention import PagedAttention, RaggedBatch
from model_defs.device_sums import DeviceSums, SumSpec, summing
from model_defs.few_rows import XLA, multiplying_by
from model_defs.registry import Model, abstract_model
from model_defs.sharding import constrain, vocabulary_axis
from pallas_kernels.ragged_paged_attention import TileSpec
from pensieve_jax.device import sampler
from pensieve_jax.device.sampler import SamplerMode, SamplingRows
from pensieve_jax.device.split_sampler import sample_split
from pensieve_jax.scheduler.plan import PlanLayout, StepResult

_LAYERS = "layers"


@dataclass(frozen=True)
class ModelStructure:
    """An nnx module without its arrays; hashable, so that equal models share executables.

    Attributes:
      graphdef: the module's structure.
      treedef: of its state; the leaves are the arrays.
      present: which of them a part of the model takes, by number.
    """

    graphdef: Any
    treedef: Any
    present: tuple[int, ...]

    @classmethod
    def split(
        cls, model: Model, names: Collection[str] | None = None
    ) -> tuple[ModelStructure, list[jax.Array]]:
        """The structure and the arrays of `model`, or of its attributes of those names alone."""
        graphdef, state = nnx.split(model)
        paths, treedef = jax.tree.flatten_with_path(state)
        present = [i for i, (path, _) in enumerate(paths) if names is None or path[0].key in names]
        return cls(graphdef, treedef, tuple(present)), [paths[i][1] for i in present]

    @classmethod
    def split_layers(cls, model: Model, layers: range) -> tuple[ModelStructure, list[jax.Array]]:
        """Of some layers alone: the structure of a model that has as many, in which the first is number 0.

        So it is the same for as many others, and a model's layers have to be of one kind.
        """
        kinds = {nnx.split(layer)[0] for layer in model.layers}
        assert len(kinds) == 1, "layers differ in more than their numbers"
        arrays = {(path[1].key, path[2:]): leaf for path, leaf in _layer_arrays(model)}
        some = next(iter(arrays.values()))
        config = dataclasses.replace(model.config, num_layers=len(layers))
        short = abstract_model(config, dtype=some.dtype.name, mesh=some.sharding.mesh)
        structure = cls.split(short, (_LAYERS,))[0]
        return structure, [arrays[layers[path[1].key], path[2:]] for path, _ in _layer_arrays(short)]

    def merge(self, leaves: list[jax.Array]) -> Any:
        """A module again, less the arrays it did not take; inside a trace this costs nothing at run time."""
        every: list[jax.Array | None] = [None] * self.treedef.num_leaves
        for i, leaf in zip(self.present, leaves, strict=True):
            every[i] = leaf
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, every))


def _layer_arrays(model: Model) -> list[tuple[Any, Any]]:
    """Every array of a layer, or what stands for it, with its path: `layers`, the number, and the rest."""
    paths = jax.tree.flatten_with_path(nnx.split(model)[1])[0]
    return [(path, leaf) for path, leaf in paths if path[0].key == _LAYERS]


@dataclass(frozen=True)
class EndStatics:
    """What makes one executable before or after the layers differ from another, apart from array shapes."""

    structure: ModelStructure
    layout: PlanLayout
    mesh: Mesh


@dataclass(frozen=True)
class LayerStatics:
    """The same of one that runs layers."""

    structure: ModelStructure
    num_layers: int  # of the group
    layout: PlanLayout
    tile_spec: TileSpec
    mesh: Mesh
    backend: str
    sums: SumSpec | None = None  # None: the compiler's own
    few_rows: str = XLA  # who multiplies them with weights


class Scores(NamedTuple):
    """What a forward pass ends with."""

    logits: jax.Array  # f32[S, V], of the rows to sample; the vocabulary is split as the table is
    rows: SamplingRows[jax.Array]  # how to sample them


@functools.partial(jax.jit, static_argnames=("statics",))
def embed(
    leaves: list[jax.Array], prev_ids: jax.Array, plan_words: jax.Array, *, statics: EndStatics
) -> jax.Array:
    """What the first group of layers takes.

    Args:
      leaves: the arrays of what goes before the layers.
      prev_ids: i32[S_max], what the step before sampled.
      plan_words: i32[layout.size], the packed plan.
      statics: structure, layout and mesh.

    Returns:
      f32[T, hidden_size].
    """
    plan, model = _unpack_plan(plan_words, statics.layout), statics.structure.merge(leaves)
    # A token is the host's, or what a row of the step before sampled.
    from_prev = plan["prev_samples"]
    token_ids = jnp.where(from_prev >= 0, prev_ids[jnp.maximum(from_prev, 0)], plan["token_ids"])
    return constrain(model.embed_tokens(token_ids, plan["positions"]), statics.mesh)


@functools.partial(jax.jit, static_argnames=("statics",), donate_argnames=("kv_pages",))
def run_layers(
    leaves: list[jax.Array],
    kv_pages: list[jax.Array],
    hidden: jax.Array,
    plan_words: jax.Array,
    table: jax.Array | None = None,
    *,
    statics: LayerStatics,
) -> tuple[list[jax.Array], jax.Array]:
    """One pass of a group of the model's layers over a plan.

    Args:
      leaves: the arrays of those layers.
      kv_pages: their pools, one per layer; donated, and updated in place.
      hidden: f32[T, hidden_size].
      plan_words: i32[layout.size], the packed plan.
      table: of the memory that devices write to each other, where `statics.sums` says that they do.
      statics: structure, layout, kernel spec and mesh.

    Returns:
      The pools, and the hidden state after those layers.
    """
    plan = _unpack_plan(plan_words, statics.layout)
    batch = RaggedBatch(
        write_slots=plan["write_slots"],
        kv_lens=plan["kv_lens"],
        page_indices=plan["page_indices"],
        cu_q_lens=plan["cu_q_lens"],
        num_seqs=plan["num_rows"],
        tiles=plan["tiles"],
    )
    attention = PagedAttention(
        kv_pages, batch, mesh=statics.mesh, tile_spec=statics.tile_spec, backend=statics.backend
    )
    model = statics.structure.merge(leaves)
    sums = None
    if statics.sums is not None:
        assert table is not None
        sums = DeviceSums(statics.sums, table, statics.mesh)
    with summing(sums), multiplying_by(statics.few_rows):
        hidden = model.run_layers(hidden, plan["positions"], attention, 0, statics.num_layers)
    return attention.kv_pages, constrain(hidden, statics.mesh)


@functools.partial(jax.jit, static_argnames=("statics",))
def score(
    leaves: list[jax.Array], hidden: jax.Array, plan_words: jax.Array, *, statics: EndStatics
) -> Scores:
    """Logits of the rows that are to be sampled, and how.

    Args:
      leaves: the arrays of what goes after the layers.
      hidden: f32[T, hidden_size].
      plan_words: i32[layout.size], the packed plan.
      statics: structure, layout and mesh.
    """
    plan, model = _unpack_plan(plan_words, statics.layout), statics.structure.merge(leaves)
    logits = model.compute_logits(model.normalize(hidden)[plan["sample_tokens"]])
    scores = Scores(logits, SamplingRows(*(plan[name] for name in SamplingRows._fields)))
    return lax.with_sharding_constraint(scores, _shardings(scores, statics.mesh))


def logits_spec(vocab_size: int, mesh: Mesh) -> PartitionSpec:
    """How logits lie on the devices between `score` and the sampler."""
    return PartitionSpec(None, vocabulary_axis(vocab_size, mesh))


def _shardings(scores: Scores, mesh: Mesh) -> Any:
    """All is whole on every device but logits."""
    shardings: Any = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), scores)
    return shardings._replace(logits=NamedSharding(mesh, logits_spec(scores.logits.shape[1], mesh)))


@functools.partial(
    jax.jit, static_argnames=("mode", "num_top", "max_num_samples", "cutoff_backend", "split_over")
)
def choose(
    logits: jax.Array,
    rows: SamplingRows[jax.Array],
    words: jax.Array | None = None,
    *,
    mode: SamplerMode,
    num_top: int,
    max_num_samples: int,
    cutoff_backend: str,
    split_over: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sample, and pack what the host wants to know.

    Args:
      logits: f32[S, V].
      rows: how to sample each of them.
      words: of the devices that exchange, or None; see `ExchangeMemory.words`.
      mode: what has to be computed.
      num_top: most likely ids to return.
      max_num_samples: of all buckets.
      cutoff_backend: as of `sampler.sample`.
      split_over: devices that each have a part of the vocabulary's logits; None: the logits are whole.

    Returns:
      i32[max_num_samples] ids for the next step, the same length whatever the bucket, and the packed
      result i32[S * (2 + 2 * num_top) + 1], whose last word is not 0 if a device lost another.
    """
    if split_over is not None and not mode.truncates:
        samples = sample_split(logits, rows, mode=mode, num_top=num_top, mesh=split_over)
    else:
        if split_over is not None:
            logits = constrain(logits, split_over)  # gathered once, for a search of whole rows
        samples = sampler.sample(logits, rows, mode=mode, num_top=num_top, cutoff_backend=cutoff_backend)
    parts = [jnp.ravel(lax.bitcast_convert_type(part, jnp.int32)) for part in samples]
    lost = jnp.zeros(1, jnp.int32) if words is None else words[:, 0].max(keepdims=True)
    next_ids = jnp.pad(samples.token_ids, (0, max_num_samples - samples.token_ids.shape[0]))
    return next_ids, jnp.concatenate([*parts, lost])


def lost_a_device(words: np.ndarray) -> bool:
    """Whether what `choose` packed is of sums that a device did not take part in."""
    return bool(words[-1])


def unpack_result(words: np.ndarray, num_samples: int, num_top: int) -> StepResult:
    """The host's view of what `choose` packed."""
    ends = np.cumsum([num_samples, num_samples, num_samples * num_top])
    token_ids, logprobs, top_ids, top_logprobs = np.split(words[:-1], ends)
    shape = (num_samples, num_top)
    return StepResult(
        token_ids,
        logprobs.view(np.float32),
        top_ids.reshape(shape),
        top_logprobs.view(np.float32).reshape(shape),
    )


def _unpack_plan(words: jax.Array | np.ndarray, layout: PlanLayout) -> dict[str, jax.Array]:
    """Every field of the plan, by static offsets."""
    plan = {}
    for name, field in layout.fields.items():
        part = lax.slice(words, (field.offset,), (field.offset + field.size,)).reshape(field.shape)
        plan[name] = lax.bitcast_convert_type(part, field.dtype)
    return plan
