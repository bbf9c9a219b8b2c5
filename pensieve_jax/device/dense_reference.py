"""The dense reference of a turn: the model over one whole sequence, without pages, scheduler or kernels.

Owns: the replay of a turn by teacher forcing. Greedy and seeded random choices depend on the logits only. So
if every emitted token is the choice over the logits of the sequence before it, free-running dense generation
would have emitted the same tokens. One forward pass proves a whole turn.
Does not know: the engine, the cache, or how the tokens were produced. It shares only the sampler, formulas
of penalties and the layers with the engine, and counts the turn's ids itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model_defs.attention import DenseAttention
from model_defs.config import ModelConfig
from model_defs.registry import Model
from pensieve_jax.core.errors import ContextLengthError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.token_masks import WORD_BITS, num_words
from pensieve_jax.decoding.adjustments import bias_words, no_bias, penalty_words
from pensieve_jax.decoding.device import sampler
from pensieve_jax.decoding.device.adjust import Penalties, biased, has_bits, penalized
from pensieve_jax.decoding.device.structure import ModelStructure
from pensieve_jax.decoding.prompt_rows import PromptScores
from pensieve_jax.decoding.sampling_rows import COLUMNS, SamplerMode, SamplingRows, truncates
from pensieve_jax.engine.late_rows import LateRow

_MIN_PADDED = 16
MIN_MARGIN: Final = 1e-3
"""The largest difference between two float32 logits that rounding can explain. Which of two closer choices is
best, and whether an id this close to a cutoff is cut, depends on rounding."""


class Replay(NamedTuple):
    """A turn by the dense reference; n is the number of tokens that the engine emitted.

    `margins` are differences between the best and the second-best choice, in units of logits (with the noise
    of a sampled row). Where a margin is below the numerical noise, either choice is right. `margins` ignore
    how close an id is to a cutoff; `possible` considers it.
    """

    token_ids: np.ndarray  # i32[n]: the expected token, given the emitted tokens before it
    possible: np.ndarray  # bool[n]: whether the emitted token is the expected one up to rounding
    margins: np.ndarray  # f32[n]
    logprobs: np.ndarray  # f32[n]: of the emitted tokens, without temperature, cutoffs or bans


class DenseReference:
    """A reference oracle for one model."""

    def __init__(
        self,
        model: Model,
        *,
        min_padded_tokens: int = _MIN_PADDED,
        min_padded_outputs: int = _MIN_PADDED,
        kv_dtype: str | None = None,
        eos_token_ids: Sequence[int] | None = None,
    ) -> None:
        """Share the arrays of `model`.

        Args:
          model: the model with its arrays on any mesh and its configuration in `model.config`.
          min_padded_tokens: shorter sequences are padded to this length. Sequences are padded to powers of
            two. Since large models compile slowly, one shape for everything may be cheaper.
          min_padded_outputs: minimum number of outputs to judge, for the same reason.
          kv_dtype: as in `CacheConfig`, for an engine that stores KV state in this format; each token is
            quantized by itself.
          eos_token_ids: those of `ModelLimits`, for an engine with a tokenizer; None takes the model's.
        """
        self._config: ModelConfig = model.config
        self._eos_token_ids = tuple(model.config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self._min_padded_tokens, self._min_padded_outputs = min_padded_tokens, min_padded_outputs
        self._kv_dtype = kv_dtype
        self._structure, self._leaves = ModelStructure.split(model)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return f32[len, V], the logits after each token of one sequence.

        Raises:
          ContextLengthError: the sequence exceeds the model's positions.
        """
        return np.asarray(self._logits(token_ids, np.arange(len(token_ids))))[: len(token_ids)]

    def score_prompt(
        self, history_ids: Sequence[int], prompt_ids: Sequence[int], num_top: int = 0
    ) -> PromptScores:
        """Return the scores of a prompt's tokens; nothing predicts the first one of a conversation.

        Raises:
          ContextLengthError: the whole sequence exceeds the model's positions.
        """
        context_ids = [*history_ids, *prompt_ids]
        first = max(len(history_ids), 1)
        targets = np.asarray(context_ids[first:], np.int32)
        logits = self.logits(context_ids[:-1])[first - 1 :].astype(np.float64)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        logprobs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        order = np.argsort(-logits, axis=-1, kind="stable").astype(np.int32)
        top_ids = order[:, :num_top]
        return PromptScores(
            np.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0].astype(np.float32),
            (order == targets[:, None]).argmax(axis=-1).astype(np.int32) + 1,
            top_ids,
            np.take_along_axis(logprobs, top_ids, axis=-1).astype(np.float32),
        )

    def gap(self, one: Sequence[int], other: Sequence[int]) -> float:
        """Return how far the first differing tokens of two greedy sequences are from the best choice.

        Both were chosen after the same tokens, so in a tie, which rounding decides, the gap is below
        `MIN_MARGIN`. The unit is logits. The gap is infinite if one sequence is a prefix of the other.

        Raises:
          ContextLengthError: their common prefix exceeds the model's positions.
          ValueError: they are equal, or differ in the first token, which has no token before it.
        """
        pairs = enumerate(zip(one, other, strict=False))
        place = next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
        if not place or place == len(one) == len(other):
            raise ValueError(
                f"two sequences differ at token {place} of {len(one)}; no choice can be compared there"
            )
        if place in (len(one), len(other)):
            return math.inf
        logits = self.logits(one[:place])[-1]
        return float(logits.max() - min(logits[one[place]], logits[other[place]]))

    def replay_turn(
        self,
        history_ids: Sequence[int],
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        params: SamplingParams,
        seed: int = 0,
        *,
        margin: float = MIN_MARGIN,
        row: LateRow | None = None,
    ) -> Replay:
        """Replay one turn from the tokens before it, its prompt and the emitted tokens.

        Args:
          history_ids: all tokens of the earlier turns.
          prompt_ids: the prompt of this turn; not empty unless there is history.
          output_ids: the emitted tokens, including an end-of-sequence or stop id.
          params: sampling parameters of this turn.
          seed: the seed that the turn ran with; ignored if greedy.
          margin: the rounding error between two logits that `possible` tolerates.
          row: a new row with the turn's masks, for a turn with masks other than `allowed_token_ids`.

        Raises:
          ContextLengthError: the whole sequence exceeds the model's positions.
        """
        context_ids = [*history_ids, *prompt_ids]
        num_outputs = len(output_ids)
        positions = len(context_ids) + np.arange(num_outputs)
        # No choice follows the last emitted token, so it is not an input.
        logits = self._logits([*context_ids, *output_ids][:-1], positions - 1)
        num_padded = logits.shape[0]
        rows = turn_rows(params, seed, _padded(positions, num_padded), self._eos_token_ids)
        rows.banned_ids[params.min_tokens :] = -1
        draws = params.temperature > 0
        mode = sampler.mode_for(draws, truncates(params), False)
        emitted = _padded(np.asarray(output_ids, np.int32), num_padded)
        scores = self._scores(logits, params, context_ids, emitted, _masks(params, output_ids, row, logits))
        # A penalty scales logits, and so their rounding errors.
        margin *= max(params.repetition_penalty, 1 / params.repetition_penalty)
        parts = _judge(logits, scores, rows, emitted, np.float32(margin), mode=mode)
        token_ids, possible, margins, logprobs = (np.asarray(part)[:num_outputs] for part in parts)
        margins = margins * np.float32(params.temperature if draws else 1)
        return Replay(token_ids, possible, margins, logprobs)

    def _scores(
        self,
        logits: jax.Array,
        params: SamplingParams,
        context_ids: Sequence[int],
        emitted: np.ndarray,
        masks: np.ndarray | None,
    ) -> jax.Array:
        """Return f32[W, V], the logits of a turn after its penalties, biases and masks."""
        scores, num_rows = logits, len(logits)
        if params.has_penalties:
            is_in_context = np.zeros(self._config.vocab_size, bool)
            if params.repetition_penalty != 1:
                is_in_context[context_ids] = True
            words = np.tile(penalty_words(params)[:, None, None], (1, num_rows, 1)).view(np.float32)
            scores = _penalized(scores, emitted, is_in_context, Penalties(*words))
        if params.logit_bias:
            bias = no_bias(num_rows)
            bias[:, :, : len(params.logit_bias)] = bias_words(params)[:, None]
            scores = biased(scores, jnp.asarray(bias))
        if masks is not None:
            allowed = jnp.pad(masks, ((0, num_rows - len(masks)), (0, 0)), constant_values=-1)
            scores = jnp.where(has_bits(allowed, 0, scores.shape[1]), scores, -jnp.inf)
        return scores

    def _logits(self, token_ids: Sequence[int], wanted: np.ndarray) -> jax.Array:
        """Return f32[W, V], the logits after the tokens at `wanted`; W is padded to a power of two."""
        limit = self._config.max_position_embeddings
        if len(token_ids) > limit:
            raise ContextLengthError("token_ids", f"{len(token_ids)} tokens", f"at most {limit} tokens")
        num_padded = min(max(_padded_len(len(token_ids)), self._min_padded_tokens), limit)
        ids = _padded(np.asarray(token_ids, np.int32), num_padded)
        num_wanted = min(max(_padded_len(len(wanted)), self._min_padded_outputs), num_padded)
        wanted = _padded(wanted.astype(np.int32), num_wanted)
        return _dense_logits(self._leaves, ids, wanted, structure=self._structure, kv_dtype=self._kv_dtype)


