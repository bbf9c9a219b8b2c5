"""Metrics of a server and its engine in Prometheus format.

Owns: the metrics, their names and labels; the selection of the engine's counters and the values derived from
them; the timestamps of a turn as the front end sees them.
Does not know: when events happen, which handlers report to it, or how the engine counts.

Names that begin with vllm: have the same meaning as in vLLM, so that dashboards and autoscalers for vLLM
work. Metrics without a vLLM equivalent begin with pensieve:. Label values are the model's name and words from
fixed lists, never client input. Counters of a restarted engine begin at zero, which Prometheus' rates handle.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pensieve_jax.core.outputs import Output
from pensieve_jax.engine.stats import COMMIT_S_BOUNDS, STEP_TOKENS_BOUNDS
from pensieve_jax.server.logs import num_dropped_lines

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
_OWNERS_COUNTS: Final = (
    "prompt_tokens",
    "reused_gpu_tokens",
    "swapped_in_tokens",
    "recomputed_tokens",
    "prefilled_tokens",
    "output_tokens",
)
_REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Metrics:
    """Metrics of one server, in their own registry.

    Attributes:
      engine: the metrics that the engine counts itself.
      by_owner: turns that ended successfully, and their tokens by origin, of each owner of a key.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._label = {"model_name": model_name}
        self._children: dict[tuple[Any, str], Any] = {}
        self.by_owner: defaultdict[str, Counts[str]] = defaultdict(Counts)
        self.engine = EngineReport(model_name)
        self.registry.register(self.engine)
        self._success = self._counter(
            "vllm:request_success", "Turns that ended successfully.", "finished_reason"
        )
        self._prompt = self._counter(
            "vllm:prompt_tokens", "Tokens of contexts: history and prompt, once for all replies to it."
        )
        self._generation = self._counter("vllm:generation_tokens", "Tokens of replies.")
        self._by_source = self._counter(
            "vllm:prompt_tokens_by_source", "Tokens of contexts, by the source of their KV cache.", "source"
        )
        self._queries = self._counter(
            "vllm:prefix_cache_queries", "Tokens of contexts looked up in the cache."
        )
        self._hits = self._counter("vllm:prefix_cache_hits", "Tokens of contexts found in any tier.")
        self._history = self._counter(
            "pensieve:history_tokens", "Tokens of history, by the tier that held their KV cache.", "source"
        )
        self._first_token_s = self._histogram(
            "vllm:time_to_first_token_seconds", "Time from a request to its first token.", _FIRST_TOKEN_S
        )
        self._between_s = self._histogram(
            "vllm:inter_token_latency_seconds", "Time between tokens of a reply.", _BETWEEN_TOKENS_S
        )
        self._request_s = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time from a request to its last token.", _REQUEST_S
        )
        self._queue_s = self._histogram(
            "pensieve:front_queue_seconds", "Time in the front end's queue before the engine.", _REQUEST_S
        )
        self._matches = self._counter(
            "pensieve:context_match", "Contexts, by how their earlier turn was found.", "kind"
        )
        self._context_tokens = self._counter(
            "pensieve:context_tokens",
            "Tokens of contexts up to their last reply: found in earlier turns, or missed (approximate).",
            "result",
        )
        self._rebuilds = self._counter(
            "pensieve:context_rebuilds", "Contexts that were rebuilt, by reason.", "reason"
        )
        self._deltas = self._counter("pensieve:deltas", "Text events sent to clients.")
        self._delta_tokens = self._counter("pensieve:delta_tokens", "Tokens in text events.")
        self._merge_ratio = self._gauge(
            "pensieve:delta_merge_ratio", "Average number of tokens in a text event."
        )
        self._refused = self._counter(
            "pensieve:requests_refused", "Requests answered with 429 or 503.", "code"
        )
        self._front_waiting = self._gauge("pensieve:front_waiting", "Turns in the front end's queue.")
        self._held = self._gauge("pensieve:budget_held", "What open requests hold of a resource.", "resource")
        self._budget = self._gauge("pensieve:budget", "What requests may hold of a resource.", "resource")
        self._stored = {
            name: self._gauge(f"pensieve:stored_{name}", f"Stored {name} of all keys.")
            for name in ("conversations", "responses", "bytes")
        }
        self._expiry_suspended = self._gauge(
            "pensieve:expiry_suspended", "1 while nothing expires, because the clock is ahead of the history."
        )
        self._num_deltas = self._num_delta_tokens = 0

    def render(self, num_waiting: int = 0, budgets: Mapping[str, tuple[int, int]] | None = None) -> bytes:
        """Return the body of `/metrics`.

        Args:
          num_waiting: turns in the front end's queue.
          budgets: what is held of each resource, and its budget.
        """
        self._front_waiting.set(num_waiting)
        for resource, (held, total) in (budgets or {}).items():
            self._child(self._held, resource).set(held)
            self._child(self._budget, resource).set(total)
        self.engine.num_in_front = num_waiting
        if self._num_deltas:
            self._merge_ratio.set(self._num_delta_tokens / self._num_deltas)
        return generate_latest(self.registry)

    def waited(self, seconds: float) -> None:
        """Record that a request waited `seconds` in the front end's queue."""
        self._queue_s.observe(seconds)

    def refused(self, code: str) -> None:
        """Record a request that was refused with 429 or 503; `code` is the error's code."""
        self._child(self._refused, code).inc()

    def stored(self, num_conversations: int, num_responses: int, num_bytes: int) -> None:
        """Record what all owners store in the history."""
        for gauge, amount in zip(
            self._stored.values(), (num_conversations, num_responses, num_bytes), strict=True
        ):
            gauge.set(amount)

    def expiry_suspended(self, is_suspended: bool) -> None:
        """Record whether deletions wait until the clock is confirmed."""
        self._expiry_suspended.set(is_suspended)

    def first_token(self, seconds: float) -> None:
        """Record that a reply began `seconds` after its request."""
        self._first_token_s.observe(seconds)

    def delta(self, num_tokens: int) -> None:
        """Record a text event with `num_tokens` tokens for a streaming client."""
        self._num_deltas += 1
        self._num_delta_tokens += num_tokens
        self._deltas.inc()
        self._delta_tokens.inc(num_tokens)

    def next_tokens(self, num_tokens: int, seconds: float) -> None:
        """Record that `num_tokens` tokens arrived `seconds` after the previous ones."""
        if num_tokens:
            self._between_s.observe(seconds / num_tokens)

    def finished(
        self, output: Output, seconds: float, *, owner: str = "", counts_context: bool = True
    ) -> None:
        """Record a turn of `owner` that ended successfully, `seconds` after its request.

        The context counts if `counts_context`; of several replies to a prompt, it counts for one.
        """
        usage = output.usage
        counts = self.by_owner[owner]
        counts["num_turns_finished"] += 1
        for name in _OWNERS_COUNTS:
            counts[name] += getattr(usage, name)
        computed = usage.recomputed_tokens + usage.prefilled_tokens
        found = usage.reused_gpu_tokens + usage.swapped_in_tokens
        self._request_s.observe(seconds)
        self._child(self._success, output.finish_reason).inc()
        self._generation.inc(usage.output_tokens)
        if not counts_context:
            return
        self._prompt.inc(found + computed)
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

    def counts_of(self, owner: str) -> dict[str, int]:
        """Return the counts of an owner's turns since the start."""
        counts = self.by_owner.get(owner, Counts())
        return {name: counts[name] for name in ("num_turns_finished", *_OWNERS_COUNTS)}

    def matched(self, kind: str) -> None:
        """Record how a context's earlier turn was found: by "id", "message", "chunk", or "none"."""
        self._child(self._matches, kind).inc()

    def context(self, parent_tokens: int, missed_tokens: int) -> None:
        """Record the tokens of a context found in an earlier turn, and those that could have been found."""
        self._context_tokens.labels(**self._label, result="found").inc(parent_tokens)
        self._context_tokens.labels(**self._label, result="missed").inc(missed_tokens)

    def rebuilt(self, reason: str) -> None:
        """Record a rebuilt context; `reason` is a word from a fixed list."""
        self._child(self._rebuilds, reason).inc()

    # Private methods

    def _child(self, metric: Any, label: str) -> Any:
        """Return the child of a metric with one label besides the model's; cached, as the library is slow."""
        child = self._children.get((metric, label))
        if child is None:
            child = self._children[metric, label] = metric.labels(self._label["model_name"], label)
        return child

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return self._made(Counter(name, text, ("model_name", *labels), registry=self.registry), labels)

    def _gauge(self, name: str, text: str, *labels: str) -> Any:
        return self._made(Gauge(name, text, ("model_name", *labels), registry=self.registry), labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Any:
        made = Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry)
        return self._made(made, ())

    def _made(self, metric: Any, labels: tuple[str, ...]) -> Any:
        """Return the metric, or its only child if it has no labels besides the model's."""
        return metric if labels else metric.labels(**self._label)


