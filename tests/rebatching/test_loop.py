"""Which queries fail when a step fails, on a device without a model."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pensieve_jax.core.errors import LogitsError, StepFailedError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.sampling_rows import SamplerMode
from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.launches import Insert, Prefill, Resize
from pensieve_jax.rebatching.loop import RebatchingLoop
from pensieve_jax.rebatching.query import Query
from pensieve_jax.rebatching.ring_shapes import RingShape, RingShapes
from tests.rebatching.fake_runner import FakeRunner
from tests.rebatching.integrity import check_integrity

TOKEN_BYTES = 10


class Small:
    """A loop on a fake device, with rows of up to 96 columns."""

    def __init__(self, insertion: str = "embed", **changes: object) -> None:
        options: dict[str, object] = {
            "max_batch": 4,
            "kv_bytes": TOKEN_BYTES * 96 * 9,
            "lengths": (32, 64, 96),
            "insertion": insertion,
            "prefill_batch": 1,
        }
        self.config = RebatchingConfig(**(options | changes))  # type: ignore[arg-type]
        self.ring_shapes = RingShapes(self.config, TOKEN_BYTES, 10**6)
        layout = RebatchingLoop(self.config, self.ring_shapes, None).scheduler.layout  # type: ignore[arg-type]
        self.runner = FakeRunner(layout)
        self.loop = RebatchingLoop(self.config, self.ring_shapes, self.runner)
        self._num_queries = 0

    def submit(self, num: int, max_tokens: int = 40) -> list[Query]:
        first, self._num_queries = self._num_queries, self._num_queries + num
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        queries = [
            Query(
                first + index,
                [1] * 5,
                params,
                seed=0,
                priority=0,
                ending_ids=(),
                max_context_tokens=self.ring_shapes.max_context_tokens,
                tokenizer=None,
            )
            for index in range(num)
        ]
        for query in queries:
            self.loop.submit(query)
        return queries

    def step(self) -> None:
        self.loop.step()
        check_integrity(self.loop, self.config, self.ring_shapes)

    def run(self, most: int = 600) -> None:
        for _ in range(most):
            if not self.loop.queries:
                return
            self.step()
        pytest.fail(f"{len(self.loop.queries)} queries have not ended in {most} steps")


@pytest.mark.parametrize("insertion", ["embed", "shape"])
@pytest.mark.parametrize("where", ["launch", "fetch"])
@pytest.mark.parametrize("num_before", [0, 3])
def test_one_query_that_always_fails_fails_alone(insertion, where, num_before):
    """Earlier queries do not fail, and neither do those that arrive with it.

    A shaped step contains others: a query that shares two with it, and no other step in between, fails with
    it.
    """
    small = Small(insertion)
    others = small.submit(num_before)
    for _ in range(20):
        small.step()
    (offender,) = small.submit(1)
    others += small.submit(3)
    small.runner.offender, small.runner.offends = offender.serial, where
    small.run()
    with pytest.raises(StepFailedError, match=where):
        offender.result()
    shared = {serial for serial, num in small.runner.failures.items() if num > 1} - {offender.serial}
    assert not shared or (insertion == "shape" and len(shared) == 1)
    for query in others:
        if query.serial not in shared:
            assert len(query.result().token_ids) == 40


@pytest.mark.parametrize("where", ["launch", "fetch"])
@pytest.mark.parametrize("changes", [{}, {"insertion": "none", "prefill": "together"}], ids=str)
def test_prompts_that_failed_together_are_computed_alone(where, changes):
    """This shows which of them is the cause."""
    small = Small(prefill_batch=4, **changes)
    queries = small.submit(4)
    small.runner.offender, small.runner.offends = 2, where
    small.run()
    assert [query.error is None for query in queries] == [True, True, False, True]
    assert small.loop.metrics.num_failed_steps == 2


@pytest.mark.parametrize("where", ["launch", "fetch"])
def test_failures_long_ago_do_not_count(where):
    """Each attempt fails once within a few tokens."""
    small = Small()
    queries = small.submit(3, max_tokens=60)
    for _ in range(6):
        for _ in range(6):
            small.step()
        small.runner.fails = where
        small.step()
    small.run()
    assert small.loop.metrics.num_failed_steps == 6
    assert [len(query.result().token_ids) for query in queries] == [60] * 3


@pytest.mark.parametrize("insertion", ["embed", "shape", "none"])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 39])
def test_a_query_whose_logits_are_not_finite_fails_alone(insertion, num_tokens, monkeypatch):
    small = Small(insertion)
    queries = small.submit(5)
    bad, fetch = queries[1], small.runner.fetch

    def broken(handle):
        launch, result = handle
        for query, place in launch.samples:
            if query is bad and len(query.token_ids) == num_tokens:
                result.logprobs[place] = math.nan
        return fetch(handle)

    monkeypatch.setattr(small.runner, "fetch", broken)
    small.run()
    with pytest.raises(LogitsError, match=f"after {num_tokens} tokens"):
        bad.result()
    assert [len(query.result().token_ids) for query in queries if query is not bad] == [40] * 4
    assert small.loop.metrics.num_logits_errors == 1 and not small.loop.metrics.num_failed_steps


@pytest.mark.parametrize("kind", [Resize, Insert])
def test_a_launch_that_always_fails_ends(kind, monkeypatch):
    """A launch that samples nothing is charged to the queries of its rows; none is recomputed forever."""
    small = Small()
    launch = small.runner.launch

    def fail(one: object) -> object:
        if isinstance(one, kind):
            raise StepFailedError("planted")
        return launch(one)  # type: ignore[arg-type]

    monkeypatch.setattr(small.runner, "launch", fail)
    queries = [*small.submit(3), *small.submit(2, max_tokens=1)]
    small.run()
    for query in queries[:3]:
        with pytest.raises(StepFailedError, match="planted"):
            query.result()


def test_a_failed_resize_is_blamed_on_the_ring_or_on_the_launches_that_were_to_follow():
    small = Small()
    resize, held = Resize(RingShape(4, 32), None), small.submit(2)
    samples = tuple((query, row) for row, query in enumerate(small.submit(1)))
    prefill = Prefill((2,), 5, 1, np.zeros(5, np.int32), np.zeros(0, np.int32), SamplerMode(), samples, 5)
    assert set(small.loop._in(resize, [resize, prefill])) == {samples[0][0]}
    small.loop.scheduler.ring.resize(resize.shape)
    for query in held:
        small.loop.scheduler.ring.insert(query, 5)
    assert set(small.loop._in(resize, [resize, prefill])) == set(held)


def test_a_query_counts_as_prefilled_once_it_is():
    small = Small()
    waiting, running = *small.submit(1), *small.submit(1)
    small.loop.cancel(waiting)
    assert waiting.result().usage.prefilled_tokens == 0
    small.step()
    small.loop.cancel(running)
    assert running.result().usage.prefilled_tokens == 5