def turn_rows(
    params: SamplingParams, seed: int, positions: np.ndarray, eos_token_ids: Sequence[int]
) -> SamplingRows[np.ndarray]:
    """Return sampler rows (numpy) for these absolute positions of one turn, with its ending ids banned."""
    num_rows = len(positions)
    ending_ids = np.array(params.ending_ids(eos_token_ids), np.int32)
    return SamplingRows(
        **{name: np.full(num_rows, getattr(params, name), column.dtype) for name, column in COLUMNS.items()},
        seed=np.tile(np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32), (num_rows, 1)),
        sample_positions=positions.astype(np.int32),
        banned_ids=np.tile(ending_ids, (num_rows, 1)),
    )


def _masks(
    params: SamplingParams, output_ids: Sequence[int], row: LateRow | None, logits: jax.Array
) -> np.ndarray | None:
    """Return the masks of a turn's outputs, i32[n, ceil(V / 32)], or None if all ids are allowed."""
    size = num_words(logits.shape[1])
    if row is None:
        if params.allowed_token_ids is None:
            return None
        allowed = np.zeros(size * WORD_BITS, bool)
        allowed[list(params.allowed_token_ids)] = True
        return np.tile(np.packbits(allowed, bitorder="little").view(np.int32), (len(output_ids), 1))
    words = np.full((len(output_ids), size), -1, np.int32)
    for one, token_id in zip(words, output_ids, strict=True):
        row.fill(one)
        row.accept(token_id)
    return words


