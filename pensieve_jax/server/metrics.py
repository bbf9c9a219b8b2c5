"""What a server and its engine count, in Prometheus' format.

Owns: the metrics, their names and labels; which of the engine's counters are shown, and what is derived from
them; the moments of a turn, as the process in front of the engine sees them.
Does not know: when something happens: handlers tell it; how the engine counts.

Names that begin with vllm: mean what they mean there, so that dashboards and scalers made for vLLM work; what
has no equal there begins with pensieve:. Labels hold the model's name and words from fixed lists, never what
a client sent. An engine that is started again begins at zero, which Prometheus' rates allow for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pensieve_jax.core.outputs import Output
from pensieve_jax.engine.stats import COMMIT_S_BOUNDS, STEP_TOKENS_BOUNDS

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1, 2.5, 5)
_REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Metrics:
    """The metrics of one server, in a registry of their own.

    Attributes:
      engine: what the engine counts itself.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._label = {"model_name": model_name}
        self._children: dict[tuple[Any, str], Any] = {}
        self.engine = EngineReport(model_name)
        self.registry.register(self.engine)
        self._success = self._counter("vllm:request_success", "Turns that ended well.", "finished_reason")
        self._prompt = self._counter("vllm:prompt_tokens", "Tokens of contexts: history and prompt.")
        self._generation = self._counter("vllm:generation_tokens", "Tokens of replies.")
        self._by_source = self._counter(
            "vllm:prompt_tokens_by_source", "Tokens of contexts, by where their state came from.", "source"
        )
        self._queries = self._counter("vllm:prefix_cache_queries", "Tokens of contexts that were looked for.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Tokens of contexts found in any tier.")
        self._history = self._counter(
            "pensieve:history_tokens", "Tokens of history, by the tier that had their state.", "source"
        )
        self._first_token_s = self._histogram(
            "vllm:time_to_first_token_seconds", "From a request to its first token.", _FIRST_TOKEN_S
        )
        self._between_s = self._histogram(
            "vllm:inter_token_latency_seconds", "Between tokens of a reply.", _BETWEEN_TOKENS_S
        )
        self._request_s = self._histogram(
            "vllm:e2e_request_latency_seconds", "From a request to its last token.", _REQUEST_S
        )
        self._queue_s = self._histogram(
            "pensieve:front_queue_seconds", "Waiting for a place before the engine.", _REQUEST_S
        )
        self._matches = self._counter(
            "pensieve:context_match", "Contexts, by what their earlier turn was found with.", "kind"
        )
        self._context_tokens = self._counter(
            "pensieve:context_tokens",
            "Tokens of contexts up to their last reply: found in earlier turns, or about how many were not.",
            "result",
        )
        self._rebuilds = self._counter(
            "pensieve:context_rebuilds", "Contexts that were made anew, by reason.", "reason"
        )
        self._deltas = self._counter("pensieve:deltas", "Events of text sent.")
        self._delta_tokens = self._counter("pensieve:delta_tokens", "Tokens in events of text.")
        self._merge_ratio = self._gauge(
            "pensieve:delta_merge_ratio", "Tokens in an event of text, on average."
        )
        self._refused = self._counter(
            "pensieve:requests_refused", "Requests answered with 429 or 503.", "code"
        )
        self._front_waiting = self._gauge("pensieve:front_waiting", "Turns that wait before the engine.")
        self._num_deltas = self._num_delta_tokens = 0

    def render(self, num_waiting: int = 0) -> bytes:
        """All of them, as `/metrics` gives them; `num_waiting` turns wait before the engine."""
        self._front_waiting.set(num_waiting)
        self.engine.num_in_front = num_waiting
        if self._num_deltas:
            self._merge_ratio.set(self._num_delta_tokens / self._num_deltas)
        return generate_latest(self.registry)

    def waited(self, seconds: float) -> None:
        """A request got its place in the engine after so long."""
        self._queue_s.observe(seconds)

    def refused(self, code: str) -> None:
        """A request was told to come later; `code` is its error's."""
        self._child(self._refused, code).inc()

    def first_token(self, seconds: float) -> None:
        """A reply began so long after its request."""
        self._first_token_s.observe(seconds)

    def delta(self, num_tokens: int) -> None:
        """Tokens go to a client who follows them."""
        self._num_deltas += 1
        self._num_delta_tokens += num_tokens
        self._deltas.inc()
        self._delta_tokens.inc(num_tokens)

    def next_tokens(self, num_tokens: int, seconds: float) -> None:
        """Tokens came so long after those before them."""
        if num_tokens:
            self._between_s.observe(seconds / num_tokens)

    def finished(self, output: Output, seconds: float) -> None:
        """A turn ended well, so long after its request."""
        usage = output.usage
        computed = usage.recomputed_tokens + usage.prefilled_tokens
        found = usage.reused_gpu_tokens + usage.swapped_in_tokens
        self._request_s.observe(seconds)
        self._child(self._success, output.finish_reason).inc()
        self._prompt.inc(found + computed)
        self._generation.inc(usage.output_tokens)
        self._queries.inc(found + computed)
        self._hits.inc(found)
        sources = {
            "local_compute": computed,
            "local_cache_hit": usage.reused_gpu_tokens,
            "external_kv_transfer": usage.swapped_in_tokens,
        }
        for source, num_tokens in sources.items():
            self._child(self._by_source, source).inc(num_tokens)
        tiers = {
            "gpu": usage.reused_gpu_tokens,
            "cpu": usage.swapped_in_tokens,
            "recomputed": usage.recomputed_tokens,
        }
        for source, num_tokens in tiers.items():
            self._child(self._history, source).inc(num_tokens)

    def matched(self, kind: str) -> None:
        """A context's earlier turn was found by "id", "message" or "chunk", or by "none"."""
        self._child(self._matches, kind).inc()

    def context(self, found_tokens: int, missed_tokens: int) -> None:
        """Of a context, so much stood in an earlier turn, and so much more might have."""
        self._context_tokens.labels(**self._label, result="found").inc(found_tokens)
        self._context_tokens.labels(**self._label, result="missed").inc(missed_tokens)

    def rebuilt(self, reason: str) -> None:
        """A context was made anew; `reason` is a word from a fixed list."""
        self._child(self._rebuilds, reason).inc()

    # Inside

    def _child(self, metric: Any, label: str) -> Any:
        """Of a metric with one label beside the model's; looked up once, since the library's way is long."""
        child = self._children.get((metric, label))
        if child is None:
            child = self._children[metric, label] = metric.labels(self._label["model_name"], label)
        return child

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return self._made(Counter(name, text, ("model_name", *labels), registry=self.registry), labels)

    def _gauge(self, name: str, text: str) -> Any:
        return self._made(Gauge(name, text, ("model_name",), registry=self.registry), ())

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Any:
        made = Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry)
        return self._made(made, ())

    def _made(self, metric: Any, labels: tuple[str, ...]) -> Any:
        """One without further labels is the one child there is."""
        return metric if labels else metric.labels(**self._label)


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


@dataclass(slots=True)
class TurnTimes:
    """Moments of one turn, by `time.perf_counter`; None is not yet.

    Attributes:
      began_s: its request came.
      accepted_s: the engine has queued it.
      first_token_s: its reply began.
      ended_s: it ended, or was given up.
    """

    began_s: float
    accepted_s: float
    first_token_s: float | None = None
    ended_s: float = 0.0
