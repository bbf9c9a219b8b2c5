"""Decoder of the Llama type: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Owns the forward pass that several families share, over a flat, ragged batch. Families differ by a subclass of
`GatedLayer`, or by the projections that have a bias. Layers are unrolled. Built by families.
"""

from collections.abc import Callable

import jax
from flax import nnx

from model_defs.all_reduce import Summand, finish_sum
from model_defs.attention import Attention
from model_defs.config import ModelConfig
from model_defs.decoder import Decoder
from model_defs.errors import UnsupportedModelError
from model_defs.layers import Build, Embedding, FusedQKV, Linear, RMSNorm
from model_defs.rope import cos_sin, inverse_frequencies, rotate


def check_rotary(config: ModelConfig) -> None:
    """Raise UnsupportedModelError if an odd part of a head is rotated, or has another number of factors."""
    rope = config.rope
    rotary_dim = rope.rotary_dim(config.head_dim)
    if rotary_dim % 2 or not rotary_dim:
        part = "" if rope.rotary_fraction == 1 else f" times rotary_fraction={rope.rotary_fraction}"
        raise UnsupportedModelError(f"head_dim={config.head_dim}{part} must be even for rotary embeddings")
    for name in ("short_factors", "long_factors") if rope.kind == "longrope" else ():
        num_factors = len(getattr(rope, name))
        if num_factors != rotary_dim // 2:
            raise UnsupportedModelError(
                f"rope.{name} has {num_factors} numbers; it must have {rotary_dim // 2}, one for each pair "
                f"of rotated elements of a head"
            )


class GatedMLP(nnx.Module):
    """SwiGLU; gate and up are one column-parallel matmul, kernel [hidden_size, 2, intermediate_size]."""

    def __init__(self, build: Build) -> None:
        config = build.config
        hidden, wide, bias = (config.hidden_size,), config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(build, hidden, (2, wide), out_axis=1, bias=bias)
        self.down = Linear(build, (wide,), hidden, in_axis=0, bias=bias)

    def __call__(self, x: jax.Array) -> Summand:
        """Map [T, hidden_size] to [T, hidden_size] in the kernels' dtype, or to partial sums.

        See `Linear.deferred`.
        """
        return self.down.deferred(self.gate_up.gated(x))


class GatedBlocks(nnx.Module):
    """Attention and gated MLP of a layer; a subclass places the norms around them."""

    def __init__(self, build: Build, *, qkv_bias: bool = False, out_bias: bool = False) -> None:
        """Declare the blocks' arrays. The family decides which attention projections have a bias."""
        config = build.config
        self.qkv = FusedQKV(build, bias=qkv_bias)
        heads = config.num_heads, config.head_dim
        self.out = Linear(build, heads, (config.hidden_size,), in_axis=0, bias=out_bias)
        self.mlp = GatedMLP(build)

    def attend(
        self,
        layer_index: int,
        x: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        attention: Attention,
    ) -> Summand:
        """Map the attention block's input [T, hidden_size] to its output, of the same shape."""
        q, k, v = self.project(x)
        return self.out.deferred(attention(layer_index, rotate(q, *rotation), rotate(k, *rotation), v))

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Map [T, hidden_size] to unrotated q [T, num_heads, head_dim], k, v [T, num_kv_heads, head_dim]."""
        return self.qkv(x)


class GatedLayer(GatedBlocks):
    """Decoder layer that adds attention and a gated MLP, each after an RMSNorm."""

    def __init__(self, build: Build, *, qkv_bias: bool = False, out_bias: bool = False) -> None:
        """Declare the layer's arrays; see `GatedBlocks`."""
        super().__init__(build, qkv_bias=qkv_bias, out_bias=out_bias)
        self.input_norm = RMSNorm(build)
        self.mlp_norm = RMSNorm(build)

    def __call__(
        self,
        layer_index: int,
        x: jax.Array,
        y: Summand | None,
        rotation: tuple[jax.Array, jax.Array],
        attention: Attention,
    ) -> tuple[jax.Array, Summand | None]:
        """Run the layer on the stream f32[T, hidden_size] and a pending term; return both after the layer."""
        x, normed = self.input_norm.add(x, y)
        x, normed = self.mlp_norm.add(x, self.attend(layer_index, normed, rotation, attention))
        return x, self.mlp(normed)


class GatedDecoder(Decoder):
    """Gated decoder model; see `Decoder`."""

    def __init__(self, build: Build, make_layer: Callable[[], GatedBlocks]) -> None:
        """Declare every array, with one call of `make_layer` per layer. A loader sets the values."""
        config = build.config
        check_rotary(config)
        self.config = config
        self.embed = Embedding(build, config.hidden_size)
        self.layers = nnx.List([make_layer() for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(build)
        self.head = None if config.tie_word_embeddings else Embedding(build, config.hidden_size)

    @property
    def front(self) -> tuple[str, ...]:
        return ("embed",)

    @property
    def back(self) -> tuple[str, ...]:
        return "final_norm", "embed" if self.head is None else "head"

    def embed_tokens(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Embed tokens; see `Decoder`. Positions are unused here."""
        return self.embed(token_ids)

    def run_layers(
        self, x: jax.Array, positions: jax.Array, attention: Attention, start: int, stop: int
    ) -> jax.Array:
        rope = self.config.rope.in_context(self.config.max_position_embeddings)
        rotation = cos_sin(positions, inverse_frequencies(rope, self.config.head_dim), rope.attention_factor)
        y = None  # the next layer's norm adds a layer's output in the same pass
        for layer_index in range(start, stop):
            x, y = self.layers[layer_index](layer_index, x, y, rotation, attention)
        return x if y is None else x + finish_sum(y)

    def normalize(self, x: jax.Array) -> jax.Array:
        return self.final_norm(x)