@jax.jit
def _penalized(
    logits: jax.Array, emitted: jax.Array, is_in_context: jax.Array, penalties: Penalties
) -> jax.Array:
    """Return f32[W, V] with penalties; row i counts the emitted ids before it."""
    is_emitted = jnp.arange(logits.shape[1]) == emitted[:, None]
    num_before = jnp.cumsum(is_emitted, axis=0) - is_emitted
    return penalized(logits, num_before.astype(jnp.uint16), is_in_context, penalties)


@functools.partial(jax.jit, static_argnames=("structure", "kv_dtype"))
def _dense_logits(
    leaves: list[jax.Array],
    token_ids: jax.Array,
    wanted: jax.Array,
    *,
    structure: ModelStructure,
    kv_dtype: str | None,
) -> jax.Array:
    """Return f32[W, V]; tokens past the end are padding, which causal attention ignores."""
    model = structure.merge(leaves)
    hidden = model(token_ids, jnp.arange(token_ids.shape[0], dtype=jnp.int32), DenseAttention(kv_dtype))
    return model.compute_logits(hidden[wanted])


@functools.partial(jax.jit, static_argnames=("mode",))
def _judge(
    logits: jax.Array,
    scores: jax.Array,
    rows: SamplingRows[jax.Array],
    emitted: jax.Array,
    margin: jax.Array,
    *,
    mode: SamplerMode,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return i32[W] choices, bool[W] possible, f32[W] margins and f32[W] log-probabilities of emitted ids."""
    best, token_ids = lax.top_k(sampler.decision_scores(scores, rows, mode=mode), 2)
    possible = sampler.possible_choices(scores, rows, mode=mode, margin=margin)
    of_emitted = functools.partial(jnp.take_along_axis, indices=emitted[:, None], axis=-1)
    logprobs = of_emitted(jax.nn.log_softmax(logits, axis=-1))
    return token_ids[:, 0], of_emitted(possible)[:, 0], best[:, 0] - best[:, 1], logprobs[:, 0]


def _padded_len(length: int) -> int:
    """Return the next power of two, so that few shapes are compiled."""
    return max(_MIN_PADDED, 1 << (length - 1).bit_length())


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    """Return `values` padded with zeros to `length`."""
    return np.pad(values, (0, length - len(values)))
