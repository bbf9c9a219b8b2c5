"""What every model is to those who run it: `Decoder`, the contract of a family's module.

Owns the order of the parts: embed, layers, norm, logits. They can also run apart, by runs of layers, each
with its own arrays only. A decoder sees tokens and positions, never rows, pages or sequences; who attends to
what is the business of the `attention` callable that it is given. Implemented by gated_decoder and by
families; called by the runner, the dense reference and tests.
"""

import abc
from typing import Any

import jax
from flax import nnx

from model_defs.attention import Attention
from model_defs.config import ModelConfig
from model_defs.layers import Embedding


class Decoder(nnx.Module):
    """A whole model.

    Attributes:
      config: what it is.
      layers: one module a layer.
      embed: the token table, which is the head as well where `head` is None.
    """

    config: ModelConfig
    layers: nnx.List[Any]
    embed: Embedding
    head: Embedding | None

    @property
    @abc.abstractmethod
    def front(self) -> tuple[str, ...]:
        """Names of the attributes, beside `layers`, that `embed_tokens` reads."""

    @property
    @abc.abstractmethod
    def back(self) -> tuple[str, ...]:
        """Names of those that `normalize` and `compute_logits` read."""

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attention: Attention) -> jax.Array:
        """token_ids i32[T], positions i32[T] -> normed hidden states f32[T, hidden_size]."""
        x = self.embed_tokens(token_ids, positions)
        return self.normalize(self.run_layers(x, positions, attention, 0, self.config.num_layers))

    @abc.abstractmethod
    def embed_tokens(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """token_ids i32[T], positions i32[T] -> what the first layer takes, f32[T, hidden_size]."""

    @abc.abstractmethod
    def run_layers(
        self, x: jax.Array, positions: jax.Array, attention: Attention, start: int, stop: int
    ) -> jax.Array:
        """f32[T, hidden_size] -> the same, through layers [start, stop)."""

    @abc.abstractmethod
    def normalize(self, x: jax.Array) -> jax.Array:
        """The last layer's f32[T, hidden_size] -> what `compute_logits` takes."""

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        """[S, hidden_size] as returned by the call -> f32[S, vocab_size]."""
        return (self.embed if self.head is None else self.head).logits(hidden)
