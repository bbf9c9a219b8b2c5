"""LSTM over the words of a sentence: a chain of one cell (thesis, sections 2.2.1 and 2.7.2).

Owns: the model, its requests, and their unfolding.
Does not know: how an engine forms batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import numpy as np

from model_defs.recurrent.cells import DEFAULT_MAX_BATCH, Arrays, GraphBuilder, RecurrentCell, State, field
from model_defs.recurrent.layers import RecurrentEmbedding, RecurrentLinear, lstm_recipes, lstm_step
from model_defs.recurrent.model import RecurrentConfig, RecurrentModel
from model_defs.recurrent.requests import check_ids, check_requests
from model_defs.recurrent.tensors import TensorSource, open_tensors, size_of
from model_defs.tensor_recipes import table


@dataclasses.dataclass(frozen=True, kw_only=True)
class LSTMConfig(RecurrentConfig):
    """Sizes of an `LSTM`."""

    architecture: ClassVar[str] = "lstm"
    vocab_size: int
    embedding_size: int
    hidden_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class LSTMRequest:
    """Sentence for an `LSTM`: its words, i32[n]."""

    token_ids: np.ndarray


class LSTM(RecurrentModel[LSTMConfig]):
    """LSTM of one layer and one direction, which is its own cell. Its result is {h, c} of the last word."""

    config_class = LSTMConfig
    immediates = ("token",)

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(config)
        self.embedding = RecurrentEmbedding(config.vocab_size, config.embedding_size, config.dtype)
        self.lstm = RecurrentLinear(
            config.embedding_size + config.hidden_size, 4 * config.hidden_size, config.dtype
        )

    @classmethod
    def random(
        cls,
        *,
        hidden_size: int,
        vocab_size: int,
        embedding_size: int | None = None,
        seed: int = 0,
        dtype: str = "float32",
    ) -> Self:
        """Create a model with seeded weights; `embedding_size` defaults to `hidden_size`."""
        width = hidden_size if embedding_size is None else embedding_size
        config = LSTMConfig(vocab_size=vocab_size, embedding_size=width, hidden_size=hidden_size, dtype=dtype)
        return cls(config)._fill_randomly(seed)

    @classmethod
    def from_torch(
        cls, source: TensorSource, *, embedding: str = "embedding", lstm: str = "lstm", dtype: str = "float32"
    ) -> Self:
        """Import a torch module of an `nn.Embedding` and an `nn.LSTM`.

        Args:
          source: its state_dict, or a safetensors file of it.
          embedding, lstm: names of the two submodules.
          dtype: dtype to run in.

        Raises:
          CheckpointError: a tensor is missing, misshapen or unexpected, such as those of a second layer.
        """
        tensors = open_tensors(source)
        config = LSTMConfig(
            vocab_size=size_of(tensors, f"{embedding}.weight", 0, 2),
            embedding_size=size_of(tensors, f"{embedding}.weight", 1, 2),
            hidden_size=size_of(tensors, f"{lstm}.weight_hh_l0", 1, 2),
            dtype=dtype,
        )
        words = table(f"{embedding}.weight", config.vocab_size, config.embedding_size)
        gates = lstm_recipes("lstm", lstm, config.embedding_size, config.hidden_size)
        return cls(config)._fill_from(tensors, {"embedding.weight": words, **gates})

    @property
    def state(self) -> State:
        """State after a word."""
        size = self.config.hidden_size
        return {"h": field(size, dtype=self.config.dtype), "c": field(size)}

    def __call__(self, inputs: tuple[Arrays], token: jax.Array) -> dict[str, jax.Array]:
        """Read one word of each of B sentences, i32[B]."""
        (before,) = inputs
        h, c = lstm_step(self.lstm, self.embedding(token), before["h"], before["c"])
        return {"h": h, "c": c}

    def cells(self, *, max_batch: int = DEFAULT_MAX_BATCH) -> list[RecurrentCell]:
        """Return the only cell: the model itself."""
        return [RecurrentCell(self, "lstm", max_batch)]

    def request(self, token_ids: Any) -> LSTMRequest:
        """Make a request of a sentence with at least one word.

        Raises:
          RequestError: the sentence is empty, or an id is not in the vocabulary.
        """
        return LSTMRequest(check_ids("token_ids", token_ids, self.config.vocab_size))

    def unfold(self, request: LSTMRequest, graph: GraphBuilder) -> None:
        """Add a node for each word."""
        check_requests(LSTMRequest, request)
        graph.returns(graph.chain(self, request.token_ids)[-1])

    def unfold_many(self, requests: Sequence[LSTMRequest], graph: GraphBuilder) -> None:
        """Add several sentences at once."""
        check_requests(LSTMRequest, *requests)
        graph.sentences(self, [request.token_ids for request in requests])
