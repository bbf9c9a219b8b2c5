"""The engine's own counters as metrics.

Owns: which of its counters are shown, under which names, and what is derived from them.
Does not know: how they are counted, or how they came here.

An engine that is started again begins at zero, which Prometheus' rates allow for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pensieve_jax.engine.stats import COMMIT_S_BOUNDS, STEP_TOKENS_BOUNDS

# By the names of `Engine.stats`: the metric and its help.
_GAUGES: Final[Mapping[str, tuple[str, str]]] = {
    "num_running": ("vllm:num_requests_running", "Turns in the batch."),
    "num_waiting": ("pensieve:engine_waiting", "Turns that wait in the engine for a place in the batch."),
    "num_live_conversations": ("pensieve:conversations", "Conversations in memory."),
}
_COUNTERS: Final[Mapping[str, tuple[str, str]]] = {
    "num_steps": ("pensieve:steps", "Steps."),
    "num_suspensions": ("vllm:num_preemptions", "Turns taken out of the batch under memory pressure."),
    "num_turns_cancelled": ("pensieve:turns_cancelled", "Turns that ended as if they had not been sent."),
    "num_turns_failed": ("pensieve:turns_failed", "Turns that were lost with their step."),
    "num_dropped_chunks": ("pensieve:dropped_chunks", "Chunks whose state was given up."),
    "num_forced_swap_outs": ("pensieve:forced_swap_outs", "Chunks copied out because a page was needed now."),
    "num_lost_copies": (
        "pensieve:lost_copies",
        "Copies to host memory of chunks that could not be packed; they count as swapped out as well.",
    ),
    "transfer_stall_s": ("pensieve:transfer_stall_seconds", "Time that steps waited for copies."),
    "engine_thread_s": ("pensieve:engine_host_seconds", "Time of the engine's thread on a processor."),
    "num_deltas": ("pensieve:engine_deltas", "Pieces of replies that the engine sent."),
    "num_delta_tokens": ("pensieve:engine_delta_tokens", "Tokens in them."),
}

# Of each of several replicas, whose counters are under "replicas".
_BY_REPLICA: Final[Mapping[str, tuple[type[Metric], str, str]]] = {
    "num_running": (GaugeMetricFamily, "pensieve:replica_running", "Turns in the batch of a replica."),
    "num_waiting": (GaugeMetricFamily, "pensieve:replica_waiting", "Turns that wait in a replica's engine."),
    "num_turns_finished": (CounterMetricFamily, "pensieve:replica_turns", "Turns that a replica ended."),
    "output_tokens": (CounterMetricFamily, "pensieve:replica_generation_tokens", "Tokens of its replies."),
    "history_tokens": (
        CounterMetricFamily,
        "pensieve:replica_history_tokens",
        "Tokens of history that its turns went on from.",
    ),
    "recomputed_tokens": (
        CounterMetricFamily,
        "pensieve:replica_recomputed_tokens",
        "Those of them whose state it had to compute again.",
    ),
}


class _Place(NamedTuple):
    tier: str
    state: str


# By the names of the states in `Engine.census`; a chunk with a copy in either tier counts once.
_CHUNKS: Final[Mapping[str, _Place]] = {
    "reserved": _Place("gpu", "reserved"),
    "on gpu": _Place("gpu", "resting"),
    "copying out": _Place("gpu", "copying"),
    "on both": _Place("both", "resting"),
    "copying in": _Place("cpu", "copying"),
    "leaving": _Place("cpu", "arriving"),
    "on cpu": _Place("cpu", "resting"),
}

# The metric, its name in `Engine.distributions`, its help, and its bounds.
_DISTRIBUTIONS: Final = (
    ("vllm:iteration_tokens_total", "step_tokens", "Query tokens of a step.", STEP_TOKENS_BOUNDS),
    ("pensieve:commit_seconds", "commit_s", "Of a transaction, in seconds.", COMMIT_S_BOUNDS),
)


class EngineReport(Collector):
    """What the engine said last; set all of it before a scrape.

    Attributes:
      stats: as `Engine.stats`, with the worker's own counters; of several engines their sums, and each one's
        under "replicas".
      census: as `Engine.census`.
      distributions: as `Engine.distributions`.
      slot_bytes: of the state of one chunk on its way between tiers.
      num_in_front: turns that wait before the engine, which it knows nothing of.
    """

    def __init__(self, model_name: str) -> None:
        """Nothing yet: all at zero."""
        self.stats: Mapping[str, Any] = {}
        self.census: Mapping[str, int] = {}
        self.distributions: Mapping[str, tuple[Sequence[int], float]] = {}
        self.slot_bytes = 0
        self.num_in_front = 0
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Every metric, at zero where the engine says nothing of it."""
        for key, (name, text) in _GAUGES.items():
            yield self._gauge(name, text, self._value(key))
        text = "Turns that wait, in the engine and before it."
        yield self._gauge("vllm:num_requests_waiting", text, self._value("num_waiting") + self.num_in_front)
        for key, (name, text) in _COUNTERS.items():
            yield self._counter(name, text, self._value(key))
        usage = self._used("num_available_gpu_pages", "num_gpu_pages")
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Pages of device memory that no turn could take now; 1 is all.", usage
        )
        usage = self._used("num_free_cpu_pages", "num_cpu_pages")
        yield self._gauge("pensieve:cpu_cache_usage_perc", "Slots of host memory in use; 1 is all.", usage)
        yield self._chunks()
        yield self._tier_bytes()
        yield from self._by_replica()
        for metric, key, text, bounds in _DISTRIBUTIONS:
            yield self._histogram(metric, text, bounds, *self.distributions.get(key, ((), 0)))

    def _by_replica(self) -> Iterator[Metric]:
        """Nothing where there is one engine, which tells of no replicas."""
        replicas: Mapping[str, Mapping[str, Any]] = self.stats.get("replicas", {})
        if not replicas:
            return
        text = "Turns that were sent once more because their replica died."
        yield self._counter("pensieve:turns_run_again", text, self._value("num_turns_run_again"))
        for key, (kind, name, text) in _BY_REPLICA.items():
            family: Any = kind(name, text, labels=["model_name", "replica"])  # type: ignore[call-arg]
            for replica, stats in sorted(replicas.items()):
                family.add_metric([self._model_name, replica], float(stats.get(key, 0)))
            yield family

    def _value(self, key: str) -> float:
        return float(self.stats.get(key, 0))

    def _used(self, free: str, total: str) -> float:
        """The share of a tier that is taken."""
        return 1 - self._value(free) / self._value(total) if self._value(total) else 0.0

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _chunks(self) -> Metric:
        labels = ["model_name", "tier", "state"]
        family = GaugeMetricFamily(
            "pensieve:chunks", "Chunks that have state, by where it is.", labels=labels
        )
        for name, place in _CHUNKS.items():
            family.add_metric([self._model_name, *place], float(self.census.get(name, 0)))
        return family

    def _tier_bytes(self) -> Metric:
        labels = ["model_name", "from", "to"]
        family = CounterMetricFamily(
            "pensieve:tier_bytes", "State moved between tiers, in bytes.", labels=labels
        )
        moves = (("num_swapped_out_chunks", "gpu", "cpu"), ("num_swapped_in_chunks", "cpu", "gpu"))
        for key, start, end in moves:
            family.add_metric([self._model_name, start, end], self._value(key) * self.slot_bytes)
        return family

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float
    ) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        names = [*(str(float(bound)) for bound in bounds), "+Inf"]
        up_to = accumulate(counts or [0] * len(names))
        family.add_metric([self._model_name], list(zip(names, up_to, strict=True)), total)
        return family
