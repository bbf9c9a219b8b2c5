"""What a step computes on the device: a forward pass over one packed plan, then a choice of tokens.

Owns: the two traced functions every executable is made of, and the packing of a step's result.
Does not know: when steps run, or who owns the pools and the weights.
Called by: `model_runner`, which compiles them per bucket and per sampler mode.

They are two programs because the sampler has few shapes and many modes, and the forward pass is the other
way round: what a batch needs of the sampler is known on the host, and a compiled forward pass is costly.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs.attention import PagedAttention, RaggedBatch
from pallas_kernels.ragged_paged_attention import TileSpec
from pensieve_jax.engine import sampler
from pensieve_jax.engine.sampler import SamplerMode, SamplingRows
from pensieve_jax.scheduler.plan import PlanLayout, StepResult


@dataclass(frozen=True)
class ModelStructure:
    """An nnx module without its arrays; hashable, so that equal models share executables.

    Attributes:
      graphdef: the module's structure.
      treedef: of its state; the leaves are the arrays.
    """

    graphdef: Any
    treedef: Any

    @classmethod
    def split(cls, model: nnx.Module) -> tuple[ModelStructure, list[jax.Array]]:
        """The structure and the arrays of `model`."""
        graphdef, state = nnx.split(model)
        leaves, treedef = jax.tree.flatten(state)
        return cls(graphdef, treedef), leaves

    def merge(self, leaves: list[jax.Array]) -> Any:
        """A module again; inside a trace this costs nothing at run time."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))


@dataclass(frozen=True)
class ForwardStatics:
    """What makes one forward executable differ from another, apart from array shapes."""

    structure: ModelStructure
    layout: PlanLayout
    tile_spec: TileSpec
    mesh: Mesh
    backend: str


@functools.partial(jax.jit, static_argnames=("statics",), donate_argnames=("kv_pages",))
def forward(
    leaves: list[jax.Array],
    kv_pages: list[jax.Array],
    prev_ids: jax.Array,
    plan_words: jax.Array,
    *,
    statics: ForwardStatics,
) -> tuple[list[jax.Array], jax.Array, SamplingRows[jax.Array]]:
    """One pass of the model over a plan.

    Args:
      leaves: the model's arrays.
      kv_pages: the pools, one per layer; donated, and updated in place.
      prev_ids: i32[S_max], what the step before sampled.
      plan_words: i32[layout.size], the packed plan.
      statics: structure, layout, kernel spec and mesh.

    Returns:
      The pools, f32[S, V] logits of the rows to sample, and how to sample them.
    """
    plan = _unpack_plan(plan_words, statics.layout)
    from_prev = plan["prev_samples"]
    token_ids = jnp.where(from_prev >= 0, prev_ids[jnp.maximum(from_prev, 0)], plan["token_ids"])
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
    hidden = model(token_ids, plan["positions"], attention)
    logits = model.compute_logits(hidden[plan["sample_tokens"]])
    rows = SamplingRows(*(plan[name] for name in SamplingRows._fields))
    replicated = NamedSharding(statics.mesh, PartitionSpec())
    logits, rows = lax.with_sharding_constraint((logits, rows), replicated)
    return attention.kv_pages, logits, rows


@functools.partial(jax.jit, static_argnames=("mode", "num_top", "max_num_samples"))
def choose(
    logits: jax.Array, rows: SamplingRows[jax.Array], *, mode: SamplerMode, num_top: int, max_num_samples: int
) -> tuple[jax.Array, jax.Array]:
    """Sample, and pack what the host wants to know.

    Returns:
      i32[max_num_samples] ids for the next step, the same length whatever the bucket, and the packed
      result i32[S * (2 + 2 * num_top)].
    """
    samples = sampler.sample(logits, rows, mode=mode, num_top=num_top)
    words = [jnp.ravel(lax.bitcast_convert_type(part, jnp.int32)) for part in samples]
    next_ids = jnp.pad(samples.token_ids, (0, max_num_samples - samples.token_ids.shape[0]))
    return next_ids, jnp.concatenate(words)


def unpack_result(words: np.ndarray, num_samples: int, num_top: int) -> StepResult:
    """The host's view of what `choose` packed."""
    ends = np.cumsum([num_samples, num_samples, num_samples * num_top])
    token_ids, logprobs, top_ids, top_logprobs = np.split(words, ends)
    shape = (num_samples, num_top)
    return StepResult(
        token_ids,
        logprobs.view(np.float32),
        top_ids.reshape(shape),
        top_logprobs.view(np.float32).reshape(shape),
    )


def _unpack_plan(words: jax.Array, layout: PlanLayout) -> dict[str, jax.Array]:
    """Every field of the plan, by static offsets."""
    plan = {}
    for name, field in layout.fields.items():
        part = lax.slice(words, (field.offset,), (field.offset + field.size,)).reshape(field.shape)
        plan[name] = lax.bitcast_convert_type(part, field.dtype)
    return plan
