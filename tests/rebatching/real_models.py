"""Tiny real models in padded batches, judged by whole forward passes."""

from __future__ import annotations

import functools

import jax
import numpy as np

from model_defs import load_model, make_mesh
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.device.dense_reference import MIN_MARGIN, DenseReference
from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.device.ring_state import RingState
from pensieve_jax.rebatching.device.runner import DeviceRunner
from pensieve_jax.rebatching.engine import RebatchingEngine
from pensieve_jax.rebatching.query import Query
from tests.rebatching.integrity import check_integrity

LENGTHS = (32, 96)
MORE_LENGTHS = (32, 64, 96)  # two thirds more programs: for long tests
GARBAGE = 3e3
_TOKEN_BYTES = {"llama-tiny": 1024, "opt-tiny": 2048}


def config_of(preset: str, insertion: str, **changes: object) -> RebatchingConfig:
    """Return a ring of four rows that shrinks to two as it grows longer."""
    options: dict[str, object] = {
        "max_batch": 4,
        "kv_bytes": 3 * LENGTHS[-1] * _TOKEN_BYTES[preset],
        "insertion": insertion,
        "preemptive": insertion != "none",
        "prefill_batch": 2,
        "lengths": LENGTHS,
        "host_bytes": 10**6,
        "max_logprobs": 3,
        "max_banned_ids": 2,
    }
    return RebatchingConfig(**(options | changes))  # type: ignore[arg-type]


@functools.cache
def model_of(preset: str):
    return load_model(f"random:{preset}", dtype="float32", mesh=make_mesh(1), seed=1)


@functools.cache
def reference_of(preset: str) -> DenseReference:
    return DenseReference(model_of(preset), min_padded_tokens=128, min_padded_outputs=32)


@functools.cache
def _runner(preset: str, has_holes: bool, lengths: tuple[int, ...]) -> DeviceRunner:
    model = model_of(preset)
    config = config_of(preset, "shape" if has_holes else "embed", lengths=lengths)
    runner = DeviceRunner(model, config, make_mesh(1), np.dtype(np.float32))
    assert runner.storage.token_bytes == _TOKEN_BYTES[preset]
    runner.warm_up()
    return runner


class Bench:
    """An engine on a runner that all tests of a process share.

    Attributes:
        garbage: whether free columns are filled with large numbers before every step.
    """

    def __init__(self, preset: str, insertion: str, *, garbage: bool = False, **changes: object) -> None:
        self.preset, self.garbage = preset, garbage
        self.config = config_of(preset, insertion, **changes)
        self.runner = _runner(preset, insertion == "shape", self.config.lengths)
        self.runner.reset(())
        model = model_of(preset)
        self.engine = RebatchingEngine(self.runner, self.config, eos_token_ids=model.config.eos_token_ids)

    def step(self) -> list[Query]:
        """Run one step, and check the invariants after it."""
        if self.garbage:
            self.fill_free_columns()
        ended = self.engine.step()
        check_integrity(self.engine.loop, self.config, self.runner.ring_shapes)
        return ended

    def run(self) -> None:
        """Run until all queries are done; nothing is compiled meanwhile."""
        num_before = self.runner.num_compilations  # the reference compiles as well, between runs
        while self.engine.has_unfinished:
            self.step()
        assert self.runner.num_compilations == num_before or self.garbage

    def fill_free_columns(self) -> None:
        """Write large finite numbers wherever no row has a token."""
        state, ring = self.runner.ring, self.engine.loop.scheduler.ring
        if state is None or ring.shape is None:
            return
        free = np.ones(ring.shape, bool)
        for row, _ in ring.held:
            free[row, ring.places(row)] = False
        for layers in (state.keys, state.values):
            for index, pool in enumerate(layers):
                values = np.array(pool)
                values.swapaxes(1, 2)[free] = GARBAGE * (1 + index)
                layers[index] = jax.device_put(values, pool.sharding)

    def ring_row(self, row: int) -> np.ndarray:
        """Return [layers, 2, heads, tokens, head_dim] of a row, its oldest token first."""
        state: RingState | None = self.runner.ring
        assert state is not None
        places = self.engine.loop.scheduler.ring.places(row)
        return np.stack(
            [
                np.stack([np.asarray(k)[row][:, places], np.asarray(v)[row][:, places]])
                for k, v in zip(state.keys, state.values, strict=True)
            ]
        )


def random_params(rng: np.random.Generator, max_tokens: int) -> SamplingParams:
    """Draw greedy or sampled parameters, with and without ends."""
    draws = rng.random() < 0.4
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=int(rng.integers(0, max_tokens + 1)) if rng.random() < 0.2 else 0,
        temperature=0.8 if draws else 0.0,
        top_k=int(rng.choice([0, 20])),
        top_p=float(rng.choice([1.0, 0.9])),
        seed=int(rng.integers(2**63)),
        ignore_eos=bool(rng.random() < 0.6),
        logprobs=int(rng.choice([0, 2])),
    )


def judge(preset: str, query: Query) -> int:
    """Assert that every token is the reference's choice after the previous ones; count the certain ones."""
    if not query.token_ids:
        return 0
    replay = reference_of(preset).replay_turn(
        [], query.prompt_token_ids, query.token_ids, query.params, query.seed
    )
    wrong = np.flatnonzero(~replay.possible)
    assert not len(wrong), f"token {wrong[0]} of {query.token_ids} should be {replay.token_ids[wrong[0]]}"
    if query.logprobs is not None:
        found = [entry.logprob for entry in query.logprobs]
        np.testing.assert_allclose(found, replay.logprobs, atol=1e-4)
    return int((replay.margins >= MIN_MARGIN).sum())
