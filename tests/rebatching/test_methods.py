"""The four methods that Baton's evaluation compares: their characteristic launches.

Benchmark prefills a batch together and runs it to its end. PD prefills prompts of similar length together
and runs to the end as well. Baton shapes a prompt into the running batch. Baton-PD prefills separately and
embeds.
"""

from __future__ import annotations

from typing import Any

import pytest

from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.launches import Decode, Prefill, Resize, Shape
from pensieve_jax.rebatching.loop import RebatchingLoop
from pensieve_jax.rebatching.metrics import StepSeen
from pensieve_jax.rebatching.query import KVLocation, Query
from pensieve_jax.rebatching.ring_shapes import RingShapes
from tests.rebatching.fake_runner import FakeRunner
from tests.rebatching.integrity import check_integrity

TOKEN_BYTES = 10
METHODS: dict[str, dict[str, Any]] = {
    "Benchmark": {"insertion": "none", "prefill": "together"},
    "PD": {"insertion": "none", "prefill": "similar"},
    "Baton": {"insertion": "shape"},
    "Baton-PD": {"insertion": "embed"},
}


class Run:
    """An engine's loop on a fake device, and its launches.

    Attributes:
        queries: all that were submitted, by serial.
        steps: the launches of each step, in words.
        spans: columns that the ring needs after each step.
        done: serials of the queries that ended with each step.
    """

    def __init__(self, method: str, lengths: tuple[int, ...] = (32, 64, 128), **config: Any) -> None:
        options = {
            "max_batch": 2,
            "kv_bytes": 20 * lengths[-1] * TOKEN_BYTES,
            "lengths": lengths,
            **METHODS[method],
            **config,
        }
        self.config = RebatchingConfig(**options)
        self.ring_shapes = RingShapes(self.config, TOKEN_BYTES, 10**6)
        layout = RebatchingLoop(self.config, self.ring_shapes, None).scheduler.layout  # type: ignore[arg-type]
        self.loop = RebatchingLoop(self.config, self.ring_shapes, FakeRunner(layout), observe=self._see)
        self.ring = self.loop.scheduler.ring
        self.queries: list[Query] = []
        self.steps: list[str] = []
        self.spans: list[int] = []
        self.done: list[list[int]] = []

    def submit(self, num_prompt: int, max_tokens: int, priority: int = 0) -> Query:
        query = Query(
            len(self.queries),
            [1] * num_prompt,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            seed=0,
            priority=priority,
            ending_ids=(),
            max_context_tokens=self.ring_shapes.max_context_tokens,
            tokenizer=None,
        )
        self.queries.append(query)
        self.loop.submit(query)
        return query

    def step(self, num: int = 1) -> None:
        for _ in range(num):
            self.loop.step()
            check_integrity(self.loop, self.config, self.ring_shapes)

    def run(self) -> list[str]:
        """Step until all have ended; returns the launches of each step."""
        for _ in range(300):
            if not self.loop.queries:
                return self.steps
            self.step()
        pytest.fail(f"{len(self.loop.queries)} queries have not ended")

    def _see(self, seen: StepSeen) -> None:
        self.steps.append(" ".join(_word(one) for one in seen.launches if not isinstance(one, Resize)))
        self.spans.append(seen.ring.span)
        self.done.append([query.serial for query in seen.ended])


def _word(launch: Any) -> str:
    """Return kind and queries of a launch: "prefill:0,1x64" is of queries 0 and 1 in rows of 64 columns."""
    if isinstance(launch, Prefill):
        return f"prefill:{','.join(map(str, launch.serials))}x{launch.length}"
    if isinstance(launch, Decode | Shape):
        whose = ",".join(str(query.serial) for query, _ in launch.samples)
        return f"decode:{whose}" if isinstance(launch, Decode) else f"shape{launch.num_tokens}:{whose}"
    return f"{type(launch).__name__.lower()}:{launch.serial}"


def submit_three(run: Run) -> None:
    """Submit two that fill the batch and one that waits. The first ends early."""
    run.submit(10, 3)
    run.submit(40, 6)
    run.submit(20, 3)


def test_benchmark_prefills_a_batch_together_and_runs_it_to_its_end():
    """Prompts are padded to the longest of the batch. The third joins only after the last one has ended."""
    run = Run("Benchmark")
    submit_three(run)
    assert run.run() == [
        "prefill:0,1x64 insert:0 insert:1 decode:0,1",
        "decode:0,1",
        "decode:1",
        "decode:1",
        "decode:1",
        "prefill:2x32 insert:2 decode:2",
        "decode:2",
        "",
    ]


