"""OpenTelemetry spans of turns.

Owns: the spans of a turn, their attributes, and their parent.
Does not know: when events happen, which the code that runs turns reports, or the text of prompts and replies.
It is imported only if tracing is enabled.

A turn has three child spans: `queue` until the engine accepts it, `prefill` until its first token, and
`decode` until its last. Restoring the KV cache has no span of its own, because it overlaps other turns'
compute and the recomputation of dropped chunks. Attributes give the number of tokens from each source.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pensieve_jax.core.outputs import Output
from pensieve_jax.server.metrics import TurnTimes
from pensieve_jax.version import __version__

_HEADERS: Final = ("traceparent", "tracestate")
_carrier: ContextVar[dict[str, str] | None] = ContextVar("pensieve_trace", default=None)
_SPANS: Final = ("queue", "prefill", "decode")
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class TraceContext:
    """Middleware that stores the W3C trace headers of a request for the turns that it starts."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap `app`, which must include every route that starts turns."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            with _with_carrier({name: headers[name] for name in _HEADERS if name in headers}):
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)


@contextmanager
def _with_carrier(carrier: dict[str, str]) -> Iterator[None]:
    token = _carrier.set(carrier)
    try:
        yield
    finally:
        _carrier.reset(token)


class Tracing:
    """Exporter of finished turns as spans."""

    def __init__(self, processor: SpanProcessor, model_name: str) -> None:
        """Send spans to `processor`, which `close` shuts down."""
        resource = Resource.create({"service.name": "pensieve", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("pensieve_jax", __version__)
        self._model_name = model_name
        # Turns are timed by a monotonic clock, but spans need wall-clock time.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    @classmethod
    def to(cls, endpoint: str, model_name: str) -> Tracing:
        """Send spans to an OTLP endpoint over HTTP, in batches from a separate thread."""
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), model_name)

    def ended(self, turn_id: str, times: TurnTimes, output: Output | None) -> None:
        """Create the spans of a turn that ended. Without an output it failed, or its client disconnected."""
        parent = _PROPAGATOR.extract(_carrier.get() or {})
        turn = self._tracer.start_span(
            "turn",
            parent,
            kind=SpanKind.SERVER,
            start_time=self._ns(times.began_s),
            attributes={"gen_ai.request.model": self._model_name, "pensieve.turn_id": turn_id},
        )
        inside = set_span_in_context(turn)
        marks = (times.began_s, times.accepted_s, times.first_token_s, times.ended_s)
        for name, begin_s, end_s in zip(_SPANS, marks[:-1], marks[1:], strict=True):
            if begin_s is not None:
                span = self._tracer.start_span(name, inside, start_time=self._ns(begin_s))
                span.end(self._ns(times.ended_s if end_s is None else end_s))
        if output is None or output.finish_reason == "cancelled":
            turn.set_status(Status(StatusCode.ERROR))
        if output is not None:
            usage = output.usage
            found = usage.reused_gpu_tokens + usage.swapped_in_tokens
            turn.set_attributes(
                {
                    "gen_ai.usage.input_tokens": found + usage.recomputed_tokens + usage.prefilled_tokens,
                    "gen_ai.usage.output_tokens": usage.output_tokens,
                    "gen_ai.response.finish_reasons": [output.finish_reason],
                    "pensieve.tokens.new": usage.prompt_tokens,
                    "pensieve.tokens.gpu": usage.reused_gpu_tokens,
                    "pensieve.tokens.cpu": usage.swapped_in_tokens,
                    "pensieve.tokens.recomputed": usage.recomputed_tokens,
                    "pensieve.tokens.prefilled": usage.prefilled_tokens,
                    "pensieve.num_suspensions": usage.num_suspensions,
                }
            )
        turn.end(self._ns(times.ended_s))

    def close(self) -> None:
        """Send the remaining spans and shut the processor down."""
        self._provider.shutdown()

    def _ns(self, seconds: float) -> int:
        return self._epoch_ns + round(seconds * 1e9)
