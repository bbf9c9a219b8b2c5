"""OPT: learned positions (offset 2), layer norm before or after each block, biases, ReLU MLP.

Covers the published variants: pre-norm (all but 350m), post-norm with an embedding table narrower than
the hidden size (350m), and models without biases or without affine norms. Same contract as llama: flat
tokens, an `attention` callable, and parts that can run apart. Built by registry; its weights are filled by
weights.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from model_defs.attention import Attention
from model_defs.config import ModelConfig
from model_defs.layers import Build, Embedding, FusedQKV, LayerNorm, Linear, activation, declare
from model_defs.sharding import constrain

POSITION_OFFSET = 2  # rows 0 and 1 of the table are padding's, a leftover of how OPT was trained


class OPTLayer(nnx.Module):
    """One decoder layer."""

    def __init__(self, build: Build) -> None:
        """Declare the layer's arrays."""
        config = build.config
        hidden, wide = (config.hidden_size,), (config.intermediate_size,)
        self.pre_norm, self.activation = config.pre_norm, config.activation
        self.attention_norm = LayerNorm(build)
        self.qkv = FusedQKV(build, bias=config.attention_bias)
        self.out = Linear(
            build, (config.num_heads, config.head_dim), hidden, in_axis=0, bias=config.attention_bias
        )
        self.mlp_norm = LayerNorm(build)
        self.fc1 = Linear(build, hidden, wide, out_axis=0, bias=config.mlp_bias)
        self.fc2 = Linear(build, wide, hidden, in_axis=0, bias=config.mlp_bias)

    def __call__(
        self, layer_index: int, x: jax.Array, y: jax.Array | None, attention: Attention
    ) -> tuple[jax.Array, jax.Array | None]:
        """The stream f32[T, hidden_size] and what is still to be added to it -> the same after the layer.

        After a post-norm there is nothing to be added: the normed sum is the stream.
        """
        act = activation(self.activation)
        if self.pre_norm:
            x, normed = self.attention_norm.add(x, y)
            x, normed = self.mlp_norm.add(x, self.out(attention(layer_index, *self.qkv(normed))))
            return x, self.fc2(act(self.fc1(normed)))
        _, x = self.attention_norm.add(x, self.out(attention(layer_index, *self.qkv(x))), jnp.float32)
        _, x = self.mlp_norm.add(x, self.fc2(act(self.fc1(x))), jnp.float32)
        return x, None


class OPT(nnx.Module):
    """The whole model. `config` is its ModelConfig.

    `front` and `back` name the attributes, beside `layers`, that `embed_tokens` reads, and those that
    `normalize` and `compute_logits` read.
    """

    def __init__(self, build: Build) -> None:
        """Declare every array; values come from weights."""
        config = build.config
        self.config: ModelConfig = config
        self.build = build
        width, hidden = config.embed_width, config.hidden_size
        self.embed = Embedding(build, width)
        self.position_table = declare(build, (config.max_position_embeddings + POSITION_OFFSET, hidden))
        self.project_in = None if width == hidden else Linear(build, (width,), (hidden,))
        self.layers = nnx.List([OPTLayer(build) for _ in range(config.num_layers)])
        self.final_norm = LayerNorm(build) if config.final_norm else None
        self.project_out = None if width == hidden else Linear(build, (hidden,), (width,))
        self.head = None if config.tie_word_embeddings else Embedding(build, width)

    @property
    def front(self) -> tuple[str, ...]:
        """See the class."""
        return "embed", "position_table", "project_in"

    @property
    def back(self) -> tuple[str, ...]:
        """See the class."""
        return "final_norm", "project_out", "embed" if self.head is None else "head"

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attention: Attention) -> jax.Array:
        """token_ids i32[T], positions i32[T] (inside the table) -> hidden states f32[T, hidden_size]."""
        x = self.embed_tokens(token_ids, positions)
        return self.normalize(self.run_layers(x, positions, attention, 0, self.config.num_layers))

    def embed_tokens(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """token_ids i32[T], positions i32[T] -> what the first layer takes, f32[T, hidden_size]."""
        x = self.embed(token_ids)
        if self.project_in is not None:
            x = self.project_in(x).astype(jnp.float32)
        rows = jnp.take(self.position_table[...], positions + POSITION_OFFSET, axis=0, mode="clip")
        return constrain(x + rows, self.build.mesh)

    def run_layers(
        self, x: jax.Array, positions: jax.Array, attention: Attention, start: int, stop: int
    ) -> jax.Array:
        """f32[T, hidden_size] -> the same, through layers [start, stop); positions are not read again."""
        y = None  # what a layer adds is left to the norm of the next, which does both in one pass
        for layer_index in range(start, stop):
            x, y = self.layers[layer_index](layer_index, x, y, attention)
        return x if y is None else x + y

    def normalize(self, x: jax.Array) -> jax.Array:
        """The last layer's f32[T, hidden_size] -> what `compute_logits` takes."""
        return x if self.final_norm is None else self.final_norm(x)

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        """[S, hidden_size] as returned by the call -> f32[S, vocab_size]."""
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        return (self.embed if self.head is None else self.head).logits(hidden)