# Keys are the names of `Engine.stats`; values are the metric and its help text.
_GAUGES: Final[Mapping[str, tuple[str, str]]] = {
    "num_running": ("vllm:num_requests_running", "Turns in the batch."),
    "num_waiting": ("pensieve:engine_waiting", "Turns that wait in the engine to join the batch."),
    "num_live_conversations": ("pensieve:conversations", "Conversations in memory."),
}
_COUNTERS: Final[Mapping[str, tuple[str, str]]] = {
    "num_steps": ("pensieve:steps", "Steps of the engine."),
    "num_suspensions": ("vllm:num_preemptions", "Turns taken out of the batch under memory pressure."),
    "num_turns_cancelled": ("pensieve:turns_cancelled", "Turns that were cancelled."),
    "num_turns_failed": ("pensieve:turns_failed", "Turns that failed in the engine."),
    "num_logits_errors": ("vllm:corrupted_requests", "Turns that failed because logits were not finite."),
    "num_turns_rewritten": (
        "pensieve:turns_rewritten",
        "Turns before which the chat template wrote earlier ones differently, so that a part was recomputed.",
    ),
    "num_draft_steps": ("pensieve:draft_steps", "Steps of the engine with drafts."),
    "num_drafts": ("vllm:spec_decode_num_drafts", "Drafts: one for each turn of a step that has one."),
    "num_draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Tokens of drafts."),
    "num_accepted_draft_tokens": (
        "vllm:spec_decode_num_accepted_tokens",
        "Tokens of drafts that became tokens of replies.",
    ),
    "num_dropped_chunks": ("pensieve:dropped_chunks", "Chunks whose KV cache was dropped."),
    "num_forced_swap_outs": ("pensieve:forced_swap_outs", "Chunks swapped out on demand to free a page."),
    "num_lost_copies": (
        "pensieve:lost_copies",
        "Copies to host memory of chunks that could not be packed; they count as swapped out as well.",
    ),
    "transfer_stall_s": ("pensieve:transfer_stall_seconds", "Time that steps waited for copies."),
    "engine_thread_s": ("pensieve:engine_host_seconds", "CPU time of the engine's thread."),
    "num_deltas": ("pensieve:engine_deltas", "Deltas of replies that the engine sent."),
    "num_delta_tokens": ("pensieve:engine_delta_tokens", "Tokens in the deltas that the engine sent."),
}

