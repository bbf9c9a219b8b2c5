"""A training step on the serving forward pass, over packed rows.

Owns: attention within the conversations of a row, the loss, the optimizer, and the state of a step.
Does not know: text, files, or when steps run.
Called by `loop` and `evaluation`.

The model is that of `model_defs`, which takes tokens, positions and an `attention` callable. It sees a batch
of rows as one flat list of tokens, like a batch of requests in the engine; this module only defines which
tokens attend to which. Master weights are float32; the model computes with them rounded to the dtype in which
it is served.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from model_defs import Model, ModelConfig, abstract_model, make_mesh, random_model
from model_defs.attention import FULL, AttentionOptions, refuse_options
from model_defs.registry import resolve_dtype
from pensieve_jax import ConfigError
from pensieve_lab.chat_training.examples import Batch

type Parameters = dict[str, jax.Array]
"""Float32 arrays by the names of `model_defs`, e.g. layers.0.qkv.proj.kernel."""

_CLIP_NORM = 1.0
_QUERY_BLOCK = 256
_BETAS = 0.9, 0.95
_LAST_RATE = 0.05  # final learning rate of the cosine, relative to the highest


class TrainState(NamedTuple):
    """State that a step changes and a checkpoint holds."""

    parameters: Parameters
    optimizer_state: Any

    @classmethod
    def first(cls, config: ModelConfig, seed: int, optimizer: optax.GradientTransformation) -> TrainState:
        """Return seeded random weights in float32, as `model_defs` makes them, and a new optimizer state.

        All arrays are put on the mesh as after a step, so that the step is compiled only once.
        """
        mesh = make_mesh(1)
        state = nnx.state(random_model(config, dtype="float32", mesh=mesh, seed=seed))
        parameters = {_name(path): leaf for path, leaf in jax.tree.flatten_with_path(state)[0]}
        whole = cls(parameters, optimizer.init(parameters))
        return jax.device_put(whole, NamedSharding(mesh, PartitionSpec()))


class Loss(NamedTuple):
    """Sums over tokens; their quotient is the loss per token."""

    weighted_nll: jax.Array  # f32[]
    weight: jax.Array  # f32[]


class PackedAttention:
    """`model_defs.Attention` over rows of conversations that do not see each other.

    The flat batch is B rows of L tokens; `segments` i32[B, L] gives the conversation of each token.
    """

    def __init__(self, segments: jax.Array) -> None:
        """Compute the mask: a token sees itself and earlier tokens of the same conversation."""
        length = segments.shape[1]
        same = segments[:, :, None] == segments[:, None, :]
        self._visible = (same & jnp.tril(jnp.ones((length, length), bool)))[:, None, None]

    def __call__(
        self,
        layer_index: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        options: AttentionOptions = FULL,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Return `model_defs.Attention`'s result; softmax in float32, products in the model's dtype.

        Queries go in blocks, each against the keys up to its end, so that later keys cost nothing.
        """
        refuse_options(options, sinks is not None, "the training of the chat model")
        num_rows, length = self._visible.shape[0], self._visible.shape[-1]
        num_kv_heads, head_dim = k.shape[1:]
        rows_q = q.reshape(num_rows, length, num_kv_heads, -1, head_dim)
        rows_k, rows_v = (x.reshape(num_rows, length, num_kv_heads, head_dim) for x in (k, v))
        blocks = []
        for start in range(0, length, _QUERY_BLOCK):
            end = min(start + _QUERY_BLOCK, length)
            visible = self._visible[..., start:end, :end]
            blocks.append(_attended(rows_q[:, start:end], rows_k[:, :end], rows_v[:, :end], visible))
        return jnp.concatenate(blocks, axis=1).reshape(q.shape).astype(q.dtype)


def _attended(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """Return f32[B, T, K, G, D] for q [B, T, K, G, D], k and v [B, S, K, D] and visible [B, 1, 1, T, S]."""
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
    einsum = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    scores = einsum("btkgd,bskd->bkgts", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return einsum("bkgts,bskd->btkgd", weights.astype(v.dtype), v)


@dataclass(frozen=True)
class Network:
    """A model without its arrays; hashable, so that it can be a static argument of a compiled step."""

    graphdef: Any
    treedef: Any
    names: tuple[str, ...]
    dtype: jnp.dtype

    @classmethod
    def of(cls, config: ModelConfig, dtype: str) -> Network:
        """Return the network of `config` that computes in `dtype`."""
        graphdef, state = nnx.split(abstract_model(config, dtype=dtype, mesh=make_mesh(1)))
        paths, treedef = jax.tree.flatten_with_path(state)
        names = tuple(_name(path) for path, _ in paths)
        return cls(graphdef, treedef, names, resolve_dtype(dtype, config))

    def model(self, parameters: Parameters) -> Model:
        """Return the module with these weights, rounded to its dtype."""
        leaves = [parameters[name].astype(self.dtype) for name in self.names]
        model: Model = nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))
        return model


