"""Decoder of the Llama type: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Owns the forward pass that several families share, over a flat, ragged batch. Families differ by a subclass of
`GatedLayer`, or by the projections that have a bias. Layers are unrolled. Built by families.
"""

from collections.abc import Callable, Sequence

import jax
from flax import nnx

from model_defs.all_reduce import Summand, finish_sum
from model_defs.attention import Attention, attention_options
from model_defs.config import LayerKind, ModelConfig, RopeConfig
from model_defs.decoder import Decoder
from model_defs.errors import UnsupportedModelError
from model_defs.layers import Build, Embedding, FusedQKV, Linear, RMSNorm, declare
from model_defs.rope import Rotation, cos_sin, inverse_frequencies, rotate
from model_defs.sharding import TENSOR_AXIS


def check_rotary(config: ModelConfig) -> None:
    """Raise UnsupportedModelError if `head_dim` is odd."""
    if config.head_dim % 2:
        raise UnsupportedModelError(f"head_dim={config.head_dim} must be even for rotary embeddings")


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


class GatedLayer(nnx.Module):
    """Decoder layer that adds attention and a gated MLP, each after an RMSNorm.

    Attributes:
      options: what its attention does besides the plain one.
      sinks: f[num_heads], the logits of attention sinks; None if the model has none.
    """

    def __init__(
        self, build: Build, kind: LayerKind, *, qkv_bias: bool = False, out_bias: bool = False
    ) -> None:
        """Declare the layer's arrays. The family decides which attention projections have a bias."""
        config = build.config
        if kind.mlp != "dense":
            raise UnsupportedModelError(
                f"layer_kinds: mlp={kind.mlp!r} is not supported by {config.architecture!r}; 'dense' is"
            )
        self.options = attention_options(config, kind)
        self.sinks = declare(build, (config.num_heads,), (TENSOR_AXIS,)) if config.has_sinks else None
        self.input_norm = RMSNorm(build)
        self.qkv = FusedQKV(build, bias=qkv_bias)
        heads = config.num_heads, config.head_dim
        self.out = Linear(build, heads, (config.hidden_size,), in_axis=0, bias=out_bias)
        self.mlp_norm = RMSNorm(build)
        self.mlp = GatedMLP(build)

    def __call__(
        self,
        layer_index: int,
        x: jax.Array,
        y: Summand | None,
        rotation: Rotation | None,
        attention: Attention,
    ) -> tuple[jax.Array, Summand]:
        """Run the layer on the stream f32[T, hidden_size] and a pending term; return both after the layer.

        `rotation` is that of the layer's kind.
        """
        x, normed = self.input_norm.add(x, y)
        y = self.out.deferred(self.attend(layer_index, normed, rotation, attention))
        x, normed = self.mlp_norm.add(x, y)
        return x, self.mlp(normed)

    def attend(
        self, layer_index: int, normed: jax.Array, rotation: Rotation | None, attention: Attention
    ) -> jax.Array:
        """Map [T, hidden_size] to [T, num_heads, head_dim] by attention as the layer's kind has it."""
        q, k, v = self.project(normed)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        sinks = None if self.sinks is None else self.sinks[...]
        return attention(layer_index, q, k, v, options=self.options, sinks=sinks)

    def project(self, normed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Map [T, hidden_size] to unrotated q [T, num_heads, head_dim], k, v [T, num_kv_heads, head_dim]."""
        return self.qkv(normed)


class GatedDecoder(Decoder):
    """Gated decoder model; see `Decoder`."""

    def __init__(self, build: Build, make_layer: Callable[[LayerKind], GatedLayer]) -> None:
        """Declare every array. `make_layer` is called for each layer with its kind; a loader sets values."""
        config = build.config
        check_rotary(config)
        self.config = config
        self.embed = Embedding(build, config.hidden_size)
        self.layers = nnx.List([make_layer(kind) for kind in config.kinds])
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
        config, kinds = self.config, self.config.kinds[start:stop]
        rotations = {index: self._rotation(positions, config.ropes[index]) for index in _used_ropes(kinds)}
        y = None  # the next layer's norm adds a layer's output in the same pass
        for layer_index, kind in enumerate(kinds, start):
            rotation = None if kind.rope is None else rotations[kind.rope]
            x, y = self.layers[layer_index](layer_index, x, y, rotation, attention)
        return x if y is None else x + finish_sum(y)

    def _rotation(self, positions: jax.Array, rope: RopeConfig) -> Rotation:
        """Return cos and sin of one rotary embedding, which its layers share."""
        return cos_sin(positions, inverse_frequencies(rope, self.config.head_dim), rope.attention_factor)

    def normalize(self, x: jax.Array) -> jax.Array:
        return self.final_norm(x)


def _used_ropes(kinds: Sequence[LayerKind]) -> list[int]:
    """Return the indices of the rotary embeddings that these layers use, in ascending order."""
    return sorted({kind.rope for kind in kinds if kind.rope is not None})
