"""Spans of turns: their names, parents and attributes, without users' text."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from pensieve_jax import ConfigError
from pensieve_jax.commands.serve import MissingPackagesError
from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.tracing import Tracing
from tests.launching import Launch
from tests.server.fakes import MODEL, FakeEngine, Harness, say

PROMPT, REPLY = "words of a prompt", "words of a reply"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STEPS = ("queue", "prefill", "decode")


class Traced:
    """A server that keeps its spans in memory."""

    def __init__(self, engine: FakeEngine) -> None:
        self.exporter = InMemorySpanExporter()
        tracing = Tracing(SimpleSpanProcessor(self.exporter), MODEL)
        self.harness = Harness(ROUTES, engine, tracing=tracing)

    def ask(self, headers: dict[str, str] | None = None, **fields: object) -> int:
        async def post() -> int:
            body = {"messages": [{"role": "user", "content": PROMPT}], **fields}
            status, *_ = await self.harness.open("POST", "/v1/chat/completions", body, headers).whole()
            return status

        return asyncio.run(post())

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()

    def turns(self) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == "turn"]

    def inside(self, turn: ReadableSpan) -> list[ReadableSpan]:
        return [span for span in self.spans if span.parent and span.parent.span_id == turn.context.span_id]


def traced(**usage: int) -> Traced:
    return Traced(FakeEngine(say(REPLY, **usage)))


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_has_three_consecutive_spans(stream: bool) -> None:
    server = traced(reused_gpu_tokens=30, swapped_in_tokens=20, recomputed_tokens=10, prefilled_tokens=5)
    assert server.ask(stream=stream) == 200
    (turn,), (sent,) = server.turns(), server.harness.engine.turns
    steps = server.inside(turn)
    assert tuple(span.name for span in steps) == STEPS and len(server.spans) == 4
    edges = [turn.start_time, *(span.end_time for span in steps)]
    assert edges == sorted(edges) and edges[-1] == turn.end_time
    assert [span.start_time for span in steps] == edges[:-1]
    assert turn.parent is None and turn.status.status_code is StatusCode.UNSET
    found = dict(turn.attributes)
    assert found.pop("pensieve.turn_id") == sent.turn_id
    assert found == {
        "gen_ai.request.model": MODEL,
        "gen_ai.usage.input_tokens": 65,
        "gen_ai.usage.output_tokens": sent.output.usage.output_tokens,
        "gen_ai.response.finish_reasons": ("stop",),
        "pensieve.tokens.new": len(sent.spec.prompt_token_ids),
        "pensieve.tokens.gpu": 30,
        "pensieve.tokens.cpu": 20,
        "pensieve.tokens.recomputed": 10,
        "pensieve.tokens.prefilled": 5,
        "pensieve.num_suspensions": 0,
    }


def test_a_request_s_traceparent_is_the_parent_of_all_its_turns() -> None:
    server = traced()
    assert server.ask({"traceparent": f"00-{TRACE}-{PARENT}-01"}, n=2) == 200
    assert server.ask() == 200
    first, second, alone = server.turns()
    for turn in (first, second):
        assert f"{turn.context.trace_id:032x}" == TRACE and f"{turn.parent.span_id:016x}" == PARENT
    assert alone.parent is None and f"{alone.context.trace_id:032x}" != TRACE


def test_an_unsampled_traceparent_is_respected() -> None:
    server = traced()
    assert server.ask({"traceparent": f"00-{TRACE}-{PARENT}-00"}) == 200
    assert server.spans == ()


def test_an_invalid_traceparent_is_ignored() -> None:
    server = traced()
    assert server.ask({"traceparent": "00-zzz"}) == 200
    assert server.turns()[0].parent is None


def test_a_failed_turn_is_an_error_span_without_the_message() -> None:
    def fail(turn: object) -> None:
        turn.accept()
        turn.fail(RuntimeError(PROMPT))

    server = Traced(FakeEngine(fail))
    assert server.ask() == 500
    (turn,) = server.turns()
    assert turn.status.status_code is StatusCode.ERROR and not turn.status.description
    assert [span.name for span in server.inside(turn)] == ["queue", "prefill"]
    assert PROMPT not in as_text(server.spans)


def test_no_span_holds_users_text() -> None:
    server = traced()
    assert server.ask(user=PROMPT, metadata={"about": PROMPT}) == 200
    text = as_text(server.spans)
    assert "pensieve.tokens.new" in text and PROMPT not in text and REPLY not in text


def as_text(spans: Sequence[ReadableSpan]) -> str:
    return "".join(span.to_json() for span in spans)


def test_tracing_is_off_by_default_and_not_imported() -> None:
    code = (
        "import sys, json; import pensieve_jax.server.app; "
        "print(json.dumps([n for n in sys.modules if n.startswith('opentelemetry')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
    assert ServerSettings().otel_endpoint is None


def test_an_invalid_address_or_a_missing_package_is_refused(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="otel_endpoint"):
        ServerSettings(otel_endpoint="localhost:4318")

    def find_spec(name: str) -> None:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(name)
        return find(name)

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(MissingPackagesError, match=r"pip install '\.\[server,otel\]' in the checkout"):
        launch("serve", shared_llm=False, otel_endpoint="http://127.0.0.1:4318/v1/traces")
