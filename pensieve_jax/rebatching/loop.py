"""Event loop of the engine, which launches a step before it fetches the previous one.

Owns: the order of launches and fetches, the delivery of tokens to queries, and recovery from a failed step.
Does not know: whether the runner is a device or a simulation, prompts as text, or the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from math import isfinite
from typing import Any

from pensieve_jax.core.errors import LogitsError, StepFailedError
from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.launches import Decode, Launch, Prefill, Resize, Shape
from pensieve_jax.rebatching.metrics import Observe, RebatchingMetrics, StepSeen, unobserved
from pensieve_jax.rebatching.query import KVLocation, Query
from pensieve_jax.rebatching.queue import rank
from pensieve_jax.rebatching.ring_shapes import RingShapes
from pensieve_jax.rebatching.runner import RebatchingRunner
from pensieve_jax.rebatching.scheduler import RebatchingScheduler

type _Sampling = Prefill | Shape | Decode
_MAX_FAILURES = 2  # failed launches after which a query fails; retrying a bad query would never end


class RebatchingLoop:
    """Event loop of one engine.

    Attributes:
      queries: unfinished queries, by serial.
      scheduler: the scheduler that chooses launches.
      metrics: the counters.
    """

    def __init__(
        self,
        config: RebatchingConfig,
        ring_shapes: RingShapes,
        runner: RebatchingRunner,
        *,
        observe: Observe = unobserved,
    ) -> None:
        self._config, self._ring_shapes, self._runner, self._observe = config, ring_shapes, runner, observe
        self.scheduler = RebatchingScheduler(config, ring_shapes)
        self.metrics = RebatchingMetrics()
        self.queries: dict[int, Query] = {}
        self._flying: deque[tuple[_Sampling, Any]] = deque()

    def submit(self, query: Query) -> None:
        """Add a query to the queue."""
        self.queries[query.serial] = query
        self.scheduler.add(query)

    def cancel(self, query: Query) -> bool:
        """Cancel a query; return False if it is done, or belongs to another engine."""
        if query.done or self.queries.get(query.serial) is not query:
            return False
        query.finish("cancelled")  # first, so that an interrupt in the lines below leaves it done
        self.scheduler.remove(query)
        del self.queries[query.serial]
        for launch in self.scheduler.take_drops():
            self._runner.launch(launch)
        return True

    def step(self) -> list[Query]:
        """Launch the next step and deliver the tokens of earlier ones; return the finished queries."""
        ended: list[Query] = []
        num_before = len(self._flying)
        scheduled = self.scheduler.schedule(self._runner.has_left)
        kv_bytes = self.kv_bytes
        failed: Launch | None = None  # the launch to blame if an error is raised
        try:
            for launch in scheduled.launches:
                failed = launch
                handle = self._runner.launch(launch)
                if isinstance(launch, Prefill | Shape | Decode):
                    self._flying.append((launch, handle))
            self.metrics.count(scheduled, self.scheduler.ring, self.scheduler.parked.max_kv_bytes)
            for _ in range(num_before if scheduled.launches else len(self._flying)):
                sampling, handle = self._flying[0]
                failed = sampling
                result = self._runner.fetch(handle)
                self._flying.popleft()
                ended += self._accept(sampling, result)
        except StepFailedError as error:
            assert failed is not None
            return ended + self._fail(error, failed, scheduled.launches)
        self._observe(StepSeen(scheduled.launches, self.scheduler.ring, kv_bytes, ended))
        return ended

    def forget(self) -> None:
        """Discard all queries and all launches in flight."""
        self.queries.clear()
        self._flying.clear()
        self._runner.reset(())

    @property
    def kv_bytes(self) -> int:
        """Device memory of the ring and the parked rows."""
        return self.scheduler.parked.kv_bytes

    def lose_everything(self, error: Exception) -> None:
        """Fail all queries with `error`, and start again with an empty scheduler."""
        for query in self.queries.values():
            if not query.done:
                query.error = StepFailedError(str(error))
        self.forget()
        self.scheduler = RebatchingScheduler(self._config, self._ring_shapes)

    def _accept(self, launch: _Sampling, result: Any) -> Iterable[Query]:
        """Deliver sampled tokens to their queries; return the queries that finish with them."""
        ended = []
        token_ids, logprobs = result.token_ids.tolist(), result.logprobs.tolist()
        for query, place in launch.samples:
            if query.done:  # it finished one step earlier or was cancelled: discard the token
                self.metrics.idle_late += not isinstance(launch, Prefill)  # a prefill uses no row of the ring
                continue
            if not isinstance(launch, Prefill):  # a repeated prefill may succeed and the step fail again
                query.num_failures = 0
            if not isfinite(logprobs[place]):
                self.metrics.num_logits_errors += 1
                query.error = LogitsError(len(query.token_ids))
                ended.append(query)
                continue
            reason = query.accept(
                token_ids[place], logprobs[place], result.top_ids[place], result.top_logprobs[place]
            )
            if reason is not None:
                query.finish(reason)
                ended.append(query)
        for query in ended:
            del self.queries[query.serial]
            if query.location is not KVLocation.RELEASED:
                self.scheduler.remove(query)
        return ended

    def _fail(self, error: StepFailedError, failed: Launch, scheduled: Sequence[Launch]) -> list[Query]:
        """Requeue the queries whose KV cache was lost; fail those that were in too many failed launches."""
        self.metrics.num_failed_steps += 1
        flying = {query for launch, _ in self._flying for query, _ in launch.samples}
        flying |= _sampled_by(scheduled)  # includes launches that had not begun
        blamed = self._in(failed, scheduled)
        self._flying.clear()
        self.scheduler.lose_device(flying, self._runner.has_left)
        self._runner.reset([query.serial for query in self.scheduler.parked.sizes])
        ended = []
        for query in sorted((one for one in blamed if not one.done), key=rank):
            query.num_failures += 1
            if query.num_failures >= _MAX_FAILURES:
                # A new error, since the traceback of `error` keeps device arrays alive.
                query.error = StepFailedError(str(error))
                del self.queries[query.serial]
                self.scheduler.remove(query)
                ended.append(query)
        return ended

    def _in(self, failed: Launch, scheduled: Sequence[Launch]) -> Collection[Query]:
        """Return the queries whose rows a failed launch used. Only these are blamed for the failure."""
        if isinstance(failed, Prefill | Shape | Decode):
            return _sampled_by([failed])
        if not isinstance(failed, Resize):
            return [self.queries[failed.serial]] if failed.serial in self.queries else []
        # Blame all queries in the ring, or the ones that were to follow. An unblamed failure could repeat
        # forever.
        return [query for _, query in self.scheduler.ring.held] or _sampled_by(scheduled)


def _sampled_by(launches: Iterable[Launch]) -> set[Query]:
    return {
        query
        for launch in launches
        if isinstance(launch, Prefill | Shape | Decode)
        for query, _ in launch.samples
    }
