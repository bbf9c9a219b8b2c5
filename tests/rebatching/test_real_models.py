"""Padded batches of tiny models in float32: random schedules against whole forward passes, and each other."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from pensieve_jax import (
    LLM,
    CacheConfig,
    EngineConfig,
    LogitsError,
    RunnerConfig,
    SamplingParams,
    SchedulerConfig,
    StepFailedError,
)
from pensieve_jax.rebatching.launches import Prefill
from pensieve_jax.rebatching.query import KVLocation, Query
from tests.rebatching.real_models import LENGTHS, Bench, judge, random_params

VOCAB_SIZE = 320
INSERTIONS = ("embed", "shape", "none")
CASES = [(preset, insertion) for preset in ("llama-tiny", "opt-tiny") for insertion in INSERTIONS]
# Each way to insert once, one of them with the other model.
FEW_CASES = [("llama-tiny", "embed"), ("llama-tiny", "none"), ("opt-tiny", "shape")]


def run_schedule(preset: str, insertion: str, seed: int, lengths: tuple[int, ...]) -> Counter[str]:
    """Submit queries with priorities while others run; cancel some."""
    rng = np.random.default_rng(seed)
    bench = Bench(preset, insertion, host_bytes=int(rng.choice([0, 10**6])), lengths=lengths)
    most = bench.engine.max_context_tokens
    totals: Counter[str] = Counter()
    queries: list[Query] = []
    for _ in range(int(rng.integers(4, 9))):
        max_tokens = int(rng.choice([1, 3, 12, 30]))
        longest = most - 1 if rng.random() < 0.2 else 30
        prompt = rng.integers(3, VOCAB_SIZE, int(rng.integers(1, longest + 1))).tolist()
        priority = int(rng.choice([0, 0, 3]))
        queries.append(bench.engine.submit(prompt, random_params(rng, max_tokens), priority=priority))
        for _ in range(int(rng.integers(0, 6))):
            bench.step()
        if rng.random() < 0.1:
            bench.engine.cancel(queries[int(rng.integers(len(queries)))])
    bench.run()
    for query in queries:
        totals["certain tokens"] += judge(preset, query)
        totals["tokens"] += len(query.token_ids)
        assert query.output is not None
        totals["suspended"] += query.output.usage.num_suspensions
    totals.update({name: int(num) for name, num in bench.engine.stats().items() if name.startswith("num_")})
    return totals


@pytest.mark.parametrize(
    ("preset", "insertion"),
    [FEW_CASES[0], *(pytest.param(*c, marks=pytest.mark.long) for c in FEW_CASES[1:])],
)
def test_random_schedules_equal_a_dense_model(preset, insertion):
    """Queries join, leave, are preempted and are cancelled; `tests.search_schedules` runs more."""
    totals = run_schedule(preset, insertion, 0, LENGTHS)
    print(dict(totals))
    assert totals["certain tokens"] > 0.9 * totals["tokens"] > 0
    assert insertion == "shape" or not totals["num_shaped_steps"]


@pytest.mark.parametrize("insertion", ["embed", "shape", "none"])
def test_free_columns_do_not_matter(insertion):
    """Results are bit-identical, whatever finite numbers they hold."""
    found = []
    for garbage in (False, True):
        bench = Bench("llama-tiny", insertion, garbage=garbage)
        rng = np.random.default_rng(7)
        queries = []
        for length in (5, 40, 12, 70, 3, 20):
            prompt = rng.integers(3, VOCAB_SIZE, length).tolist()
            params = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=0)
            queries.append(bench.engine.submit(prompt, params))
            bench.step()
        bench.run()
        found.append([(query.token_ids, query.logprobs) for query in queries])
    assert found[0] == found[1]


def test_other_queries_do_not_change_a_result():
    """Results are bit-identical in a ring of one shape: alone, and with others that come and leave."""
    found = []
    for others in (0, 5):
        bench = Bench("llama-tiny", "embed")
        rng = np.random.default_rng(3)
        prompt = rng.integers(3, VOCAB_SIZE, 10).tolist()
        query = bench.engine.submit(prompt, SamplingParams(max_tokens=18, ignore_eos=True, logprobs=0))
        bench.step()  # no other is prefilled with it
        for _ in range(others):
            more = rng.integers(3, VOCAB_SIZE, 6).tolist()
            bench.engine.submit(more, SamplingParams(max_tokens=4, ignore_eos=True))
        bench.run()
        assert bench.engine.stats()["num_resizes"] == 1
        found.append((query.token_ids, query.logprobs))
    assert found[0] == found[1]


@pytest.mark.parametrize("insertion", ["embed", "shape"])
def test_a_row_comes_back_as_it_was(insertion):
    """After a move out of the ring, to host memory, and back, every number is the same."""
    bench = Bench("llama-tiny", insertion)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    queries = bench.engine.submit_many([[5] * 3, [6] * 4, [7] * 2, [8] * 5], [params] * 4, [1, 1, 1, 0])
    for _ in range(8):
        bench.step()
    victim = queries[-1]
    assert victim.location is KVLocation.RING
    before, num_tokens = bench.ring_row(victim.row), victim.num_kv_tokens
    bench.engine.submit([9] * 3, SamplingParams(max_tokens=3, ignore_eos=True), priority=2)
    while not (victim.suspended and victim.location is KVLocation.RING):
        bench.step()
    after = bench.ring_row(victim.row)
    np.testing.assert_array_equal(after[:, :, :, :num_tokens], before)
    bench.run()
    assert victim.result().usage.num_suspensions == 1
    assert judge("llama-tiny", victim)


@pytest.mark.parametrize("insertion", INSERTIONS)
def test_logits_that_are_not_finite_end_their_query_only(insertion, monkeypatch):
    """The rows that its token spoils are used again, by queries that join and by prompts in place."""
    bench = Bench("llama-tiny", insertion)
    leaves = bench.runner._leaves
    broken = [leaves[0].at[77].set(np.nan), *leaves[1:]]
    monkeypatch.setattr(bench.runner, "_leaves", broken)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    prompts = [[77] * 9, [5] * 3, [6] * 20, [77] * 30, [7] * 2, [8] * 25, [9] * 4, [10] * 11]
    queries = []
    for prompt in prompts:
        queries.append(bench.engine.submit(prompt, params))
        bench.step()
    bench.run()
    assert [type(query.error) for query in queries[::3]] == [LogitsError, LogitsError, type(None)]
    assert bench.engine.stats()["num_logits_errors"] == 2
    for query in queries:
        if 77 not in query.prompt_token_ids:
            assert judge("llama-tiny", query)


@pytest.mark.parametrize("where", ["launch", "fetch"])
def test_a_failed_step_is_computed_again(where, monkeypatch):
    """It is repeated once; a query that fails twice reports it, and others continue."""
    bench = Bench("llama-tiny", "embed")
    params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=0)
    queries = bench.engine.submit_many([[7] * 5, [8] * 9, [9] * 40], [params] * 3, [0] * 3)
    for _ in range(4):
        bench.step()

    def fail(*_: object) -> None:
        raise StepFailedError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(bench.runner, where, fail)
        assert bench.step() == []
    bench.run()
    for query in queries:
        assert judge("llama-tiny", query) and query.result().usage.resume_recomputed_tokens
    others = bench.engine.submit_many([[7] * 5, [8] * 9], [params] * 2, [0] * 2)
    for _ in range(6):
        bench.step()
    doomed = bench.engine.submit([5, 5], params)
    others.append(bench.engine.submit([5, 6], params))  # their prompts are computed together once
    begun: list[object] = []  # launches of its prompt
    launch, fetch = bench.runner.launch, bench.runner.fetch

    def launch_others(one: object) -> object:
        is_doomed = isinstance(one, Prefill) and doomed.serial in one.serials
        if is_doomed and where == "launch":
            fail()
        handle = launch(one)  # type: ignore[arg-type]
        begun.extend([handle] if is_doomed else [])
        return handle

    def fetch_others(handle: Any) -> object:
        if where == "fetch" and any(handle is one for one in begun):
            fail()
        return fetch(handle)

    with monkeypatch.context() as patch:
        patch.setattr(bench.runner, "launch", launch_others)
        patch.setattr(bench.runner, "fetch", fetch_others)
        bench.run()
    with pytest.raises(StepFailedError, match="planted"):
        doomed.result()
    for query in others:
        assert judge("llama-tiny", query) and len(query.result().token_ids) == 20
    after = bench.engine.submit([5, 5], params)
    bench.run()
    assert judge("llama-tiny", after)


@pytest.mark.long
def test_many_preemptions_change_no_token():
    """There are two hundred."""
    bench = Bench("llama-tiny", "embed", host_bytes=0)
    every: list[Query] = []
    while bench.engine.stats()["num_suspensions"] < 200:
        params = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=0)
        queries = bench.engine.submit_many([[9, 8, number] for number in range(4)], [params] * 4, [0] * 4)
        while not all(query.done for query in queries):
            bench.engine.submit([4, 5], SamplingParams(max_tokens=2, ignore_eos=True), priority=1)
            for _ in range(4):
                bench.step()
        bench.run()
        every += queries
    for query in every:
        assert judge("llama-tiny", query)


@pytest.fixture(scope="module")
def paged():
    """Return forty prompts, parameters and priorities, and the paged engine's answers on the same model."""
    rng = np.random.default_rng(11)
    prompts = [rng.integers(3, VOCAB_SIZE, int(rng.integers(1, 60))).tolist() for _ in range(40)]
    params = [random_params(rng, int(rng.integers(1, 25))) for _ in prompts]
    priorities = [int(one) for one in rng.integers(-2, 3, len(prompts))]
    config = EngineConfig(
        cache=CacheConfig(gpu_pages=64, chunk_tokens=16),
        scheduler=SchedulerConfig(max_num_running=8, max_num_batched_tokens=64, token_buckets=(64,)),
        runner=RunnerConfig(attention_backend="xla", max_logprobs=2, random_seed=1),
    )
    with LLM("random:llama-tiny", dtype="float32", config=config) as llm:
        return prompts, params, priorities, llm.generate(prompts, params)


@pytest.mark.parametrize(
    "insertion",
    [pytest.param("embed", marks=pytest.mark.long), "shape", pytest.param("none", marks=pytest.mark.long)],
)
def test_answers_equal_the_paged_engines(paged, insertion):
    prompts, params, priorities, expected = paged
    bench = Bench("llama-tiny", insertion)
    queries = bench.engine.submit_many(prompts, params, priorities)
    bench.run()
    for query, output in zip(queries, expected, strict=True):
        if query.result().token_ids != output.token_ids:  # a tie that rounding decides
            judge("llama-tiny", query)
    num_equal = sum(
        query.result().token_ids == output.token_ids for query, output in zip(queries, expected, strict=True)
    )
    assert num_equal >= 39
