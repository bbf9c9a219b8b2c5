"""A runner without a model whose next token depends on every KV entry that a step reads through its pages.

Layer l stores, for each token, a hash of (position, token, sum of layer l-1's entries over all positions up
to it), read through the row's page list. One wrong, stale, swapped or missing entry in any layer therefore
changes the entries of all later positions and the next token. A random token depends on the seed, the
position and every sampling parameter as well, and banned ids are skipped. With penalties or biases, every
token depends on them and on the counts of the turn's ids.

`dense_continuation` is the reference: it computes the same from a plain list of tokens, without pages.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pensieve_jax.config import EngineConfig
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.adjustments import (
    PADDING_CODE,
    Adjustment,
    bias_words,
    no_bias,
    not_counted,
    penalty_words,
)
from pensieve_jax.decoding.prompt_rows import PromptScores
from pensieve_jax.engine.late_rows import LateRow
from pensieve_jax.engine.runner import Progress
from pensieve_jax.scheduler import StepPlan, StepResult, bucket_layout, token_buckets
from pensieve_jax.scheduler.plan import FLAG_LOGPROBS, FLAG_SAMPLES, FLAG_TRUNCATES
from tests.engine.fake_transfers import IMMEDIATE, POISON_64, Delays, FakeTransfers

VOCAB_SIZE = 997
EOS_TOKEN_IDS = tuple(range(0, VOCAB_SIZE, 40))  # a reply ends by itself after about 40 tokens
NUM_LAYERS = 3
_WORD = (1 << 64) - 1
_POSITION, _TOKEN, _START = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_POSITION_64, _TOKEN_64, _START_64 = np.uint64(_POSITION), np.uint64(_TOKEN), np.uint64(_START)
_FIRST_64, _SECOND_64 = np.uint64(_FIRST), np.uint64(_SECOND)


def mix(position: int, token_id: int, total: int) -> int:
    """Hash the three to 64 bits with an avalanche, so that no two errors cancel by accident."""
    x = ((total ^ (position * _POSITION & _WORD)) + token_id * _TOKEN + _START) & _WORD
    x = (x ^ (x >> 31)) * _FIRST & _WORD
    x = (x ^ (x >> 27)) * _SECOND & _WORD
    return x ^ (x >> 33)


def parts_of_mix(positions: np.ndarray, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two u64[n]: what `finish_mix` needs of positions and ids, the same in every layer."""
    return positions.astype(np.uint64) * _POSITION_64, token_ids.astype(np.uint64) * _TOKEN_64 + _START_64


