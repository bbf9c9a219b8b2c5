"""What a server counts, in Prometheus' format.

Owns: the metrics, their names and labels.
Does not know: when something happens: handlers tell it; the engine's counters, which `engine_report` has.

Names that begin with vllm: mean what they mean there, so that dashboards and scalers made for vLLM work; what
has no equal there begins with pensieve:. Labels hold the model's name and words from fixed lists, never what
a client sent.
"""

from __future__ import annotations

from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pensieve_jax.core.outputs import Output
from pensieve_jax.server.engine_report import EngineReport

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