# Metrics of each replica, whose counters are under "replicas".
_BY_REPLICA: Final[Mapping[str, tuple[type[Metric], str, str]]] = {
    "num_running": (GaugeMetricFamily, "pensieve:replica_running", "Turns in the batch of a replica."),
    "num_waiting": (GaugeMetricFamily, "pensieve:replica_waiting", "Turns that wait in a replica's engine."),
    "num_turns_finished": (CounterMetricFamily, "pensieve:replica_turns", "Turns that a replica finished."),
    "output_tokens": (
        CounterMetricFamily,
        "pensieve:replica_generation_tokens",
        "Tokens of a replica's replies.",
    ),
    "history_tokens": (
        CounterMetricFamily,
        "pensieve:replica_history_tokens",
        "Tokens of history that a replica's turns continued.",
    ),
    "recomputed_tokens": (
        CounterMetricFamily,
        "pensieve:replica_recomputed_tokens",
        "Tokens of history whose KV cache a replica recomputed.",
    ),
}


class _ChunkLabels(NamedTuple):
    tier: str
    state: str


# Keys are the states of `Engine.census`; a chunk with copies in both tiers counts once.
_CHUNKS: Final[Mapping[str, _ChunkLabels]] = {
    "reserved": _ChunkLabels("gpu", "reserved"),
    "on gpu": _ChunkLabels("gpu", "resting"),
    "copying out": _ChunkLabels("gpu", "copying"),
    "on both": _ChunkLabels("both", "resting"),
    "copying in": _ChunkLabels("cpu", "copying"),
    "leaving": _ChunkLabels("cpu", "arriving"),
    "on cpu": _ChunkLabels("cpu", "resting"),
}

