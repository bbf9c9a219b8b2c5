"""Random schedules of a padded batch's policy, compared with tokens computed from a plain list.

`tests.search_schedules` runs as many as there is time for. Queries join, are cancelled, end by length, by a
token and by a stop id, are preempted and come back, while the ring grows and shrinks, host memory fills up,
and steps fail. After every event the invariants are checked, and every free place is poisoned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from pensieve_jax.core.errors import StepFailedError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.loop import RebatchingLoop
from pensieve_jax.rebatching.metrics import StepSeen
from pensieve_jax.rebatching.query import Query
from pensieve_jax.rebatching.ring_shapes import RingShapes
from pensieve_jax.rebatching.scheduler import Scheduled
from tests.engine.fake_runner import EOS_TOKEN_IDS, VOCAB_SIZE, dense_continuation
from tests.rebatching.fake_runner import FakeRunner
from tests.rebatching.integrity import (
    check_integrity,
    check_preemption,
    check_return_order,
    check_urgent_first,
)

TOKEN_BYTES = 10
NUM_EVENTS = 50
MAX_STEPS = 3000
LENGTHS = (32, 64, 96, 128, 192)


class Scenario:
    """One engine, and the events of a schedule.

    Attributes:
        totals: counts of what happened.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        choose = self.rng.choice
        insertion = str(choose(["embed", "embed", "shape", "none"]))
        lengths = tuple(sorted(choose(LENGTHS, int(choose([1, 2, 3, 5])), replace=False).tolist()))
        max_batch = int(choose([1, 2, 3, 4, 6, 8]))
        rows = float(choose([2.0, 3.0, 4.5, 9.0]))
        self.config = RebatchingConfig(
            max_batch=max_batch,
            kv_bytes=int(rows * lengths[-1] * TOKEN_BYTES),
            insertion=insertion,
            prefill=str(choose(["similar", "together"])) if insertion == "none" else "similar",
            preemptive=insertion != "none" and bool(choose([True, True, False])),
            prefill_ahead=choose([None, 0, 1, 4]),
            prefill_batch=int(choose([1, 2, 4])),
            prefill_tokens=int(choose([64, 256])),
            lengths=lengths,
            host_bytes=int(choose([0, 1000, 4000, 10**6])),
        )
        self.ring_shapes = RingShapes(self.config, TOKEN_BYTES, 10**6)
        self.loop: RebatchingLoop
        self.totals: Counter[str] = Counter()
        self._begin()
        self.open: dict[Query, tuple[int, ...]] = {}
        self._num_queries = 0
        self._fails = bool(choose([True, False]))

    def _begin(self) -> None:
        scheduler_of_layout = RebatchingLoop(self.config, self.ring_shapes, None)  # type: ignore[arg-type]
        self.runner = FakeRunner(scheduler_of_layout.scheduler.layout)
        self.loop = RebatchingLoop(self.config, self.ring_shapes, self.runner, observe=self._see)
        scheduler = self.loop.scheduler
        admit, suspend, schedule = scheduler._admit, scheduler._suspend, scheduler.schedule

        def checked_suspend(victim: Query) -> None:
            check_preemption(self.loop, victim)
            suspend(victim)

        def checked_admit() -> None:
            """Check at once: later in the step the first in the queue may end with a prefill."""
            scheduler._suspend = checked_suspend  # type: ignore[method-assign]
            admit()
            scheduler._suspend = suspend  # type: ignore[method-assign]
            check_urgent_first(self.loop)

        def checked_schedule(has_left: Callable[[int], bool]) -> Scheduled:
            """Check before tokens arrive, with which queries may end."""
            scheduled = schedule(has_left)
            check_return_order(self.loop, scheduled.launches)
            return scheduled

        scheduler._admit = checked_admit  # type: ignore[method-assign]
        scheduler.schedule = checked_schedule  # type: ignore[method-assign]

    def run(self) -> Counter[str]:
        """Run until every query has ended."""
        ops = ("submit", "submit", "step", "step", "step", "step", "cancel", "fail", "linger")
        for _ in range(NUM_EVENTS):
            getattr(self, f"_{self.rng.choice(ops)}")()
            self._check()
        self.runner.leaves = True
        for _ in range(MAX_STEPS):
            if not self.open:
                break
            self._step()
            self._check()
        assert not self.open, "queries are left that nothing computes"
        assert not self.loop.queries and not len(self.loop.scheduler.queue)
        self._step()
        self._step()
        assert not self.loop.scheduler.ring.num_held and not self.loop.scheduler.parked.sizes
        assert not self.runner.rows, "rows are left that no query takes"
        self.totals.update(
            {
                name: int(num)
                for name, num in self.loop.metrics.as_dict().items()
                if name.startswith("num_") or name == "idle_late"
            }
        )
        return self.totals

    def _submit(self) -> None:
        rng, most = self.rng, self.ring_shapes.max_context_tokens
        for _ in range(int(rng.choice([1, 1, 2, 4]))):
            longest = most - 1 if rng.random() < 0.3 else min(most - 1, 40)
            num_prompt = int(rng.integers(1, longest + 1))
            max_tokens = int(rng.choice([1, 2, 5, 20, 60]))
            min_tokens = int(rng.integers(0, max_tokens + 1)) if rng.random() < 0.2 else 0
            params = SamplingParams(
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                temperature=float(rng.choice([0.0, 0.7])),
                top_k=int(rng.choice([0, 5])),
                top_p=float(rng.choice([1.0, 0.5])),
                min_p=float(rng.choice([0.0, 0.25])),
                ignore_eos=bool(min_tokens) or bool(rng.random() < 0.5),  # there are too many of them to ban
                logprobs=rng.choice([None, 0, 3]),
                stop_token_ids=rng.integers(0, VOCAB_SIZE, 8).tolist() if rng.random() < 0.3 else (),
            )
            ending_ids = params.ending_ids(EOS_TOKEN_IDS)
            query = Query(
                self._num_queries,
                rng.integers(0, VOCAB_SIZE, num_prompt).tolist(),
                params,
                seed=int(rng.integers(2**63)),
                priority=int(rng.choice([0, 0, 0, 1, 5])),
                ending_ids=ending_ids,
                max_context_tokens=most,
                tokenizer=None,
            )
            self._num_queries += 1
            self.open[query] = ending_ids
            self.loop.submit(query)
            self.totals["queries"] += 1

    def _cancel(self) -> None:
        if self.open and self.rng.random() < 0.5:
            query = list(self.open)[int(self.rng.integers(len(self.open)))]
            assert self.loop.cancel(query)
            assert query.done and not self.loop.cancel(query)
            self._check_tokens(query, self.open.pop(query), whole=False)
            self.totals["cancelled"] += 1

    def _fail(self) -> None:
        """Fail the next launch, or from now on each that computes the next query's prompt."""
        if not self._fails:
            return
        draw, where = self.rng.random(), str(self.rng.choice(["launch", "fetch"]))
        if draw < 0.3:
            self.runner.fails = where
        elif draw < 0.5 and self.runner.offender not in self.loop.queries:
            self.runner.offender, self.runner.offends = self._num_queries, where

    def _linger(self) -> None:
        self.runner.leaves = not self.runner.leaves

    def _step(self) -> None:
        for query in self.loop.step():
            ending_ids = self.open.pop(query)
            assert query.done
            if query.error is not None:
                assert isinstance(query.error, StepFailedError)
                self.totals["failed"] += 1
                self.totals["offenders"] += query.serial == self.runner.offender
                num_in = self.runner.failures[query.serial] + self.runner.num_failed_resizes
                assert num_in >= 2, f"query {query.serial} failed with what it had no part in"
                self._check_tokens(query, ending_ids, whole=False)
                continue
            output = query.result()
            assert list(output.token_ids) == query.token_ids
            assert output.usage.output_tokens == len(output.token_ids)
            self._check_tokens(query, ending_ids, whole=True)
            self.totals["ended"] += 1
            self.totals["ended early"] += output.finish_reason == "stop"
            self.totals["came back"] += output.usage.num_suspensions > 0

    def _check_tokens(self, query: Query, ending_ids: tuple[int, ...], *, whole: bool) -> None:
        """Check that the tokens equal the plain list's, and their number."""
        params = query.params
        count = len(query.token_ids) if not whole else query.max_num_tokens
        if not count:
            return
        expected = dense_continuation(
            query.prompt_token_ids, params, query.seed, count, lambda number: number > params.min_tokens
        )
        wanted = expected.token_ids[: len(query.token_ids)] if not whole else expected.token_ids
        assert query.token_ids == wanted, f"query {query.serial}: {query.token_ids} should be {wanted}"
        if query.logprobs is not None:
            assert len(query.logprobs) == len(query.token_ids)
        if whole and query.output is not None:
            is_stopped = query.token_ids[-1] in ending_ids
            assert query.output.finish_reason == ("stop" if is_stopped else "length")

    def _see(self, seen: StepSeen) -> None:
        self.totals["steps"] += 1

    def _check(self) -> None:
        check_integrity(self.loop, self.config, self.ring_shapes)
        ring = self.loop.scheduler.ring
        self.runner.poison({row: ring.places(row) for row, query in ring.held if not query.done})


def run_scenario(seed: int) -> Counter[str]:
    """Run one schedule; raise AssertionError on a failure."""
    return Scenario(seed).run()
