"""Random schedules of a cellular engine's policy, compared with recursion over each graph.

`tests.search_schedules` runs as many as there is time for. Requests of all shapes join, are cancelled, end
early, and lose launches and whole devices, on one to four workers that end their launches at random. After
every event the invariants are checked and free rows are poisoned.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from pensieve_jax.cellular.cells import CellTypes
from pensieve_jax.cellular.config import CellularConfig
from pensieve_jax.cellular.errors import LaunchFailedError, RequestCancelledError
from pensieve_jax.cellular.loop import Loop
from pensieve_jax.cellular.request import CellRequest
from pensieve_jax.cellular.request_processor import RequestProcessor
from tests.cellular.fake_worker import FakeWorker
from tests.cellular.hash_cells import Drawn, draw, make_cells, unfold_many
from tests.cellular.integrity import check_integrity, check_pins, check_work_conserving

NAMES = ("step", "decode", "leaf", "inner", "join", "narrow")
NUM_EVENTS = 60
MAX_STEPS = 3000


class Scenario:
    """One engine, and the events of a schedule.

    Attributes:
        totals: counts of what happened.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        choose = self.rng.choice
        num_workers = int(choose([1, 1, 2, 3, 4]))
        self.config = CellularConfig(
            num_devices=num_workers,
            num_rows=int(choose([16, 24, 100])),
            max_num_tasks=int(choose([1, 2, 3, 5])),
            min_batch=int(choose([1, 1, 2])),
            release=str(choose(["completion", "submission"])) if num_workers == 1 else "completion",
            tie_break=choose([None, "priority", "alternate"]),
            launches_in_flight=int(choose([1, 2, 3])),
            max_skips=(None, 1, 3)[seed % 3],
        )
        batches = {name: int(choose([1, 2, 3, 4, 7, 16])) for name in NAMES}
        self.types = CellTypes(make_cells(batches))
        self.processor = RequestProcessor(self.types, self.config)
        self.workers: list[FakeWorker] = []
        for _ in range(num_workers):
            FakeWorker(self.types, self.config.num_rows, self.workers)
        self.loop = Loop(self.processor, self.workers, self.config.launches_in_flight)
        self.shapes = str(choose(["c", "e", "ce", "t", "cet", "ceta", "a"]))
        self.open: dict[CellRequest, Drawn] = {}
        self.totals: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Run until every request has ended."""
        ops = ("submit", "submit", "step", "step", "step", "cancel", "fail")
        for _ in range(NUM_EVENTS):
            getattr(self, f"_{self.rng.choice(ops)}")()
            self._check()
        for _ in range(MAX_STEPS):
            if not self.open:
                break
            self._step(all_end=True)
            self._check()
        assert not self.open, "requests are left that nothing computes"
        self._step(all_end=True)
        self._step(all_end=True)
        admission = self.processor.admission
        assert not admission.request_ids and not admission.budget.promised.any()
        for by_kind in self.processor.formation.rows:
            assert all(rows.num_free == self.config.num_rows for rows in by_kind)
        self.totals["moved"] += self.processor.formation.num_moved
        return self.totals

    def _submit(self) -> None:
        drawn = [draw(self.rng, self.shapes) for _ in range(int(self.rng.choice([1, 1, 2, 5])))]
        many = unfold_many if self.rng.random() < 0.5 else None
        handles = self.processor.submit_many(drawn, lambda one, graph: one.unfold(graph), many)
        self.totals["by vectors"] += many is not None and all(one.vector is not None for one in drawn)
        self.open.update(zip(handles, drawn, strict=True))
        self.totals["requests"] += len(drawn)

    def _cancel(self) -> None:
        if self.open:
            handle = list(self.open)[int(self.rng.integers(len(self.open)))]
            assert self.processor.cancel(handle)
            assert handle.done and isinstance(handle.error, RequestCancelledError)
            del self.open[handle]
            self.totals["cancelled"] += 1

    def _fail(self) -> None:
        if self.rng.random() < 0.3:
            worker = self.workers[int(self.rng.integers(len(self.workers)))]
            worker.fails = str(self.rng.choice(["intact", "lost"]))

    def _step(self, all_end: bool = False) -> None:
        for worker in self.workers:
            worker.num_may_end = 10**9 if all_end else int(self.rng.integers(3))
        ended = self.loop.step()
        for handle in ended:
            self._check_result(handle, self.open.pop(handle))
        idle = [index for index, worker in enumerate(self.workers) if not worker.num_in_flight]
        check_work_conserving(self.processor, idle)

    def _check_result(self, handle: CellRequest, drawn: Drawn) -> None:
        assert handle.done
        if handle.error is not None:
            assert isinstance(handle.error, LaunchFailedError)
            self.totals["failed"] += 1
            return
        output = handle.result()
        states, tokens = drawn.expected(self.types)
        found = [int(next(one[name] for name in ("x", "y") if name in one)) for one in output.states]
        assert found == states
        assert list(output.emitted.get("token", ())) == tokens
        self.totals["ended"] += 1
        self.totals["wasted"] += handle.num_wasted
        self.totals["ended early"] += len(tokens) < sum(
            bool(self.types.find(n.name).emits) for n in drawn.nodes
        )

    def _check(self) -> None:
        check_integrity(self.processor)
        check_pins(self.processor, (launch for worker in self.workers for launch in worker.launches))
        for worker, by_kind in zip(self.workers, self.processor.formation.rows, strict=True):
            worker.poison([rows.free_rows() for rows in by_kind])


def run_scenario(seed: int) -> Counter[str]:
    """Run one schedule; raise AssertionError on a failure."""
    return Scenario(seed).run()
