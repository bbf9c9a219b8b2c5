"""Llama 2 and 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Owns the forward pass over a flat, ragged batch: the model sees tokens and positions, never rows,
pages or sequences; who attends to what is the business of the `attention` callable it is given.
Layers are unrolled. The call is three parts that can also run apart, by runs of layers, each with its
own arrays only. Built by registry; its weights are filled by weights.
"""

import jax
from flax import nnx

from model_defs.attention import Attention
from model_defs.config import ModelConfig
from model_defs.layers import Build, Embedding, FusedQKV, Linear, RMSNorm
from model_defs.rope import cos_sin, inverse_frequencies, rotate


class LlamaMLP(nnx.Module):
    """SwiGLU; gate and up are one column-parallel matmul, kernel [hidden_size, 2, intermediate_size]."""

    def __init__(self, build: Build) -> None:
        """Declare the projections."""
        config = build.config
        hidden, wide, bias = (config.hidden_size,), config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(build, hidden, (2, wide), out_axis=1, bias=bias)
        self.down = Linear(build, (wide,), hidden, in_axis=0, bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, hidden_size] -> the same, in the kernels' dtype."""
        gate_up = self.gate_up(x)
        return self.down(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1])


class LlamaLayer(nnx.Module):
    """One decoder layer."""

    def __init__(self, build: Build) -> None:
        """Declare the layer's arrays."""
        config = build.config
        bias = config.attention_bias
        self.input_norm = RMSNorm(build)
        self.qkv = FusedQKV(build, bias=bias)
        self.out = Linear(
            build, (config.num_heads, config.head_dim), (config.hidden_size,), in_axis=0, bias=bias
        )
        self.mlp_norm = RMSNorm(build)
        self.mlp = LlamaMLP(build)

    def __call__(
        self,
        layer_index: int,
        x: jax.Array,
        y: jax.Array | None,
        rotation: tuple[jax.Array, jax.Array],
        attention: Attention,
    ) -> tuple[jax.Array, jax.Array]:
        """The stream f32[T, hidden_size] and what is still to be added to it -> the same after the layer."""
        x, normed = self.input_norm.add(x, y)
        q, k, v = self.qkv(normed)
        y = self.out(attention(layer_index, rotate(q, *rotation), rotate(k, *rotation), v))
        x, normed = self.mlp_norm.add(x, y)
        return x, self.mlp(normed)


class Llama(nnx.Module):
    """The whole model. `config` is its ModelConfig.

    `front` and `back` name the attributes, beside `layers`, that `embed_tokens` reads, and those that
    `normalize` and `compute_logits` read.
    """

    def __init__(self, build: Build) -> None:
        """Declare every array; values come from weights."""
        config = build.config
        self.config: ModelConfig = config
        self.embed = Embedding(build, config.hidden_size)
        self.layers = nnx.List([LlamaLayer(build) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(build)
        self.head = None if config.tie_word_embeddings else Embedding(build, config.hidden_size)

    @property
    def front(self) -> tuple[str, ...]:
        """See the class."""
        return ("embed",)

    @property
    def back(self) -> tuple[str, ...]:
        """See the class."""
        return "final_norm", "embed" if self.head is None else "head"

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attention: Attention) -> jax.Array:
        """token_ids i32[T], positions i32[T] -> normed hidden states f32[T, hidden_size]."""
        x = self.embed_tokens(token_ids, positions)
        return self.normalize(self.run_layers(x, positions, attention, 0, self.config.num_layers))

    def embed_tokens(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """token_ids i32[T], positions i32[T] -> what the first layer takes, f32[T, hidden_size]."""
        return self.embed(token_ids)

    def run_layers(
        self, x: jax.Array, positions: jax.Array, attention: Attention, start: int, stop: int
    ) -> jax.Array:
        """f32[T, hidden_size] -> the same, through layers [start, stop)."""
        rope = self.config.rope
        rotation = cos_sin(positions, inverse_frequencies(rope, self.config.head_dim), rope.attention_factor)
        y = None  # what a layer adds is left to the norm of the next, which does both in one pass
        for layer_index in range(start, stop):
            x, y = self.layers[layer_index](layer_index, x, y, rotation, attention)
        return x if y is None else x + y

    def normalize(self, x: jax.Array) -> jax.Array:
        """The last layer's f32[T, hidden_size] -> what `compute_logits` takes."""
        return self.final_norm(x)

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        """[S, hidden_size] as returned by the call -> f32[S, vocab_size]."""
        return (self.embed if self.head is None else self.head).logits(hidden)