# Metric, key in `Engine.distributions`, help text, and bucket bounds.
_DISTRIBUTIONS: Final = (
    ("vllm:iteration_tokens_total", "step_tokens", "Query tokens of a step.", STEP_TOKENS_BOUNDS),
    ("pensieve:commit_seconds", "commit_s", "Duration of a history transaction.", COMMIT_S_BOUNDS),
)


class EngineReport(Collector):
    """Latest report of the engine; set every attribute before a scrape.

    Attributes:
      stats: `Engine.stats` with the worker's own counters. For several engines it has their sums, and each
        engine's values under "replicas".
      census: the value of `Engine.census`.
      distributions: the value of `Engine.distributions`.
      slot_bytes: the size of one chunk's KV cache in a transfer between tiers.
      num_in_front: turns in the front end's queue, which the engine does not count.
    """

    def __init__(self, model_name: str) -> None:
        """Start with every metric at zero."""
        self.stats: Mapping[str, Any] = {}
        self.census: Mapping[str, int] = {}
        self.distributions: Mapping[str, tuple[Sequence[int], float]] = {}
        self.slot_bytes = 0
        self.num_in_front = 0
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; a value that the engine does not report is zero."""
        for key, (name, text) in _GAUGES.items():
            yield self._gauge(name, text, self._value(key))
        text = "Turns that wait in the engine and in the front end's queue."
        yield self._gauge("vllm:num_requests_waiting", text, self._value("num_waiting") + self.num_in_front)
        for key, (name, text) in _COUNTERS.items():
            yield self._counter(name, text, self._value(key))
        usage = self._used("num_available_gpu_pages", "num_gpu_pages")
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of GPU pages that are not available; 1 is all.", usage
        )
        usage = self._used("num_free_cpu_pages", "num_cpu_pages")
        yield self._gauge("pensieve:cpu_cache_usage_perc", "Share of CPU slots in use; 1 is all.", usage)
        yield self._log_lines()
        yield self._chunks()
        yield self._tier_bytes()
        yield from self._by_replica()
        for metric, key, text, bounds in _DISTRIBUTIONS:
            yield self._histogram(metric, text, bounds, *self.distributions.get(key, ((), 0)))

    def _by_replica(self) -> Iterator[Metric]:
        """Yield the metrics of each replica; a single engine reports no replicas."""
        replicas: Mapping[str, Mapping[str, Any]] = self.stats.get("replicas", {})
        if not replicas:
            return
        text = "Turns that were submitted again because their replica died."
        yield self._counter("pensieve:turns_run_again", text, self._value("num_turns_run_again"))
        for key, (kind, name, text) in _BY_REPLICA.items():
            family: Any = kind(name, text, labels=["model_name", "replica"])  # type: ignore[call-arg]
            for replica, stats in sorted(replicas.items()):
                family.add_metric([self._model_name, replica], float(stats.get(key, 0)))
            yield family

    def _value(self, key: str) -> float:
        return float(self.stats.get(key, 0))

    def _used(self, free: str, total: str) -> float:
        """Return the share of a tier that is in use."""
        return 1 - self._value(free) / self._value(total) if self._value(total) else 0.0

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _log_lines(self) -> Metric:
        text = "Lines of the log that were dropped because its reader had stopped, by process."
        family = CounterMetricFamily("pensieve:log_lines_dropped", text, labels=["model_name", "process"])
        family.add_metric([self._model_name, "front"], float(num_dropped_lines()))
        family.add_metric([self._model_name, "engine"], self._value("num_log_lines_dropped"))
        return family

    def _chunks(self) -> Metric:
        labels = ["model_name", "tier", "state"]
        family = GaugeMetricFamily(
            "pensieve:chunks", "Chunks with KV cache, by tier and state.", labels=labels
        )
        for name, chunk_labels in _CHUNKS.items():
            family.add_metric([self._model_name, *chunk_labels], float(self.census.get(name, 0)))
        return family

    def _tier_bytes(self) -> Metric:
        labels = ["model_name", "from", "to"]
        family = CounterMetricFamily(
            "pensieve:tier_bytes", "Bytes of KV cache moved between tiers.", labels=labels
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
    """Timestamps of one turn, by `time.perf_counter`.

    Attributes:
      began_s: when its request arrived.
      accepted_s: when the engine queued it.
      first_token_s: when its reply began; None before that.
      ended_s: when it ended, or its caller gave it up.
    """

    began_s: float
    accepted_s: float
    first_token_s: float | None = None
    ended_s: float = 0.0