def hidden_states(model: Model, token_ids: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
    """Return f32[B * L, hidden_size] for a batch's arrays of shape [B, L]."""
    return model(token_ids.reshape(-1), positions.reshape(-1), PackedAttention(segments))


def _name(path: tuple[Any, ...]) -> str:
    """Return a name like layers.0.qkv.proj.kernel for a path in the state, which ends in the value."""
    return ".".join(str(part.key) for part in path if isinstance(part, jax.tree_util.DictKey))


def make_optimizer(
    *, learning_rate: float, warmup_steps: int, num_steps: int, weight_decay: float
) -> optax.GradientTransformation:
    """Return AdamW with warm-up, cosine decay and clipped gradients; norm scales do not decay.

    Raises ConfigError naming the flag if the warm-up leaves no step for the cosine.
    """
    if warmup_steps >= num_steps:
        raise ConfigError("--warmup_steps", warmup_steps, f"below --num_steps, which is {num_steps}")
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup_steps, num_steps, end_value=_LAST_RATE * learning_rate
    )
    return optax.chain(
        optax.clip_by_global_norm(_CLIP_NORM),
        optax.adamw(
            schedule,
            *_BETAS,
            weight_decay=weight_decay,
            mask=lambda parameters: jax.tree.map(lambda x: x.ndim > 1, parameters),
        ),
    )


@functools.partial(jax.jit, static_argnames=("network", "optimizer"), donate_argnames="state")
def train_step(
    state: TrainState,
    batch: Batch[Any],
    *,
    network: Network,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, jax.Array]:
    """Return the state after the batch, and the loss per token before it."""

    def mean_loss(parameters: Parameters) -> jax.Array:
        loss = _loss(parameters, batch, network)
        return loss.weighted_nll / jnp.maximum(loss.weight, 1.0)

    loss, gradients = jax.value_and_grad(mean_loss)(state.parameters)
    updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, state.parameters)
    return TrainState(optax.apply_updates(state.parameters, updates), optimizer_state), loss


@functools.partial(jax.jit, static_argnames="network")
def batch_loss(parameters: Parameters, batch: Batch[Any], *, network: Network) -> Loss:
    """Return the loss of a batch without a step."""
    return _loss(parameters, batch, network)


def _loss(parameters: Parameters, batch: Batch[Any], network: Network) -> Loss:
    model = network.model(parameters)
    hidden = hidden_states(model, batch.token_ids, batch.positions, batch.segments)
    logits = model.compute_logits(hidden)
    weights = batch.weights.reshape(-1)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets.reshape(-1))
    return Loss(jnp.sum(weights * nll), jnp.sum(weights))


@functools.partial(jax.jit, static_argnames=("network", "num_new"))
def greedy_tokens(
    parameters: Parameters, token_ids: jax.Array, lengths: jax.Array, *, network: Network, num_new: int
) -> jax.Array:
    """Return i32[B, num_new], the greedy tokens after `lengths` i32[B] of `token_ids` i32[B, L]; no cache.

    Each row needs room for the new tokens.
    """
    model = network.model(parameters)
    num_rows, row_len = token_ids.shape
    rows = jnp.arange(num_rows)
    positions = jnp.broadcast_to(jnp.arange(row_len, dtype=jnp.int32), token_ids.shape)

    def one_more(i: jax.Array, ids: jax.Array) -> jax.Array:
        hidden = hidden_states(model, ids, positions, jnp.ones_like(ids))
        last = hidden.reshape(num_rows, row_len, -1)[rows, lengths + i - 1]
        best = jnp.argmax(model.compute_logits(last), axis=-1)
        return ids.at[rows, lengths + i].set(best.astype(ids.dtype))

    ids = lax.fori_loop(0, num_new, one_more, token_ids)
    return ids[rows[:, None], lengths[:, None] + np.arange(num_new)]
