"""Decoder with learned positions, layer norms and a plain MLP, as in GPT-2 and OPT.

Owns its modules. Built by families.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from model_defs.all_reduce import Summand, finish_sum
from model_defs.attention import Attention
from model_defs.decoder import Decoder
from model_defs.errors import UnsupportedModelError
from model_defs.layers import Build, Embedding, FusedQKV, LayerNorm, Linear, declare
from model_defs.sharding import constrain


class LayerNormLayer(nnx.Module):
    """Decoder layer with layer norms before or after attention and a plain MLP."""

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
        self, layer_index: int, x: jax.Array, y: Summand | None, attention: Attention
    ) -> tuple[jax.Array, Summand | None]:
        """Run the layer on the residual stream `x` f32[T, hidden_size]; return the new stream and term.

        `y` is the output of the previous layer, which the first norm adds to the stream; the returned term
        is for the next layer's norm. With post-norm it is left out, as the stream is the normed sum.
        """
        if self.pre_norm:
            x, normed = self.attention_norm.add(x, y)
            x, normed = self.mlp_norm.add(x, self.out.deferred(attention(layer_index, *self.qkv(normed))))
            return x, self.fc2.deferred(self.fc1.activated(normed, self.activation))
        attended = self.out.deferred(attention(layer_index, *self.qkv(x)))
        _, x = self.attention_norm.add(x, attended, jnp.float32)
        _, x = self.mlp_norm.add(x, self.fc2.deferred(self.fc1.activated(x, self.activation)), jnp.float32)
        return x, None


class LearnedPositionDecoder(Decoder):
    """Decoder of such layers, with a table of positions; see `Decoder`."""

    def __init__(self, build: Build, *, position_offset: int) -> None:
        """Declare every array. A loader sets the values.

        The first position has the row `position_offset` of the table; the rows before it are not used.
        """
        config = build.config
        for name in ("layer_kinds", "attention_scale", "attention_softcap", "has_sinks"):
            if value := getattr(config, name):
                raise UnsupportedModelError(
                    f"{name}={value!r} is not supported by {config.architecture!r}; leave it out"
                )
        if (scale := config.embedding_scale) != 1.0:
            raise UnsupportedModelError(
                f"embedding_scale={scale!r} is not supported by {config.architecture!r}; 1.0 is"
            )
        self.config, self.position_offset = config, position_offset
        self.build = build
        width, hidden = config.embed_width, config.hidden_size
        self.embed = Embedding(build, width)
        self.position_table = declare(build, (config.max_position_embeddings + position_offset, hidden))
        self.project_in = None if width == hidden else Linear(build.plain, (width,), (hidden,))
        self.layers = nnx.List([LayerNormLayer(build) for _ in range(config.num_layers)])
        self.final_norm = LayerNorm(build) if config.final_norm else None
        self.project_out = None if width == hidden else Linear(build.plain, (hidden,), (width,))
        self.head = None if config.tie_word_embeddings else Embedding(build, width)

    @property
    def front(self) -> tuple[str, ...]:
        return "embed", "position_table", "project_in"

    @property
    def back(self) -> tuple[str, ...]:
        return "final_norm", "project_out", "embed" if self.head is None else "head"

    def embed_tokens(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Embed tokens and positions; see `Decoder`. Positions must be below `max_position_embeddings`."""
        x = self.embed(token_ids)
        if self.project_in is not None:
            x = self.project_in(x).astype(jnp.float32)
        rows = jnp.take(self.position_table[...], positions + self.position_offset, axis=0, mode="clip")
        return constrain(x + rows, self.build.mesh)

    def run_layers(
        self, x: jax.Array, positions: jax.Array, attention: Attention, start: int, stop: int
    ) -> jax.Array:
        """Run layers; see `Decoder`. Positions are unused: `embed_tokens` has added them."""
        y = None  # output of the layer before, which the next norm adds in the same kernel
        for layer_index in range(start, stop):
            x, y = self.layers[layer_index](layer_index, x, y, attention)
        return x if y is None else x + finish_sum(y)

    def normalize(self, x: jax.Array) -> jax.Array:
        return x if self.final_norm is None else self.final_norm(x)

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        return super().compute_logits(hidden if self.project_out is None else self.project_out(hidden))
