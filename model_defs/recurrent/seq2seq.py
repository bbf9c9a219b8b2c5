"""Sequence to sequence: an LSTM reads a sentence, another writes one, word by word (thesis, section 2.7.4).

Owns: the model, its two cells, its requests and how they unfold.
Does not know: batches of an engine.

Both cells leave the same kind of state, {h, c, token}, so that a decoder takes over the row of its encoder.
An encoder leaves the <go> symbol as the token that the first decoder reads.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model_defs.errors import UnsupportedModelError
from model_defs.recurrent.cells import DEFAULT_MAX_BATCH, Arrays, GraphBuilder, RecurrentCell, State, field
from model_defs.recurrent.model import RecurrentConfig, RecurrentModel
from model_defs.recurrent.parts import (
    RecurrentEmbedding,
    RecurrentLinear,
    best,
    linear_recipes,
    lstm_recipes,
    lstm_step,
)
from model_defs.recurrent.requests import check_count, check_id, check_ids, check_requests
from model_defs.recurrent.tensors import TensorSource, open_tensors, size_of
from model_defs.tensor_recipes import Recipe, table

DEFAULT_MAX_EXTRA_STEPS = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(RecurrentConfig):
    """Sizes of a `Seq2Seq`: `vocab_size` is of what is read, `target_vocab_size` of what is written.

    `go_id` is what the decoder reads first, `eos_id` what it writes last; both are words of the target.
    """

    architecture: ClassVar[str] = "seq2seq"
    vocab_size: int
    target_vocab_size: int
    embedding_size: int
    target_embedding_size: int
    hidden_size: int
    go_id: int
    eos_id: int

    def __post_init__(self) -> None:
        """Special tokens are in the vocabulary."""
        super().__post_init__()
        for name, value in (("go_id", self.go_id), ("eos_id", self.eos_id)):
            if value >= self.target_vocab_size:
                raise UnsupportedModelError(
                    f"{name}={value} must be below target_vocab_size={self.target_vocab_size}"
                )


@dataclasses.dataclass(frozen=True, slots=True)
class Seq2SeqRequest:
    """A sentence to be translated.

    Attributes:
      source_ids: i32[n].
      num_steps: words that are written, or how many at most.
      eos_id: the word that ends it; None if exactly `num_steps` are written.
    """

    source_ids: np.ndarray
    num_steps: int
    eos_id: int | None


class _Coder(nnx.Module):
    """What both cells have."""

    def __init__(self, config: Seq2SeqConfig, vocab_size: int, embedding_size: int) -> None:
        self.config = config
        self.embedding = RecurrentEmbedding(vocab_size, embedding_size, config.dtype)
        self.lstm = RecurrentLinear(embedding_size + config.hidden_size, 4 * config.hidden_size, config.dtype)

    @property
    def state(self) -> State:
        """What both leave and read."""
        size = self.config.hidden_size
        return {"h": field(size, dtype=self.config.dtype), "c": field(size), "token": field(dtype=jnp.int32)}


class Encoder(_Coder):
    """Reads a word of the source sentence."""

    immediates = ("token",)

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config, config.vocab_size, config.embedding_size)

    def __call__(self, inputs: tuple[Arrays], token: jax.Array) -> dict[str, jax.Array]:
        """A word of each of B sentences, i32[B]."""
        (before,) = inputs
        h, c = lstm_step(self.lstm, self.embedding(token), before["h"], before["c"])
        return {"h": h, "c": c, "token": jnp.full_like(token, self.config.go_id)}


class Seq2SeqDecoder(_Coder):
    """Writes the best next word, and reads it in the next step."""

    emits = ("token",)

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config, config.target_vocab_size, config.target_embedding_size)
        self.out = RecurrentLinear(config.hidden_size, config.target_vocab_size, config.dtype)

    def __call__(self, inputs: tuple[Arrays]) -> dict[str, jax.Array]:
        """A step of each of B sentences."""
        (before,) = inputs
        h, c = lstm_step(self.lstm, self.embedding(before["token"]), before["h"], before["c"])
        return {"h": h, "c": c, "token": best(self.out(h))}


class Seq2Seq(RecurrentModel[Seq2SeqConfig]):
    """An encoder and a decoder that share no weights. A request's result is its tokens, <eos> included."""

    config_class = Seq2SeqConfig

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config)
        self.encoder, self.decoder = Encoder(config), Seq2SeqDecoder(config)

    @classmethod
    def random(
        cls,
        *,
        hidden_size: int,
        vocab_size: int,
        target_vocab_size: int | None = None,
        seed: int = 0,
        dtype: str = "float32",
        go_id: int = 1,
        eos_id: int = 2,
    ) -> Self:
        """Seeded weights; both vocabularies are of one size unless that is said."""
        config = Seq2SeqConfig(
            vocab_size=vocab_size,
            target_vocab_size=vocab_size if target_vocab_size is None else target_vocab_size,
            embedding_size=hidden_size,
            target_embedding_size=hidden_size,
            hidden_size=hidden_size,
            dtype=dtype,
            go_id=go_id,
            eos_id=eos_id,
        )
        return cls(config)._fill_randomly(seed)

    @classmethod
    def from_torch(
        cls,
        source: TensorSource,
        *,
        go_id: int,
        eos_id: int,
        embedding: str = "embedding",
        lstm: str = "lstm",
        out: str = "out",
        dtype: str = "float32",
    ) -> Self:
        """A torch module of an `encoder` and a `decoder`, each of an `nn.Embedding` and an `nn.LSTM`.

        Args:
          source: its state_dict, or the safetensors file of it.
          go_id: what the decoder reads first.
          eos_id: what it writes last.
          embedding, lstm: what both call the two.
          out: what the decoder calls the `nn.Linear` that scores words.
          dtype: to run in.

        Raises:
          CheckpointError: a tensor is missing, misshapen or too many.
        """
        tensors = open_tensors(source)
        config = Seq2SeqConfig(
            vocab_size=size_of(tensors, f"encoder.{embedding}.weight", 0, 2),
            embedding_size=size_of(tensors, f"encoder.{embedding}.weight", 1, 2),
            target_vocab_size=size_of(tensors, f"decoder.{embedding}.weight", 0, 2),
            target_embedding_size=size_of(tensors, f"decoder.{embedding}.weight", 1, 2),
            hidden_size=size_of(tensors, f"encoder.{lstm}.weight_hh_l0", 1, 2),
            dtype=dtype,
            go_id=go_id,
            eos_id=eos_id,
        )
        recipes: dict[str, Recipe] = {}
        for part, vocab_size, width in (
            ("encoder", config.vocab_size, config.embedding_size),
            ("decoder", config.target_vocab_size, config.target_embedding_size),
        ):
            recipes[f"{part}.embedding.weight"] = table(f"{part}.{embedding}.weight", vocab_size, width)
            recipes |= lstm_recipes(f"{part}.lstm", f"{part}.{lstm}", width, config.hidden_size)
        recipes |= linear_recipes(
            "decoder.out", f"decoder.{out}", config.hidden_size, config.target_vocab_size
        )
        return cls(config)._fill_from(tensors, recipes)

    def cells(
        self, *, encoder_max_batch: int = DEFAULT_MAX_BATCH, decoder_max_batch: int = DEFAULT_MAX_BATCH // 2
    ) -> list[RecurrentCell]:
        """Both, with the batches of the thesis; the decoder goes first, so that requests leave early."""
        return [
            RecurrentCell(self.encoder, "encoder", encoder_max_batch, priority=0),
            RecurrentCell(self.decoder, "decoder", decoder_max_batch, priority=1),
        ]

    def request(
        self,
        source_ids: Any,
        *,
        max_extra_steps: int = DEFAULT_MAX_EXTRA_STEPS,
        num_target_steps: int | None = None,
        eos_id: int | None = None,
    ) -> Seq2SeqRequest:
        """A sentence to be translated.

        Args:
          source_ids: its words, one at least.
          max_extra_steps: by how many words the translation may be longer.
          num_target_steps: write exactly so many, whatever they are, as the thesis measures it.
          eos_id: the word that ends it; None is the model's.

        Raises:
          RequestError: one of these cannot be.
        """
        ids = check_ids("source_ids", source_ids, self.config.vocab_size)
        if num_target_steps is not None:
            return Seq2SeqRequest(ids, check_count("num_target_steps", num_target_steps, 1), None)
        most = len(ids) + check_count("max_extra_steps", max_extra_steps, 0)
        end = self.config.eos_id
        if eos_id is not None:
            end = check_id("eos_id", eos_id, self.config.target_vocab_size)
        return Seq2SeqRequest(ids, most, end)

    def unfold(self, request: Seq2SeqRequest, graph: GraphBuilder) -> None:
        """A chain of encoders, and behind it one of decoders, which may end early."""
        check_requests(Seq2SeqRequest, request)
        read = graph.chain(self.encoder, request.source_ids)
        graph.chain(self.decoder, num=request.num_steps, after=read[-1], until=request.eos_id)