def test_pd_prefills_similar_lengths_apart_and_runs_to_the_end():
    """The prompts of 10 and 20 share a program, though they do not decode together."""
    run = Run("PD")
    submit_three(run)
    assert run.run() == [
        "prefill:0,2x32 insert:0 prefill:1x64 insert:1 decode:0,1",
        "decode:0,1",
        "decode:1",
        "decode:1",
        "decode:1",
        "insert:2 decode:2",
        "decode:2",
        "",
    ]


def test_baton_shapes_a_prompt_into_the_running_batch():
    """Only the first prefill is separate; a prompt of 40 is a step of the whole batch; others decode."""
    run = Run("Baton")
    run.submit(10, 3)
    run.submit(40, 6)
    run.submit(50, 3)
    assert run.run() == [
        "prefill:0x32 insert:0 shape40:0,1",
        "decode:0,1",
        "shape50:1,2",
        "decode:1,2",
        "decode:1,2",
        "decode:1",
        "",
    ]
    assert run.loop.metrics.num_shaped_steps == 2


def test_baton_pd_prefills_ahead_and_embeds_in_the_next_step():
    """The third is prefilled while the batch is full, and takes the row of the first one at once."""
    run = Run("Baton-PD")
    submit_three(run)
    assert run.run() == [
        "prefill:0,2x32 insert:0 prefill:1x64 insert:1 decode:0,1",
        "decode:0,1",
        "insert:2 decode:2,1",
        "decode:2,1",
        "decode:1",
        "",
    ]


@pytest.mark.parametrize("method", ["Benchmark", "PD"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_batch_that_runs_to_its_end_is_released_at_once(method, first):
    """Rows of ended queries stay, so the memory grows until the last has ended (Baton, figure 8)."""
    run = Run(method, max_batch=3)
    lengths = [(30, 2), (10, 5), (10, 8)]
    for num_prompt, max_tokens in lengths[first:] + lengths[:first]:
        run.submit(num_prompt, max_tokens)
    run.step()
    for num_steps in range(2, 8):
        run.step()
        assert run.ring.num_held == 3, "a row was released before the batch has ended"
        assert run.ring.span == 30 + num_steps, "the longest row has ended, and goes on growing"
    run.step()
    assert run.ring.num_held == 0 and run.ring.span == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_reply_is_returned_as_soon_as_it_has_ended(method):
    """All four methods do so: "returning a query's response immediately after its inference is complete"."""
    run = Run(method)
    submit_three(run)
    run.run()
    (first,) = (place for place, one in enumerate(run.done) if 0 in one)
    (second,) = (place for place, one in enumerate(run.done) if 1 in one)
    assert first == 2 and second > first


@pytest.mark.parametrize("method", ["Benchmark", "PD"])
@pytest.mark.parametrize("max_batch", [1, 2, 3])
def test_a_batch_that_runs_to_its_end_is_as_large_as_it_can_be(method, max_batch):
    """Seven queries, in arrival order."""
    run = Run(method, max_batch=max_batch)
    for _ in range(7):
        run.submit(10, 3)
    decodes = [one.split("decode:")[1].split()[0] for one in run.run() if "decode" in one]
    batches = list(dict.fromkeys(decodes))
    everyone = [str(one) for one in range(7)]
    assert batches == [",".join(everyone[i : i + max_batch]) for i in range(0, 7, max_batch)]


@pytest.mark.parametrize("method", ["Benchmark", "PD"])
def test_a_late_query_waits_for_the_whole_batch(method):
    """It waits although a row is free from the start."""
    run = Run(method)
    run.submit(10, 5)
    run.step()
    late = run.submit(10, 2)
    for _ in range(3):
        run.step()
        assert late.location is not KVLocation.RING
    run.step()
    assert late.location is KVLocation.RING


@pytest.mark.parametrize("method", ["Baton", "Baton-PD"])
def test_a_late_query_joins_the_next_step(method):
    run = Run(method)
    run.submit(10, 9)
    run.step()
    late = run.submit(10, 3)
    run.step()
    assert late.location is KVLocation.RING and run.steps[-1].endswith(":0,1")


@pytest.mark.parametrize(("method", "num_columns"), [("Baton", 1 + 10), ("Baton-PD", 1 + 1)])
def test_shaping_adds_the_columns_of_a_prompt_and_embedding_does_not(method, num_columns):
    """Section 4.1 against 4.2: others are padded to the prompt, or not at all."""
    run = Run(method)
    run.submit(10, 9)
    run.step()
    run.submit(10, 3)
    run.step()
    assert run.ring.row_span(0) == 10 + num_columns
