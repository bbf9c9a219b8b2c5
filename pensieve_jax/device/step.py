"""The device computation of a step: a forward pass over one packed plan, up to the logits.

Owns: the traced functions that the executables of a forward pass are made of.
Does not know: when steps run, who owns the pools and the weights, or how tokens are chosen
(`decoding.device.choose`).

Layers run in groups, so that copies into a group's pools can be dispatched between groups (the paper's
section 5, pipelined transfer). The hidden state passes from one group to the next. The work before the first
group and after the last one are programs of their own, so that groups whose layers are of the same kinds
share one program, compiled once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs.all_reduce import AllReduce, SumSpec, summing
from model_defs.attention import PagedAttention, RaggedBatch
from model_defs.config import LayerKind
from model_defs.experts import computing_experts
from model_defs.sharding import constrain
from model_defs.small_batch_matmul import XLA, multiplying_by
from pallas_kernels.ragged_paged_attention import TileSpec
from pensieve_jax.decoding.device.choose import Scores, logits_spec
from pensieve_jax.decoding.device.prompt_scores import score_targets
from pensieve_jax.decoding.device.structure import ModelStructure
from pensieve_jax.decoding.sampling_rows import SamplingRows
from pensieve_jax.scheduler.plan import PlanLayout


@dataclass(frozen=True)
class EndArguments:
    """The static arguments of a program before or after the layers; with array shapes, they identify it."""

    structure: ModelStructure
    layout: PlanLayout
    mesh: Mesh


@dataclass(frozen=True)
class LayerArguments:
    """The static arguments of a program that runs layers; with array shapes, they identify it."""

    structure: ModelStructure
    kinds: tuple[LayerKind, ...]  # of the group's layers
    layout: PlanLayout
    tile_specs: tuple[TileSpec, ...]  # of each distinct window of the model's layers
    mesh: Mesh
    backend: str
    sums: SumSpec | None = None  # None uses the compiler's sums
    small_batch_matmul: str = XLA  # the back end that multiplies small batches with weights
    experts: str = XLA  # the back end of a mixture of experts


@functools.partial(jax.jit, static_argnames=("statics",))
def embed(
    leaves: list[jax.Array], prev_ids: jax.Array, plan_words: jax.Array, *, statics: EndArguments
) -> jax.Array:
    """Return the input of the first group of layers, f32[T, hidden_size].

    Args:
      leaves: model arrays used before the layers.
      prev_ids: i32[S_max], the ids that the previous step sampled.
      plan_words: i32[layout.size], the packed plan.
      statics: structure, layout and mesh.
    """
    plan, model = _unpack_plan(plan_words, statics.layout), statics.structure.merge(leaves)
    # A token comes from the host, or from a row that the previous step sampled.
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
    statics: LayerArguments,
) -> tuple[list[jax.Array], jax.Array]:
    """Run one group of the model's layers over a plan.

    Args:
      leaves: model arrays of those layers.
      kv_pages: their pools, one per layer; donated and updated in place.
      hidden: f32[T, hidden_size].
      plan_words: i32[layout.size], the packed plan.
      table: table of the memory that devices write to each other; required where `statics.sums` is set.
      statics: structure, layout, kernel specs and mesh.

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
        tiles=tuple(plan[name] for name in statics.layout.tile_fields),
    )
    attention = PagedAttention(
        kv_pages, batch, mesh=statics.mesh, tile_specs=statics.tile_specs, backend=statics.backend
    )
    model = statics.structure.merge(leaves)
    sums = None
    if statics.sums is not None:
        assert table is not None
        sums = AllReduce(statics.sums, table, statics.mesh)
    # Layers read these choices while the model is traced; `small_batch_matmul` says why. All are in
    # `statics`, so a program that was compiled for other choices is never reused.
    num_tokens = batch.cu_q_lens[batch.num_seqs[0]]
    experts = computing_experts(statics.experts, num_tokens)
    with summing(sums), multiplying_by(statics.small_batch_matmul), experts:
        hidden = model.run_layers(hidden, plan["positions"], attention, 0, len(statics.kinds))
    return attention.kv_pages, constrain(hidden, statics.mesh)


@functools.partial(jax.jit, static_argnames=("statics",))
def score(
    leaves: list[jax.Array], hidden: jax.Array, plan_words: jax.Array, *, statics: EndArguments
) -> Scores:
    """Return the logits and sampling parameters of the rows to be sampled.

    Args:
      leaves: model arrays used after the layers.
      hidden: f32[T, hidden_size].
      plan_words: i32[layout.size], the packed plan.
      statics: structure, layout and mesh.
    """
    plan, model = _unpack_plan(plan_words, statics.layout), statics.structure.merge(leaves)
    logits = model.compute_logits(model.normalize(hidden)[plan["sample_tokens"]])
    scores = Scores(logits, SamplingRows(*(plan[name] for name in SamplingRows._fields)))
    return lax.with_sharding_constraint(scores, _shardings(scores, statics.mesh))


@dataclass(frozen=True)
class PromptArguments:
    """The static arguments of the program that scores prompt tokens."""

    structure: ModelStructure
    mesh: Mesh
    num_top: int


@jax.jit
def take_rows(hidden: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the hidden states f32[N, hidden_size] of the step's tokens at i32[N]."""
    return hidden[tokens]


@functools.partial(jax.jit, static_argnames=("statics",))
def score_prompt(
    leaves: list[jax.Array], hidden: jax.Array, targets: jax.Array, *, statics: PromptArguments
) -> jax.Array:
    """Return the packed scores of the prompt tokens that follow some positions; see `score_targets`.

    All buckets share this program, so that a score does not depend on the bucket beyond its hidden state.

    Args:
      leaves: model arrays used after the layers.
      hidden: f32[N, hidden_size], the hidden states of the positions.
      targets: i32[N], the ids of the tokens after them.
      statics: structure, mesh, and the number of most likely ids.
    """
    model = statics.structure.merge(leaves)
    logits = constrain(model.compute_logits(model.normalize(hidden)), statics.mesh)  # gathered: whole rows
    return constrain(score_targets(logits, targets, num_top=statics.num_top), statics.mesh)


def _shardings(scores: Scores, mesh: Mesh) -> Any:
    """Return shardings that replicate everything on every device except the logits."""
    shardings: Any = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), scores)
    return shardings._replace(logits=NamedSharding(mesh, logits_spec(scores.logits.shape[1], mesh)))


def _unpack_plan(words: jax.Array | np.ndarray, layout: PlanLayout) -> dict[str, jax.Array]:
    """Return every field of the plan, sliced at static offsets."""
    plan = {}
    for name, field in layout.fields.items():
        part = lax.slice(words, (field.offset,), (field.offset + field.size,)).reshape(field.shape)
        plan[name] = lax.bitcast_convert_type(part, field.dtype)
    return plan
