"""Tiny real models behind the driver's bench: one compiled runner each, judged by whole forward passes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model_defs import Model, load_model, make_mesh
from pensieve_jax.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.core.outputs import TokenLogprob
from pensieve_jax.core.prompt_logprobs import PromptLogprob
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.device.dense_reference import MIN_MARGIN, DenseReference, Replay
from pensieve_jax.device.model_runner import ModelRunner, StepHandle
from pensieve_jax.scheduler import Request, StepPlan, StepResult
from tests.device.poison import poisoned_pools
from tests.engine.fake_transfers import Delays
from tests.engine.oracles import TurnFacts, unscored

MAX_CONTEXT_TOKENS = 128
# Tolerance of choices over a KV cache in 8 bits. If two forward passes differ by rounding, a code is
# sometimes the adjacent one, to which tiny models with random weights are sensitive: one code in one row was
# 0.054 of a log-probability. About once in a hundred turns it is more. Then references with weights moved by
# a millionth are computed, and the engine must agree with one of them up to rounding.
STORED_MARGIN = 0.15
# Limits on the share of turns with a smaller margin, and on the share of turns whose log-probabilities differ
# by more than float32 rounding. Random scenarios stay a little below.
MAX_UNCERTAIN_STORED_FRACTION = 0.6
MAX_FAR_FRACTION = 0.45
_MOVED, _NUM_MOVED = 1e-6, 12


def real_config(
    policy: str = "retention",
    *,
    stateful: bool = True,
    kv_dtype: str | None = None,
    buckets: tuple[int, ...] = (8, 48),
    max_draft_tokens: int | None = None,
) -> EngineConfig:
    """Return the one shape that the runners are compiled for, with both tiers; the policy runs on the host.

    Some have one bucket: that halves the number of programs, for tests that do not need steps of few tokens.
    With `max_draft_tokens`, turns may have drafts.
    """
    return EngineConfig(
        stateful=stateful,
        cache=CacheConfig(
            gpu_pages=14,
            cpu_pages=10,
            chunk_tokens=16,
            policy=policy,
            kv_dtype=kv_dtype,
            reserve_fraction=1 / 14,  # one page: with more, short scenarios drop too little
        ),
        scheduler=SchedulerConfig(
            max_num_running=4,
            max_num_batched_tokens=48,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            token_buckets=buckets,
            speculation="off" if max_draft_tokens is None else "history",
            max_draft_tokens=max_draft_tokens,
        ),
        runner=RunnerConfig(
            attention_backend="xla", max_logprobs=4, max_num_staged_pages=6, num_layer_groups=2
        ),
    )


class PoisonedRunner(ModelRunner):
    """Runner whose unwritten pages hold NaN, and whose steps must not compile anything."""

    def launch(self, plan: StepPlan) -> StepHandle:
        num_before = self.num_compilations
        handle = super().launch(plan)
        assert self.num_compilations == num_before, "a step was compiled after warm-up"
        return handle

    def choose(self, handle: StepHandle, words: np.ndarray | None) -> None:
        num_before = self.num_compilations
        super().choose(handle, words)
        assert self.num_compilations == num_before, "a choice was compiled after warm-up"

    def fetch(self, handle: StepHandle) -> StepResult:
        num_before = self.num_compilations
        result = super().fetch(handle)
        assert self.num_compilations == num_before, "fetching compiled something"
        return result

    def reset(self) -> None:
        super().reset()
        self.device_pools.replace(poisoned_pools(self.storage))


@dataclass
class RealBench:
    """One model, one compiled runner for all scenarios.

    Attributes:
        kv_dtype: storage type of the KV cache.
        num_devices: devices that share the model; the reference has one.
        buckets, max_draft_tokens: of its runner, and of all configurations that it gets.
        replies: replies that were judged, by context, seed and parameters.
        num_turns: turns that were judged.
        uncertain: turns with a margin below `min_margin`, which are judged like all others.
        num_logprobs, num_far: turns whose log-probabilities were judged, and those farther off than rounding.
        num_prompts: turns whose prompts were scored.
    """

    preset: str
    kv_dtype: str | None = None
    num_devices: int = 1
    buckets: tuple[int, ...] = (8, 48)
    num_turns: int = 0
    uncertain: list[str] = field(default_factory=list)
    num_logprobs: int = 0
    num_far: int = 0
    num_prompts: int = 0
    max_draft_tokens: int | None = None
    replies: dict[tuple[tuple[int, ...], int, SamplingParams], tuple[int, ...]] = field(default_factory=dict)
    _last: tuple[tuple[TurnFacts, tuple[int, ...]], Replay] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    @property
    def min_margin(self) -> float:
        """Tolerance of the reference's logits relative to each other."""
        return MIN_MARGIN if self.kv_dtype is None else STORED_MARGIN

    def __post_init__(self) -> None:
        mesh = make_mesh(self.num_devices)
        model, self._alone = (
            load_model(f"random:{self.preset}", dtype="float32", mesh=each, seed=1)
            for each in (mesh, make_mesh(1))
        )
        self.vocab_size: int = model.config.vocab_size
        self.eos_token_ids: tuple[int, ...] = model.config.eos_token_ids
        config = real_config(
            kv_dtype=self.kv_dtype, buckets=self.buckets, max_draft_tokens=self.max_draft_tokens
        )
        self.runner = PoisonedRunner(model, config, mesh)
        self.runner.warm_up()
        self._reference = self._reference_of(self._alone)

    def _reference_of(self, model: Model) -> DenseReference:
        # One length of each, so that little is compiled.
        return DenseReference(
            model, min_padded_tokens=MAX_CONTEXT_TOKENS, min_padded_outputs=32, kv_dtype=self.kv_dtype
        )

    @functools.cached_property
    def _moved_references(self) -> list[DenseReference]:
        """For a KV cache in 8 bits: references for the effects of rounding on a code between two values."""
        if self.kv_dtype is None:
            return []
        structure, state = nnx.split(self._alone)
        return [
            self._reference_of(nnx.merge(structure, jax.tree.map(functools.partial(_moved, seed), state)))
            for seed in range(_NUM_MOVED)
        ]

    def new_runner(self, config: EngineConfig, max_context_tokens: int, delays: Delays) -> ModelRunner:
        """Return the only runner; its copies take their real time."""
        assert max_context_tokens == MAX_CONTEXT_TOKENS
        self.runner.reset()
        return self.runner

    def foretell(self, request: Request) -> Sequence[int]:
        """Return the reply that an earlier run of the same scenario had."""
        context = tuple(request.token_ids[: request.num_prompt_end])
        return self.replies.get((context, request.seed, request.params), ())

    def stop_id(self, facts: TurnFacts) -> int:
        """Return the reply's first token if it is greedy: the turn stops at once, or later."""
        return int(self._reference.logits([*facts.history, *facts.prompt])[-1].argmax())

    def check_tokens(self, facts: TurnFacts, token_ids: Sequence[int], *, whole: bool) -> None:
        """Assert that every token follows from the reference's logits within tolerance."""
        if not token_ids:
            return
        replay = self._replay(facts, token_ids)
        is_wrong = ~replay.possible
        if is_wrong.any():
            for moved in self._moved_replays(facts, token_ids):
                is_wrong &= ~moved.possible
        wrong = np.flatnonzero(is_wrong)
        assert not len(wrong), f"token {wrong[0]} of {list(token_ids)} should be {replay.token_ids[wrong[0]]}"
        self.num_turns += 1
        self.replies[(*facts.history, *facts.prompt), facts.seed, facts.params] = tuple(token_ids)
        if replay.margins.min() < self.min_margin:
            self.uncertain.append(f"{self.preset}: margin {replay.margins.min():.1e} in {facts}")

    def check_logprobs(self, facts: TurnFacts, logprobs: Sequence[TokenLogprob]) -> None:
        token_ids = [entry.token_id for entry in logprobs]
        replay = self._replay(facts, token_ids)
        found, allowed = np.array([entry.logprob for entry in logprobs]), max(self.min_margin, 1e-3)
        expected = np.array(replay.logprobs)
        if (np.abs(found - expected) > allowed).any():
            for moved in self._moved_replays(facts, token_ids):
                is_closer = np.abs(found - moved.logprobs) < np.abs(found - expected)
                expected[is_closer] = moved.logprobs[is_closer]
        np.testing.assert_allclose(found, expected, atol=allowed)
        self.num_logprobs += 1
        self.num_far += bool((np.abs(found - replay.logprobs) > 1e-3).any())
        assert all(len(entry.top) == facts.params.logprobs for entry in logprobs)

    def check_prompt(self, facts: TurnFacts, entries: Sequence[PromptLogprob | None]) -> None:
        """Assert that the entries follow from the reference's logits within tolerance."""
        found = unscored(facts, entries)
        if not found:
            return
        tokens, first = facts.scored_tokens
        targets, allowed = np.asarray(tokens[first:]), max(self.min_margin, 1e-3)
        rows = np.array([entry.logprob for entry in found])
        is_wrong = np.ones(len(found), bool)
        for reference in itertools.chain([self._reference], self._moved_references if self.kv_dtype else ()):
            logits = reference.logits(tokens[:-1])[first - 1 :].astype(np.float64)
            logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
            expected = np.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]
            above = (logprobs > (expected + allowed)[:, None]).sum(axis=-1)
            around = (logprobs >= (expected - allowed)[:, None]).sum(axis=-1)
            ranks = np.array([entry.rank for entry in found])
            is_right = (np.abs(rows - expected) <= allowed) & (above < ranks) & (ranks <= around)
            for row, entry in enumerate(found):
                ids, values = list(entry.top), np.array(list(entry.top.values()))
                best = np.sort(logprobs[row])[::-1][: len(ids)]
                is_right[row] &= bool((np.abs(values - best) <= allowed).all())
                is_right[row] &= bool((np.abs(logprobs[row, ids] - values) <= allowed).all())
            is_wrong &= ~is_right
            if not is_wrong.any():
                break
        assert not is_wrong.any(), f"prompt tokens {np.flatnonzero(is_wrong)} of {facts}"
        assert all(len(entry.top) == facts.params.prompt_logprobs for entry in found)
        self.num_prompts += 1

    def _replay(self, facts: TurnFacts, token_ids: Sequence[int]) -> Replay:
        """Replay once for both checks of a turn: its log-probabilities and its tokens."""
        turn = facts, tuple(token_ids)
        if self._last is None or self._last[0] != turn:
            self._last = turn, _replayed(self._reference, facts, token_ids, self.min_margin)
        return self._last[1]

    def _moved_replays(self, facts: TurnFacts, token_ids: Sequence[int]) -> Iterator[Replay]:
        return (_replayed(reference, facts, token_ids, MIN_MARGIN) for reference in self._moved_references)


def _replayed(reference: DenseReference, facts: TurnFacts, token_ids: Sequence[int], margin: float) -> Replay:
    return reference.replay_turn(
        facts.history, facts.prompt, token_ids, facts.params, facts.seed, margin=margin
    )


def _moved(seed: int, leaf: jax.Array) -> jax.Array:
    noise = np.random.default_rng([seed, *leaf.shape]).standard_normal(leaf.shape)
    return leaf * jnp.asarray(1 + _MOVED * noise, leaf.dtype)
