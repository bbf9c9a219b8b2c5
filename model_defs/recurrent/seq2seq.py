"""Sequence to sequence: an LSTM reads a sentence, another writes one, word by word (thesis, section 2.7.4).

Owns: the model, its two cells, its requests, and their unfolding.
Does not know: how an engine forms batches.

Both cells have the same kind of state, {h, c, token}, so that a decoder takes over the row of its encoder.
An encoder sets the token to the <go> symbol, which the first decoder reads.
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
from model_defs.recurrent.layers import (
    RecurrentEmbedding,
    RecurrentLinear,
    best,
    linear_recipes,
    lstm_recipes,
    lstm_step,
)
from model_defs.recurrent.model import RecurrentConfig, RecurrentModel
from model_defs.recurrent.requests import check_count, check_id, check_ids, check_requests
from model_defs.recurrent.tensors import TensorSource, open_tensors, size_of
from model_defs.tensor_recipes import Recipe, table

DEFAULT_MAX_EXTRA_STEPS = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(RecurrentConfig):
    """Sizes of a `Seq2Seq`: `vocab_size` is the source vocabulary, `target_vocab_size` the target's.

    `go_id` is the first input of the decoder, `eos_id` its last output; both are target words.
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
        """Raise UnsupportedModelError for invalid sizes, or special tokens outside the target vocabulary."""
        super().__post_init__()
        for name, value in (("go_id", self.go_id), ("eos_id", self.eos_id)):
            if value >= self.target_vocab_size:
                raise UnsupportedModelError(
                    f"{name}={value} must be below target_vocab_size={self.target_vocab_size}"
                )


@dataclasses.dataclass(frozen=True, slots=True)
class Seq2SeqRequest:
    """Sentence to translate.

    Attributes:
      source_ids: i32[n].
      num_steps: most words of the translation, or their exact number without `eos_id`.
      eos_id: word that ends the translation, or None.
    """

    source_ids: np.ndarray
    num_steps: int
    eos_id: int | None


class _Coder(nnx.Module):
    """Base of both cells."""

    def __init__(self, config: Seq2SeqConfig, vocab_size: int, embedding_size: int) -> None:
        self.config = config
        self.embedding = RecurrentEmbedding(vocab_size, embedding_size, config.dtype)
        self.lstm = RecurrentLinear(embedding_size + config.hidden_size, 4 * config.hidden_size, config.dtype)

    @property
    def state(self) -> State:
        """State that both cells read and return."""
        size = self.config.hidden_size
        return {"h": field(size, dtype=self.config.dtype), "c": field(size), "token": field(dtype=jnp.int32)}


class Encoder(_Coder):
    """Cell that reads a word of the source sentence."""

    immediates = ("token",)

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config, config.vocab_size, config.embedding_size)

    def __call__(self, inputs: tuple[Arrays], token: jax.Array) -> dict[str, jax.Array]:
        """Read one word of each of B sentences, i32[B]."""
        (before,) = inputs
        h, c = lstm_step(self.lstm, self.embedding(token), before["h"], before["c"])
        return {"h": h, "c": c, "token": jnp.full_like(token, self.config.go_id)}


class Seq2SeqDecoder(_Coder):
    """Cell that writes the best next word, and reads it in the next step."""

    emits = ("token",)

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__(config, config.target_vocab_size, config.target_embedding_size)
        self.out = RecurrentLinear(config.hidden_size, config.target_vocab_size, config.dtype)

    def __call__(self, inputs: tuple[Arrays]) -> dict[str, jax.Array]:
        """Write one word of each of B sentences."""
        (before,) = inputs
        h, c = lstm_step(self.lstm, self.embedding(before["token"]), before["h"], before["c"])
        return {"h": h, "c": c, "token": best(self.out(h))}


class Seq2Seq(RecurrentModel[Seq2SeqConfig]):
    """Encoder and decoder without shared weights. A request's result is its tokens, <eos> included."""

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
        """Create a model with seeded weights; `target_vocab_size` defaults to `vocab_size`."""
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
        """Import a torch module of an `encoder` and a `decoder`, each of an `nn.Embedding` and an `nn.LSTM`.

        Args:
          source: its state_dict, or a safetensors file of it.
          go_id: first input of the decoder.
          eos_id: last output of the decoder.
          embedding, lstm: names of the two submodules in both.
          out: name of the decoder's `nn.Linear` that scores words.
          dtype: dtype to run in.

        Raises:
          CheckpointError: a tensor is missing, misshapen or unexpected.
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
        """Return both cells, with the batch sizes of the thesis. Decoders run first, to finish requests."""
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
        """Make a request to translate a sentence.

        Args:
          source_ids: words of the sentence, at least one.
          max_extra_steps: how many words longer than the source the translation may be.
          num_target_steps: write exactly this many words and ignore `eos_id`, as measured in the thesis.
          eos_id: word that ends the translation; None means the model's.

        Raises:
          RequestError: an argument is invalid.
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
        """Add a chain of encoders, followed by a chain of decoders, which may end early."""
        check_requests(Seq2SeqRequest, request)
        read = graph.chain(self.encoder, request.source_ids)
        graph.chain(self.decoder, num=request.num_steps, after=read[-1], until=request.eos_id)
