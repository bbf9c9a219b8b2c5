"""`Decoder`: the interface of a model, which each family implements.

Owns the order of the parts: embed, layers, norm, logits. The parts can also run separately, by groups of
layers, each with only its own arrays. A decoder sees tokens and positions, never rows, pages or sequences;
the given `attention` callable decides which tokens see each other. Implemented by gated_decoder and by
families; called by the runner, the dense reference and tests.
"""

import abc
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx

from model_defs.attention import Attention
from model_defs.config import ModelConfig
from model_defs.layers import Embedding, Hidden, TokenVector


class Decoder(nnx.Module):
    """Whole model.

    Attributes:
      config: configuration of the model.
      layers: one module per layer.
      embed: the token table, which is also the head if `head` is None.
    """

    config: ModelConfig
    layers: nnx.List[Any]
    embed: Embedding
    head: Embedding | None

    @property
    def weights_dtype(self) -> str | None:
        """Format in 8 bits in which layers keep their weights; None keeps them in `compute_dtype`."""
        return self.embed.build.weights_dtype

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Dtype of the computation and, without a format of its own, of the KV cache.

        Scales of some norms, and weights in 8 bits, have another one.
        """
        return self.embed.build.dtype

    @property
    @abc.abstractmethod
    def front(self) -> tuple[str, ...]:
        """Names of the attributes, besides `layers`, that `embed_tokens` reads."""

    @property
    @abc.abstractmethod
    def back(self) -> tuple[str, ...]:
        """Names of the attributes, besides `layers`, that `normalize` and `compute_logits` read."""

    def __call__(
        self,
        token_ids: TokenVector,
        positions: TokenVector,
        attention: Attention,
    ) -> Hidden:
        """Map token_ids i32[T], positions i32[T] to normed hidden states f32[T, hidden_size]."""
        x = self.embed_tokens(token_ids, positions)
        return self.normalize(self.run_layers(x, positions, attention, 0, self.config.num_layers))

    @abc.abstractmethod
    def embed_tokens(self, token_ids: TokenVector, positions: TokenVector) -> Hidden:
        """Map token_ids i32[T], positions i32[T] to the first layer's input f32[T, hidden_size]."""

    @abc.abstractmethod
    def run_layers(
        self,
        x: Hidden,
        positions: TokenVector,
        attention: Attention,
        start: int,
        stop: int,
    ) -> Hidden:
        """Run layers [start, stop) on f32[T, hidden_size]; the output has the same shape."""

    @abc.abstractmethod
    def normalize(self, x: Hidden) -> Hidden:
        """Norm the last layer's output f32[T, hidden_size] for `compute_logits`."""

    def compute_logits(
        self, hidden: Annotated[jax.Array, "f32[S, hidden_size]"]
    ) -> Annotated[jax.Array, "f32[S, vocab_size]"]:
        """Map rows [S, hidden_size] of the normed output to logits f32[S, vocab_size]."""
        scores = (self.embed if self.head is None else self.head).logits(hidden)
        scale, cap = self.config.logit_scale, self.config.logit_softcap
        if scale != 1.0:
            scores = scores * scale
        return scores if cap is None else cap * jnp.tanh(scores / cap)
