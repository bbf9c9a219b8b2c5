"""What a step computes on the device: a forward pass over one packed plan, then a choice of tokens.

Owns: the two traced functions every executable is made of, which arrays of a model each part of a step
takes, and the packing of a step's result.
Does not know: when steps run, or who owns the pools and the weights.
Called by: `model_runner`, which compiles them per bucket and per sampler mode.

They are two programs because the sampler has few shapes and many modes, and the forward pass is the other
way round: what a batch needs of the sampler is known on the host, and a compiled forward pass is costly.
The forward pass itself is one program per group of layers, so that copies into a group's pools can be put
between them (the paper's section 5, pipelined transfer): the hidden state goes from one to the next.
"""

from __future__ import annotations

import functools
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
from model_defs.registry import Model
from model_defs.sharding import constrain, vocabulary_axis
from pallas_kernels.ragged_paged_attention import TileSpec
from pensieve_jax.device import sampler
from pensieve_jax.device.sampler import SamplerMode, SamplingRows
from pensieve_jax.device.split_sampler import sample_split
from pensieve_jax.scheduler.plan import PlanLayout, StepResult


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
    def split(cls, model: Model, layers: range | None = None) -> tuple[ModelStructure, list[jax.Array]]:
        """The structure and the arrays of `model`, or of its `layers` and what goes before and after them."""
        graphdef, state = nnx.split(model)
        paths, treedef = jax.tree.flatten_with_path(state)
        wanted = range(model.config.num_layers) if layers is None else layers
        present = [i for i, (path, _) in enumerate(paths) if _is_read(model, path, wanted)]
        return cls(graphdef, treedef, tuple(present)), [paths[i][1] for i in present]

    def merge(self, leaves: list[jax.Array]) -> Any:
        """A module again, less the arrays it did not take; inside a trace this costs nothing at run time."""
        every: list[jax.Array | None] = [None] * self.treedef.num_leaves
        for i, leaf in zip(self.present, leaves, strict=True):
            every[i] = leaf
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, every))


def _is_read(model: Model, path: tuple[Any, ...], layers: range) -> bool:
    """Whether `layers`, or what goes before the first or after the last of them, read the array at `path`."""
    name = path[0].key
    if name == "layers":
        return path[1].key in layers
    is_first, is_last = layers.start == 0, layers.stop == model.config.num_layers
    return (is_first and name in model.front) or (is_last and name in model.back)


@dataclass(frozen=True)
class ForwardStatics:
    """What makes one forward executable differ from another, apart from array shapes."""

    structure: ModelStructure
    layers: range
    num_layers: int  # of the whole model
    layout: PlanLayout
    tile_spec: TileSpec
    mesh: Mesh
    backend: str
    sums: SumSpec | None = None  # None: the compiler's own
    few_rows: str = XLA  # who multiplies them with weights


class Start(NamedTuple):
    """What the first group of layers starts from."""

    prev_ids: jax.Array  # i32[S_max]: what the step before sampled
    plan_words: jax.Array | np.ndarray  # i32[layout.size]: the packed plan


class Between(NamedTuple):
    """What one group of layers hands to the next; the plan is copied to the device only once."""

    hidden: jax.Array  # f32[T, hidden_size]
    plan_words: jax.Array | np.ndarray


class Scores(NamedTuple):
    """What the last group ends with."""

    logits: jax.Array  # f32[S, V], of the rows to sample; the vocabulary is split as the table is
    rows: SamplingRows[jax.Array]  # how to sample them


@functools.partial(jax.jit, static_argnames=("statics",), donate_argnames=("kv_pages",))
def forward(
    leaves: list[jax.Array],
    kv_pages: list[jax.Array],
    given: Start | Between,
    table: jax.Array | None = None,
    *,
    statics: ForwardStatics,
) -> tuple[list[jax.Array], Between | Scores]:
    """One pass of a group of the model's layers over a plan.

    Args:
      leaves: the arrays of those layers, and of what goes before the first and after the last.
      kv_pages: their pools, one per layer; donated, and updated in place.
      given: a `Start` for the first group, else what the group before returned.
      table: of the memory that devices write to each other, where `statics.sums` says that they do.
      statics: structure, layers, layout, kernel spec and mesh.

    Returns:
      The pools, and `Scores` from the last group.
    """
    layers = statics.layers
    plan = _unpack_plan(given.plan_words, statics.layout)
    batch = RaggedBatch(
        write_slots=plan["write_slots"],
        kv_lens=plan["kv_lens"],
        page_indices=plan["page_indices"],
        cu_q_lens=plan["cu_q_lens"],
        num_seqs=plan["num_rows"],
        tiles=plan["tiles"],
    )
    attention = PagedAttention(
        kv_pages,
        batch,
        mesh=statics.mesh,
        tile_spec=statics.tile_spec,
        backend=statics.backend,
        first_layer=layers.start,
    )
    model = statics.structure.merge(leaves)
    hidden = given.hidden if isinstance(given, Between) else _embed(model, given.prev_ids, plan)
    sums = None
    if statics.sums is not None:
        assert table is not None
        sums = DeviceSums(statics.sums, table, statics.mesh)
    with summing(sums), multiplying_by(statics.few_rows):
        hidden = model.run_layers(hidden, plan["positions"], attention, layers.start, layers.stop)
    result: Between | Scores
    if layers.stop < statics.num_layers:
        result = Between(hidden, given.plan_words)
    else:
        logits = model.compute_logits(model.normalize(hidden)[plan["sample_tokens"]])
        result = Scores(logits, SamplingRows(*(plan[name] for name in SamplingRows._fields)))
    return attention.kv_pages, lax.with_sharding_constraint(result, _shardings(result, statics.mesh))


def logits_spec(vocab_size: int, mesh: Mesh) -> PartitionSpec:
    """How logits lie on the devices between the last group of layers and the sampler."""
    return PartitionSpec(None, vocabulary_axis(vocab_size, mesh))


def _shardings(result: Between | Scores, mesh: Mesh) -> Any:
    """All is whole on every device but logits."""
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), result)
    if not isinstance(result, Scores):
        return shardings
    return shardings._replace(logits=NamedSharding(mesh, logits_spec(result.logits.shape[1], mesh)))


def _embed(model: Model, prev_ids: jax.Array, plan: dict[str, jax.Array]) -> jax.Array:
    """What the first layer takes; a token is the host's, or what a row of the step before sampled."""
    from_prev = plan["prev_samples"]
    token_ids = jnp.where(from_prev >= 0, prev_ids[jnp.maximum(from_prev, 0)], plan["token_ids"])
    return model.embed_tokens(token_ids, plan["positions"])


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
