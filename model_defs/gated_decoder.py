"""Decoder of the Llama type: norms, rotary positions, grouped-query attention, gated MLPs.

Owns the forward pass that several families share, over a flat, ragged batch. Families differ by a subclass of
`GatedBlocks` or `GatedLayer`, or by the projections that have a bias. Layers are unrolled. Built by families.
"""

from collections.abc import Callable, Sequence

import jax
from flax import nnx

from model_defs.all_reduce import Summand, finish_sum
from model_defs.attention import Attention, attention_options
from model_defs.config import LayerKind, ModelConfig, RopeConfig
from model_defs.decoder import Decoder
from model_defs.errors import UnsupportedModelError
from model_defs.experts import ExpertMLP
from model_defs.layers import Build, Embedding, FusedQKV, Linear, Norm, RMSNorm, declare
from model_defs.rope import Rotation, rotate, rotation
from model_defs.sharding import TENSOR_AXIS

MakeNorm = Callable[[Build], Norm]
"""Class of the norms that a family has."""


def check_rotary(config: ModelConfig) -> None:
    """Raise UnsupportedModelError if an odd part of a head is rotated, or has another number of factors."""
    for rope in config.ropes:
        rotary_dim = rope.rotary_dim(config.head_dim)
        if rotary_dim % 2 or not rotary_dim:
            part = "" if rope.rotary_fraction == 1 else f" times rotary_fraction={rope.rotary_fraction}"
            raise UnsupportedModelError(
                f"head_dim={config.head_dim}{part} must be even for rotary embeddings"
            )
        for name in ("short_factors", "long_factors") if rope.kind == "longrope" else ():
            num_factors = len(getattr(rope, name))
            if num_factors != rotary_dim // 2:
                raise UnsupportedModelError(
                    f"rope.{name} has {num_factors} numbers; it must have {rotary_dim // 2}, one for each "
                    f"pair of rotated elements of a head"
                )


class GatedMLP(nnx.Module):
    """Gated MLP; gate and up are one column-parallel matmul, kernel [hidden_size, 2, intermediate_size]."""

    def __init__(self, build: Build) -> None:
        config = build.config
        assert config.gate is not None, "the family's activations are those of a gated MLP"
        self.gate = config.gate
        hidden, wide, bias = (config.hidden_size,), config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(build, hidden, (2, wide), out_axis=1, bias=bias)
        self.down = Linear(build, (wide,), hidden, in_axis=0, bias=bias)

    def __call__(self, x: jax.Array) -> Summand:
        """Map [T, hidden_size] to [T, hidden_size] in the kernels' dtype, or to partial sums.

        See `Linear.deferred`.
        """
        return self.down.deferred(self.gate_up.gated(x, self.gate))


class GatedBlocks(nnx.Module):
    """Attention and gated MLP of a layer; a subclass places the norms around them.

    Attributes:
      options: what its attention does besides the plain one.
      sinks: f[num_heads], the logits of attention sinks; None if the model has none.
    """

    def __init__(
        self, build: Build, kind: LayerKind, *, qkv_bias: bool = False, out_bias: bool = False
    ) -> None:
        """Declare the blocks' arrays. The family decides which attention projections have a bias."""
        config = build.config
        self.options = attention_options(config, kind)
        self.sinks = declare(build, (config.num_heads,), (TENSOR_AXIS,)) if config.has_sinks else None
        self.qkv = FusedQKV(build, bias=qkv_bias)
        heads = config.num_heads, config.head_dim
        self.out = Linear(build, heads, (config.hidden_size,), in_axis=0, bias=out_bias)
        self.mlp = GatedMLP(build) if kind.mlp == "dense" else ExpertMLP(build)

    def attend(
        self, layer_index: int, x: jax.Array, rotation: Rotation | None, attention: Attention
    ) -> Summand:
        """Map the attention block's input [T, hidden_size] to its output, of the same shape."""
        q, k, v = self.project(x)
        if rotation is not None:
            q, k = rotate(q, *rotation.queries), rotate(k, *rotation.keys)
        sinks = None if self.sinks is None else self.sinks[...]
        return self.out.deferred(attention(layer_index, q, k, v, options=self.options, sinks=sinks))

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Map [T, hidden_size] to unrotated q [T, num_heads, head_dim], k, v [T, num_kv_heads, head_dim]."""
        return self.qkv(x)


class GatedLayer(GatedBlocks):
    """Decoder layer that adds attention and a gated MLP, each after a norm."""

    def __init__(
        self,
        build: Build,
        kind: LayerKind,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        norm: MakeNorm = RMSNorm,
    ) -> None:
        """Declare the layer's arrays; see `GatedBlocks`."""
        super().__init__(build, kind, qkv_bias=qkv_bias, out_bias=out_bias)
        self.input_norm, self.mlp_norm = norm(build), norm(build)

    def __call__(
        self,
        layer_index: int,
        x: jax.Array,
        y: Summand | None,
        rotation: Rotation | None,
        attention: Attention,
    ) -> tuple[jax.Array, Summand | None]:
        """Run the layer on the stream f32[T, hidden_size] and a pending term; return both after the layer.

        `rotation` is that of the layer's kind.
        """
        x, normed = self.input_norm.add(x, y)
        x, normed = self.mlp_norm.add(x, self.attend(layer_index, normed, rotation, attention))
        return x, self.mlp(normed)


class GatedDecoder(Decoder):
    """Gated decoder model; see `Decoder`."""

    def __init__(
        self, build: Build, make_layer: Callable[[LayerKind], nnx.Module], *, norm: MakeNorm = RMSNorm
    ) -> None:
        """Declare every array. `make_layer` is called for each layer with its kind; a loader sets values.

        `norm` makes the norm after the last layer.
        """
        config = build.config
        check_rotary(config)
        self.config = config
        self.embed = Embedding(build, config.hidden_size)
        self.layers = nnx.List([make_layer(kind) for kind in config.kinds])
        self.final_norm = norm(build)
        self.head = None if config.tie_word_embeddings else Embedding(build, config.hidden_size)

    @property
    def front(self) -> tuple[str, ...]:
        return ("embed",)

    @property
    def back(self) -> tuple[str, ...]:
        return "final_norm", "embed" if self.head is None else "head"

    def embed_tokens(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Embed tokens; see `Decoder`. Positions are unused here."""
        x, scale = self.embed(token_ids), self.config.embedding_scale
        return x if scale == 1.0 else x * scale

    def run_layers(
        self, x: jax.Array, positions: jax.Array, attention: Attention, start: int, stop: int
    ) -> jax.Array:
        config, kinds = self.config, self.config.kinds[start:stop]
        rotations = {index: self._rotation(positions, config.ropes[index]) for index in _used_ropes(kinds)}
        y = None  # the next layer's norm adds a layer's output in the same pass
        for layer_index, kind in enumerate(kinds, start):
            rotation = None if kind.rope is None else rotations[kind.rope]
            x, y = self.layers[layer_index](layer_index, x, y, rotation, attention)
        return x if y is None else x + finish_sum(y)

    def _rotation(self, positions: jax.Array, rope: RopeConfig) -> Rotation:
        """Return the rotation by one rotary embedding, which its layers share."""
        served = rope.in_context(self.config.max_position_embeddings)
        return rotation(positions, served, self.config.head_dim)

    def normalize(self, x: jax.Array) -> jax.Array:
        return self.final_norm(x)


def _used_ropes(kinds: Sequence[LayerKind]) -> list[int]:
    """Return the indices of the rotary embeddings that these layers use, in ascending order."""
    return sorted({kind.rope for kind in kinds if kind.rope is not None})
