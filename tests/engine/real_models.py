"""Tiny real models behind the driver's bench: one compiled runner each, judged by whole forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from model_defs import load_model, make_mesh
from pensieve_jax.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.core.outputs import TokenLogprob
from pensieve_jax.device.dense_reference import MIN_MARGIN, DenseReference, Replay
from pensieve_jax.device.model_runner import ModelRunner, StepHandle
from pensieve_jax.scheduler import StepPlan, StepResult
from tests.device.poison import poisoned_pools
from tests.engine.fake_transfers import Delays
from tests.engine.oracles import TurnFacts

MAX_CONTEXT_TOKENS = 128
# Of choices over KV state in 8 bits. Where two forward passes differ by rounding, now and then a code is the
# next one, which tiny models with random weights feel: one code in one row was 0.054 of a log-probability.
STORED_MARGIN = 0.15


def real_config(
    policy: str = "retention",
    *,
    stateful: bool = True,
    kv_dtype: str | None = None,
    buckets: tuple[int, ...] = (8, 48),
) -> EngineConfig:
    """The one shape that the runners are compiled for, with both tiers; the policy is the host's business.

    Some have one bucket: half as many programs, where steps of few tokens are not what is tested.
    """
    return EngineConfig(
        stateful=stateful,
        cache=CacheConfig(gpu_pages=14, cpu_pages=10, chunk_tokens=16, policy=policy, kv_dtype=kv_dtype),
        scheduler=SchedulerConfig(
            max_num_running=4,
            max_num_batched_tokens=48,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            token_buckets=buckets,
        ),
        runner=RunnerConfig(
            attention_backend="xla", max_logprobs=4, max_num_staged_pages=6, num_layer_groups=2
        ),
    )


class PoisonedRunner(ModelRunner):
    """Every page that nobody wrote holds NaN, and no step may compile anything."""

    def dispatch(self, plan: StepPlan) -> StepHandle:
        num_before = self.num_compilations
        handle = super().dispatch(plan)
        assert self.num_compilations == num_before, "a step was compiled after warm-up"
        return handle

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
      kv_dtype: what KV state is stored as.
      num_devices: that share the model; the reference has one.
      buckets: of its runner, and of all configurations that it gets.
      num_turns: turns that were judged.
      uncertain: what is known of turns with a margin below `min_margin`.
      num_logprobs, num_far: turns whose log-probabilities were judged, and those farther off than rounding.
    """

    preset: str
    kv_dtype: str | None = None
    num_devices: int = 1
    buckets: tuple[int, ...] = (8, 48)
    num_turns: int = 0
    uncertain: list[str] = field(default_factory=list)
    num_logprobs: int = 0
    num_far: int = 0

    @property
    def min_margin(self) -> float:
        """Between two choices, in logits, of which either is right if they are closer."""
        return MIN_MARGIN if self.kv_dtype is None else STORED_MARGIN

    def __post_init__(self) -> None:
        mesh = make_mesh(self.num_devices)
        model, alone = (
            load_model(f"random:{self.preset}", dtype="float32", mesh=each, seed=1)
            for each in (mesh, make_mesh(1))
        )
        self.vocab_size: int = model.config.vocab_size
        self.eos_token_ids: tuple[int, ...] = model.config.eos_token_ids
        self.runner = PoisonedRunner(model, real_config(kv_dtype=self.kv_dtype, buckets=self.buckets), mesh)
        self.runner.warm_up()
        # One length of each, so that little is compiled.
        self._reference = DenseReference(
            alone, min_padded_tokens=MAX_CONTEXT_TOKENS, min_padded_outputs=32, kv_dtype=self.kv_dtype
        )

    def new_runner(self, config: EngineConfig, max_context_tokens: int, delays: Delays) -> ModelRunner:
        """The one runner; its copies take as long as they do."""
        assert max_context_tokens == MAX_CONTEXT_TOKENS
        self.runner.reset()
        return self.runner

    def stop_id(self, facts: TurnFacts) -> int:
        """The reply's first token, as far as it is greedy: a stop at once, or later."""
        return int(self._reference.logits([*facts.history, *facts.prompt])[-1].argmax())

    def check_tokens(self, facts: TurnFacts, token_ids: Sequence[int], *, whole: bool) -> None:
        """Every token must be the reference's choice after the tokens before it, where that is certain."""
        if not token_ids:
            return
        replay = self._replay(facts, token_ids)
        certain = replay.margins >= self.min_margin
        wrong = np.flatnonzero((replay.token_ids != np.asarray(token_ids)) & certain)
        assert not len(wrong), f"token {wrong[0]} of {list(token_ids)} should be {replay.token_ids[wrong[0]]}"
        self.num_turns += 1
        if not certain.all():
            self.uncertain.append(f"{self.preset}: margin {replay.margins.min():.1e} in {facts}")

    def check_logprobs(self, facts: TurnFacts, logprobs: Sequence[TokenLogprob]) -> None:
        replay = self._replay(facts, [entry.token_id for entry in logprobs])
        found = np.array([entry.logprob for entry in logprobs])
        np.testing.assert_allclose(found, replay.logprobs, atol=max(self.min_margin, 1e-3))
        self.num_logprobs += 1
        self.num_far += bool((np.abs(found - replay.logprobs) > 1e-3).any())
        assert all(len(entry.top) == facts.params.logprobs for entry in logprobs)

    def _replay(self, facts: TurnFacts, token_ids: Sequence[int]) -> Replay:
        return self._reference.replay_turn(facts.history, facts.prompt, token_ids, facts.params, facts.seed)