def finish_mix(of_positions: np.ndarray, of_token_ids: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Return u64[n]: the value of `mix` for each token, computed from what `parts_of_mix` returned."""
    x = totals ^ of_positions
    x += of_token_ids
    x ^= x >> np.uint64(31)
    x *= _FIRST_64
    x ^= x >> np.uint64(27)
    x *= _SECOND_64
    x ^= x >> np.uint64(33)
    return x


class Choice(NamedTuple):
    """Sampling parameters of one row; floats have 32 bits."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    position: int
    banned_ids: frozenset[int]
    min_p: float = 0.0
    adjustment: int = 0  # what `adjustment_of` makes of penalties, counts and biases


def choose(total: int, how: Choice) -> int:
    """Return the next token after KV entries that sum to `total` in the last layer."""
    word = mix(0, 0, total) ^ how.adjustment
    if how.temperature > 0:
        (floats,) = struct.unpack("<Q", struct.pack("<ff", how.temperature, how.top_p))
        word = mix(how.position, how.top_k, word ^ mix(0, 1, how.seed) ^ floats)
        if how.min_p:
            word = mix(2, int(how.min_p * 2**20), word)
    token_id = word % VOCAB_SIZE
    while token_id in how.banned_ids:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def adjustment_of(penalties: np.ndarray, counts: np.ndarray, seen: np.ndarray, bias: np.ndarray) -> int:
    """Return a hash of a row's penalties (i32[3]), counts and context by id, and biases (i32[2, n])."""
    digest = hashlib.blake2b(digest_size=8)
    off = penalty_words(SamplingParams())
    if (penalties != off).any():
        digest.update(penalties.tobytes() + counts.astype(np.int64).tobytes())
        if penalties[0] != off[0]:
            digest.update((seen | (counts > 0)).tobytes())
    if (bias[0] >= 0).any():
        digest.update(bias[:, bias[0] >= 0].tobytes())
    elif (penalties == off).all():
        return 0
    return int.from_bytes(digest.digest(), "little")


def _dense_adjustment(params: SamplingParams, context_ids: Sequence[int], reply_ids: Sequence[int]) -> int:
    counts = np.bincount(np.array(reply_ids, int), minlength=VOCAB_SIZE)
    seen = np.zeros(VOCAB_SIZE, bool)
    seen[list(context_ids)] = True
    bias = bias_words(params) if params.logit_bias else np.zeros((2, 0), np.int32)
    return adjustment_of(penalty_words(params), counts, seen, bias)


def logprob_of(total: int) -> float:
    """Return the expected log-probability of the chosen token; it is exact in 32 bits."""
    return -((total >> 20) % 4096) / 1024


def top_of(total: int, count: int) -> dict[int, float]:
    """Return the expected `count` most likely alternatives."""
    return {(total + i) % VOCAB_SIZE: -i / 8 for i in range(count)}


def score_of(total: int, token_id: int) -> tuple[float, int]:
    """Return the expected log-probability and rank of a prompt token after these KV entries."""
    word = mix(1, token_id, total)
    return -(word % 4096) / 1024, 1 + word % VOCAB_SIZE


def dense_totals(token_ids: Sequence[int]) -> list[int]:
    """Return the sum of KV entries in the last layer after each of the tokens, computed without pages."""
    parts = parts_of_mix(np.arange(len(token_ids)), np.asarray(token_ids))
    totals = np.zeros(len(token_ids), np.uint64)
    for _ in range(NUM_LAYERS):
        totals = finish_mix(*parts, totals).cumsum()
    return [int(total) for total in totals]


class Continuation(NamedTuple):
    """The expected continuation of some tokens."""

    token_ids: list[int]
    totals: list[int]  # the sum from which each was chosen


def dense_continuation(
    token_ids: Sequence[int],
    params: SamplingParams,
    seed: int,
    count: int,
    may_end: Callable[[int], bool],
    row: LateRow | None = None,
) -> Continuation:
    """Return up to `count` tokens after `token_ids`, computed without pages, within the masks of `row`.

    If `may_end(n)`, the n-th may be an ending id, and is then the last.
    """
    parts = parts_of_mix(np.arange(len(token_ids)), np.asarray(token_ids))
    layers = [np.zeros(len(token_ids), np.uint64)]
    for _ in range(NUM_LAYERS):
        layers.append(finish_mix(*parts, layers[-1]).cumsum())
    totals = [int(layer[-1]) for layer in layers[1:]]
    ending_ids = frozenset(params.ending_ids(EOS_TOKEN_IDS))
    found = Continuation([], [])
    for number in range(1, count + 1):
        position = len(token_ids) + number - 1
        banned_ids = frozenset() if may_end(number) else ending_ids
        if row is not None:
            words = np.full((1, -(-VOCAB_SIZE // 32)), -1, np.int32)
            row.fill(words[0])
            banned_ids |= masked_ids(words, 0)
        elif params.allowed_token_ids is not None:
            banned_ids |= frozenset(range(VOCAB_SIZE)) - frozenset(params.allowed_token_ids)
        how = _choice(params, seed, position, banned_ids)
        how = how._replace(adjustment=_dense_adjustment(params, token_ids, found.token_ids))
        token_id = choose(totals[-1], how)
        found.token_ids.append(token_id)
        found.totals.append(totals[-1])
        if row is not None:
            row.accept(token_id)
        if token_id in ending_ids:
            break
        below = 0
        for layer in range(NUM_LAYERS):
            below = totals[layer] = (totals[layer] + mix(position, token_id, below)) & _WORD
    return found


def _choice(params: SamplingParams, seed: int, position: int, banned_ids: frozenset[int]) -> Choice:
    return Choice(params.temperature, params.top_k, params.top_p, seed, position, banned_ids, params.min_p)


@dataclass(eq=False)
class FakeHandle:
    """A step in flight: the sums from which its rows choose, its scores, and the result after `choose`."""

    plan: StepPlan
    totals: list[int]
    prompt: PromptScores | None = None
    result: StepResult | None = None


def masked_ids(words: np.ndarray | None, row: int) -> frozenset[int]:
    """Return the ids that a row may not choose."""
    if words is None:
        return frozenset()
    bits = np.unpackbits(words[row].view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return frozenset(np.flatnonzero(bits == 0).tolist())


class FakeRunner:
    """Computes a step when it is launched, as program order on a device would.

    Attributes:
        transfers: moves chunks between its pages and host slots.
    """

    def __init__(self, config: EngineConfig, max_context_tokens: int, delays: Delays = IMMEDIATE) -> None:
        self.page_size = config.cache.chunk_tokens
        self.num_pages = config.cache.num_gpu_pages + 1
        self.num_compilations = 0
        self.num_top = config.runner.max_logprobs
        self.num_count_slots = config.num_count_slots
        self.layouts = {
            bucket: bucket_layout(config, bucket, context_tokens=max_context_tokens)
            for bucket in token_buckets(config.scheduler)
        }
        self.transfers = FakeTransfers(
            self, config.cache.num_cpu_pages, NUM_LAYERS, config.runner.max_num_staged_pages, delays
        )
        self.reset()

    def warm_up(self, progress: Progress | None = None) -> None:
        pass

    def fill_tiles(self, plan: StepPlan) -> None:
        pass

    def memory_analysis(self) -> dict[str, Any]:
        return {}

    def reset(self) -> None:
        self.transfers.reset()
        num_slots = self.num_pages * self.page_size
        self.pools = [np.full(num_slots, POISON_64) for _ in range(NUM_LAYERS)]
        self._offsets = np.arange(self.page_size)
        self._prev_ids = np.zeros(0, np.int32)
        self._next_step_id: int | None = None
        self._unchosen: FakeHandle | None = None
        # As on a device, a slot holds anything until it is seeded.
        self._counts = np.full((self.num_count_slots, VOCAB_SIZE), 77)
        self._seen = np.ones((self.num_count_slots, VOCAB_SIZE), bool)

    def launch(self, plan: StepPlan) -> FakeHandle:
        self._check(plan)
        self._next_step_id = plan.step_id + 1
        rows, pages = [], set()
        for row in range(int(plan.num_rows[0])):
            tokens, row_pages = self._row(plan, row)
            pages.update(row_pages.tolist())
            slots = (row_pages[:, None] * self.page_size + self._offsets).reshape(-1)
            rows.append((tokens, slots[: plan.kv_lens[row]]))
        num_tokens = int(plan.cu_q_lens[-1])
        pages.update((plan.write_slots[:num_tokens] // self.page_size).tolist())
        self.transfers.before_step(pages)
        prev_samples = plan.prev_samples[:num_tokens]
        token_ids = plan.token_ids[:num_tokens].copy()
        from_prev = prev_samples >= 0
        token_ids[from_prev] = self._prev_ids[prev_samples[from_prev]]
        parts = parts_of_mix(plan.positions[:num_tokens], token_ids)
        totals = np.zeros(num_tokens, np.uint64)
        for pool in self.pools:
            pool[plan.write_slots[:num_tokens]] = finish_mix(*parts, totals)
            for tokens, slots in rows:
                entries = pool[slots]
                assert not (entries == POISON_64).any(), (
                    f"step {plan.step_id} reads an entry that was never written"
                )
                totals[tokens] = entries.cumsum()[len(slots) - _len(tokens) :]
        num_samples = int(plan.num_samples[0])
        self._unchosen = FakeHandle(plan, totals[plan.sample_tokens[:num_samples]].tolist())
        if plan.prompt_rows is not None:
            scored = totals[plan.prompt_rows.tokens].tolist()
            self._unchosen.prompt = self._score(scored, plan.prompt_rows.targets.tolist())
        return self._unchosen

    def choose(self, handle: FakeHandle, words: np.ndarray | None) -> None:
        assert handle is self._unchosen, "not the last launched step"
        self._unchosen = None
        plan = handle.plan
        how = [] if plan.adjustment is None else self._adjust(plan, plan.adjustment)
        handle.result = self._sample(plan, handle.totals, words, how)._replace(prompt=handle.prompt)
        self._prev_ids = handle.result.token_ids

    def fetch(self, handle: FakeHandle) -> StepResult:
        assert handle.result is not None, "its ids were not chosen"
        return handle.result

    def _row(self, plan: StepPlan, row: int) -> tuple[slice, np.ndarray]:
        """Return the row's tokens, and the pages of all entries that its last token attends to."""
        num_pages = -(-int(plan.kv_lens[row]) // self.page_size)
        tokens = slice(int(plan.cu_q_lens[row]), int(plan.cu_q_lens[row + 1]))
        return tokens, plan.page_indices[row, :num_pages].astype(np.int64)

    def _adjust(self, plan: StepPlan, adjustment: Adjustment) -> list[int]:
        """Seed slots, count ids in flight, and return each row's hash."""
        for seed in adjustment.seeds:
            slot, clears, codes = int(seed[0]), seed[1], seed[2:]
            if clears:
                self._counts[slot], self._seen[slot] = 0, False
            np.add.at(self._counts[slot], codes[(codes >= 0) & (codes != PADDING_CODE)], 1)
            self._seen[slot, -1 - codes[codes < 0]] = True
        num_rows = plan.layout.max_num_samples
        counted = not_counted(num_rows) if adjustment.counted is None else adjustment.counted
        bias = no_bias(num_rows) if adjustment.bias is None else adjustment.bias
        slots = counted[0][counted[0] >= 0].tolist()
        assert len(slots) == len(set(slots)), "two rows count in one slot"
        found = []
        for row in range(int(plan.num_samples[0])):
            slot, prev_sample = counted[:2, row].tolist()
            if slot >= 0 and prev_sample >= 0:
                self._counts[slot, self._prev_ids[prev_sample]] += 1
            found.append(adjustment_of(counted[2:, row], self._counts[slot], self._seen[slot], bias[:, row]))
        return found

    def _sample(
        self,
        plan: StepPlan,
        totals: list[int],
        words: np.ndarray | None = None,
        adjustments: Sequence[int] = (),
    ) -> StepResult:
        if words is not None:
            assert words.shape == (plan.layout.max_num_samples, -(-VOCAB_SIZE // 32)), words.shape
            assert words.dtype == np.int32 and (words[len(totals) :] == -1).all(), "padding has no mask"
        num_samples, flags = int(plan.num_samples[0]), plan.flags
        result = StepResult(
            np.full(num_samples, -1, np.int32),
            np.zeros(num_samples, np.float32),
            np.full((num_samples, self.num_top), -1, np.int32),  # undefined unless asked for
            np.zeros((num_samples, self.num_top), np.float32),
        )
        for row, total in enumerate(totals):
            draws, truncates = flags[FLAG_SAMPLES], flags[FLAG_TRUNCATES]
            how = Choice(
                temperature=float(plan.temperature[row]) if draws else 0.0,
                top_k=int(plan.top_k[row]) if truncates else 0,
                top_p=float(plan.top_p[row]) if truncates else 1.0,
                seed=int(plan.seed[row, 0]) | int(plan.seed[row, 1]) << 32,
                position=int(plan.sample_positions[row]),
                banned_ids=frozenset(plan.banned_ids[row].tolist()) | masked_ids(words, row),
                min_p=float(plan.min_p[row]) if draws else 0.0,
                adjustment=adjustments[row] if adjustments else 0,
            )
            result.token_ids[row] = choose(total, how)
            result.logprobs[row] = logprob_of(total)
            if flags[FLAG_LOGPROBS]:
                top = top_of(total, self.num_top)
                result.top_ids[row], result.top_logprobs[row] = list(top), list(top.values())
        return result

    def _score(self, totals: list[int], targets: list[int]) -> PromptScores:
        logprobs, ranks = zip(*map(score_of, totals, targets), strict=True)
        tops = [top_of(total, self.num_top) for total in totals]
        return PromptScores(
            np.array(logprobs, np.float32),
            np.array(ranks, np.int32),
            np.array([list(top) for top in tops], np.int32),
            np.array([list(top.values()) for top in tops], np.float32),
        )

    def _check(self, plan: StepPlan) -> None:
        """Assert what a device would silently get wrong."""
        assert self._next_step_id in (None, plan.step_id), "a plan was left out"
        assert self._unchosen is None, "the ids of the step before were not chosen"
        padding = self.num_pages * self.page_size
        num_tokens = int(plan.cu_q_lens[-1])
        slots = plan.write_slots[:num_tokens]
        assert (plan.write_slots[num_tokens:] == padding).all(), "padding must be dropped"
        assert len(set(slots.tolist())) == num_tokens, "two tokens write one slot"
        assert ((slots >= self.page_size) & (slots < padding)).all(), "a write outside the pool or on page 0"
        assert (plan.prev_samples < len(self._prev_ids)).all(), "a token of a step that is not the previous"
        assert (plan.token_ids >= 0).all() and (plan.token_ids < VOCAB_SIZE).all()
        assert (np.diff(plan.cu_q_lens) >= 0).all(), "rows overlap"


def _len(tokens: slice) -> int:
    return tokens.stop - tokens.start
