"""What a turn should have been: the model over one whole sequence, with no pages, scheduler or kernel.

Owns: the replay of a turn by teacher forcing. Greedy and seeded random choice are functions of the logits
alone, so if every emitted token is the choice over the logits of the sequence before it, free-running dense
generation would have emitted the same tokens; one forward pass proves a whole turn.
Does not know: the engine, the cache, or how the tokens came about. It shares the sampler and the model's
layers with the engine, and nothing else.
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
from pensieve_jax.decoding.device import sampler
from pensieve_jax.decoding.device.structure import ModelStructure
from pensieve_jax.decoding.sampling_rows import COLUMNS, SamplerMode, SamplingRows, truncates

_MIN_PADDED = 16
MIN_MARGIN: Final = 1e-3
"""How far rounding may put two logits in float32 apart: which of two choices that are closer is best, and
whether an id that is so close to being cut is, is a matter of rounding."""


class Replay(NamedTuple):
    """A turn by the dense reference; n is the number of tokens that the engine emitted.

    `margins` are differences between the best and the second-best choice, in units of logits (a random
    row's, noise included): where one is below the numerical noise, either choice is right. How close an id
    is to being cut is no part of them, but it is of what is possible.
    """

    token_ids: np.ndarray  # i32[n]: what had to be emitted, given the emitted tokens before it
    possible: np.ndarray  # bool[n]: whether what was emitted is that, but for rounding
    margins: np.ndarray  # f32[n]
    logprobs: np.ndarray  # f32[n]: of the emitted tokens, without temperature, cuts or bans


class DenseReference:
    """The oracle for one model."""

    def __init__(
        self,
        model: Model,
        *,
        min_padded_tokens: int = _MIN_PADDED,
        min_padded_outputs: int = _MIN_PADDED,
        kv_dtype: str | None = None,
    ) -> None:
        """Share the arrays of `model`.

        Args:
          model: with its arrays on any mesh; `model.config` says what it is.
          min_padded_tokens: shorter sequences are padded to this length. Sequences are padded to powers of
            two; a large model compiles for long, and one shape for everything may then be cheaper.
          min_padded_outputs: so many tokens are judged at least, for the same reason.
          kv_dtype: as of `CacheConfig`: of an engine that stores KV state so, each token's by itself.
        """
        self._config: ModelConfig = model.config
        self._min_padded_tokens, self._min_padded_outputs = min_padded_tokens, min_padded_outputs
        self._kv_dtype = kv_dtype
        self._structure, self._leaves = ModelStructure.split(model)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """f32[len, V]: what the model says after each token of one sequence.

        Raises:
          ContextLengthError: the sequence exceeds the model's positions.
        """
        return np.asarray(self._logits(token_ids, np.arange(len(token_ids))))[: len(token_ids)]

    def gap(self, one: Sequence[int], other: Sequence[int]) -> float:
        """How far from the best choice are the first tokens in which two greedy sequences differ.

        Both were chosen after the same tokens, so the gap of a tie, which rounding decides, is below
        `MIN_MARGIN`. In units of logits; infinite if one of the sequences only goes on where the other ends.

        Raises:
          ContextLengthError: what they have in common exceeds the model's positions.
          ValueError: they are equal, or differ in the first token, before which there is nothing.
        """
        pairs = enumerate(zip(one, other, strict=False))
        place = next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
        if not place or place == len(one) == len(other):
            raise ValueError(f"two sequences differ at token {place} of {len(one)}: there is no choice there")
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
    ) -> Replay:
        """Replay one turn from the tokens before it, its prompt and what was emitted.

        Args:
          history_ids: every token of the turns before.
          prompt_ids: of this turn; not empty unless there is history.
          output_ids: the emitted tokens, an end-of-sequence or stop id included.
          params: of this turn.
          seed: the one the turn ran with; not read if greedy.
          margin: by which two logits may be off against each other, for what is possible.

        Raises:
          ContextLengthError: the whole exceeds the model's positions.
        """
        context_ids = [*history_ids, *prompt_ids]
        num_outputs = len(output_ids)
        positions = len(context_ids) + np.arange(num_outputs)
        # The last emitted token decides nothing, so it is no input.
        logits = self._logits([*context_ids, *output_ids][:-1], positions - 1)
        num_padded = logits.shape[0]
        rows = turn_rows(params, seed, _padded(positions, num_padded), self._config.eos_token_ids)
        rows.banned_ids[params.min_tokens :] = -1
        draws = params.temperature > 0
        mode = sampler.mode_for(draws, truncates(params), False)
        emitted = _padded(np.asarray(output_ids, np.int32), num_padded)
        parts = _judge(logits, rows, emitted, np.float32(margin), mode=mode)
        token_ids, possible, margins, logprobs = (np.asarray(part)[:num_outputs] for part in parts)
        margins = margins * np.float32(params.temperature if draws else 1)
        return Replay(token_ids, possible, margins, logprobs)

    def _logits(self, token_ids: Sequence[int], wanted: np.ndarray) -> jax.Array:
        """f32[W, V] after the tokens at the indices `wanted`; W is padded to a power of two."""
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
    """Sampler rows (numpy) for the tokens at these absolute positions of one turn, its ending ids banned."""
    num_rows = len(positions)
    ending_ids = np.array(params.ending_ids(eos_token_ids), np.int32)
    return SamplingRows(
        **{name: np.full(num_rows, getattr(params, name), column.dtype) for name, column in COLUMNS.items()},
        seed=np.tile(np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32), (num_rows, 1)),
        sample_positions=positions.astype(np.int32),
        banned_ids=np.tile(ending_ids, (num_rows, 1)),
    )


@functools.partial(jax.jit, static_argnames=("structure", "kv_dtype"))
def _dense_logits(
    leaves: list[jax.Array],
    token_ids: jax.Array,
    wanted: jax.Array,
    *,
    structure: ModelStructure,
    kv_dtype: str | None,
) -> jax.Array:
    """f32[W, V]; tokens past the end are padding, which causality keeps from mattering."""
    model = structure.merge(leaves)
    hidden = model(token_ids, jnp.arange(token_ids.shape[0], dtype=jnp.int32), DenseAttention(kv_dtype))
    return model.compute_logits(hidden[wanted])


@functools.partial(jax.jit, static_argnames=("mode",))
def _judge(
    logits: jax.Array,
    rows: SamplingRows[jax.Array],
    emitted: jax.Array,
    margin: jax.Array,
    *,
    mode: SamplerMode,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """i32[W] choices, bool[W] possible ones, f32[W] margins, f32[W] log-probabilities of the emitted ids."""
    best, token_ids = lax.top_k(sampler.decision_scores(logits, rows, mode=mode), 2)
    possible = sampler.possible_choices(logits, rows, mode=mode, margin=margin)
    of_emitted = functools.partial(jnp.take_along_axis, indices=emitted[:, None], axis=-1)
    logprobs = of_emitted(jax.nn.log_softmax(logits, axis=-1))
    return token_ids[:, 0], of_emitted(possible)[:, 0], best[:, 0] - best[:, 1], logprobs[:, 0]


def _padded_len(length: int) -> int:
    """The next power of two, so that few shapes are compiled."""
    return max(_MIN_PADDED, 1 << (length - 1).bit_length())


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    """`values` with zeros up to `length`."""
    return np.pad(values, (0, length - len(values)))
