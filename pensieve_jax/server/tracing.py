"""Spans of turns, for OpenTelemetry.

Owns: which spans a turn becomes, their attributes, and whose child it is.
Does not know: when something happens, which whoever runs turns tells it; anybody's text.
Nothing here is imported but where spans were asked for.

A turn is three spans in one: `queue` until the engine has it, `prefill` until its first token, `decode` until
its last. Restoring state has no span of its own, since copies arrive while others compute and while what was
lost is recomputed: how many tokens came from where are attributes.
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
    """Keeps the W3C headers of a request for the turns that it starts."""

    def __init__(self, app: ASGIApp) -> None:
        """Around everything that starts turns."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            with _kept({name: headers[name] for name in _HEADERS if name in headers}):
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)


@contextmanager
def _kept(carrier: dict[str, str]) -> Iterator[None]:
    token = _carrier.set(carrier)
    try:
        yield
    finally:
        _carrier.reset(token)


class Tracing:
    """Makes the spans of turns that have ended."""

    def __init__(self, processor: SpanProcessor, model_name: str) -> None:
        """`processor` takes the spans; it is shut down by `close`."""
        resource = Resource.create({"service.name": "pensieve", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("pensieve_jax", __version__)
        self._model_name = model_name
        # Turns are timed by a clock that does not jump; spans want that of the day.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    @classmethod
    def to(cls, endpoint: str, model_name: str) -> Tracing:
        """Spans to an OTLP endpoint over HTTP, in batches from a thread of its own."""
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), model_name)

    def ended(self, turn_id: str, times: TurnTimes, output: Output | None) -> None:
        """A turn has ended; without an output it failed, or its client left."""
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
        """Send what is left."""
        self._provider.shutdown()

    def _ns(self, seconds: float) -> int:
        return self._epoch_ns + round(seconds * 1e9)
