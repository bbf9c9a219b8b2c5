"""Layer of gated decoders with a norm before each block, and another of what the block adds to the stream.

Owns the order of these norms, which GLM-4 and Gemma share. A norm of a block's output needs all of it, so the
sum over devices cannot wait for the next norm, as it does in a plain layer. Knows no family.
"""

import jax

from model_defs.all_reduce import Summand
from model_defs.attention import Attention
from model_defs.config import LayerKind
from model_defs.gated_decoder import GatedLayer, MakeNorm
from model_defs.layers import Build, RMSNorm
from model_defs.rope import Rotation


class SandwichLayer(GatedLayer):
    """Decoder layer with norms before attention and MLP, and others of their outputs."""

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
        super().__init__(build, kind, qkv_bias=qkv_bias, out_bias=out_bias, norm=norm)
        self.attention_out_norm, self.mlp_out_norm = norm(build), norm(build)

    def __call__(
        self,
        layer_index: int,
        x: jax.Array,
        y: Summand | None,
        rotation: Rotation | None,
        attention: Attention,
    ) -> tuple[jax.Array, Summand | None]:
        """Run the layer on the stream f32[T, hidden_size] and a pending term; return both after the layer."""
        x, normed = self.input_norm.add(x, y)
        y = self.attention_out_norm.of_sum(self.attend(layer_index, normed, rotation, attention))
        x, normed = self.mlp_norm.add(x, y)
        return x, self.mlp_out_norm.of_sum(self.mlp(normed))
