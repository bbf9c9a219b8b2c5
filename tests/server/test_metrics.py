"""/metrics: the names, what each one counts, and that the dashboard uses no other."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pensieve_jax.core.errors import EngineClosedError
from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.http.app import Route
from pensieve_jax.server.http.errors import invalid_value, overloaded, rate_limited
from pensieve_jax.server.http.replies import HttpResponse
from pensieve_jax.server.http.request import HttpRequest
from tests.launching import load
from tests.server.fakes import MODEL, FakeEngine, Harness, say

# vLLM's names, in the form that Prometheus stores.
VLLM = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:corrupted_requests_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:iteration_tokens_total_bucket",
]
OURS = [
    "pensieve:engine_waiting",
    "pensieve:front_queue_seconds_bucket",
    "pensieve:chunks",
    "pensieve:history_tokens_total",
    "pensieve:tier_bytes_total",
    "pensieve:transfer_stall_seconds_total",
    "pensieve:forced_swap_outs_total",
    "pensieve:context_match_total",
    "pensieve:context_rebuilds_total",
    "pensieve:commit_seconds_bucket",
    "pensieve:engine_host_seconds_total",
    "pensieve:delta_merge_ratio",
]
STATS = {
    "num_running": 3,
    "num_waiting": 2,
    "num_suspensions": 4,
    "num_gpu_pages": 100,
    "num_available_gpu_pages": 25,
    "num_cpu_pages": 10,
    "num_free_cpu_pages": 4,
    "num_steps": 7,
    "num_swapped_out_chunks": 5,
    "num_swapped_in_chunks": 1,
    "transfer_stall_s": 0.25,
    "engine_thread_s": 1.5,
}
DISTRIBUTIONS = {
    "step_tokens": ([1, 0, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1], 20_070),
    "commit_s": ([3, *[0] * 11, 1, 0], 0.5),
}
CENSUS = {"on gpu": 6, "on both": 5, "on cpu": 4, "leaving": 1, "free pages": 9}


def scraped(harness: Harness) -> dict[tuple, float]:
    """Return samples by name and labels, without the model's label."""

    async def scrape():
        return await harness.open("GET", "/metrics").whole()

    status, headers, raw = asyncio.run(scrape())
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(raw.decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == MODEL, sample
            found[sample.name, *sorted(sample.labels.items())] = sample.value
    return found


def ask(harness: Harness, **fields) -> None:
    async def post():
        messages = [{"role": "user", "content": "a label that nobody may see"}]
        return await harness.open("POST", "/v1/chat/completions", {"messages": messages, **fields}).whole()

    assert asyncio.run(post())[0] == 200


def busy() -> Harness:
    """Return a server that has run some turns."""
    script = say("hello there", reused_gpu_tokens=30, swapped_in_tokens=20, recomputed_tokens=10)
    harness = Harness(ROUTES, FakeEngine(script))
    harness.services.metrics.engine.slot_bytes = 1000
    harness.engine.last_stats, harness.engine.answers["census"] = STATS, CENSUS
    harness.engine.answers["distributions"] = DISTRIBUTIONS
    ask(harness)
    ask(harness, stream=True, max_tokens=6, user="somebody")
    harness.services.metrics.refused("overloaded")
    harness.services.metrics.rebuilt("engine")
    return harness


def test_answers_with_429_or_503_are_counted_whatever_refuses():
    def raising(error: Exception):
        async def handle(call: HttpRequest) -> HttpResponse:
            raise error

        return handle

    refusals = {
        "/many": rate_limited("A key may have 8 maps.", 1),
        "/full": overloaded("Too many long bodies are being read.", 1),
        "/stuck": EngineClosedError("The engine has not answered within 30 s."),
        "/wrong": invalid_value("input", "input is wrong."),
    }
    routes = [Route("GET", path, raising(error)) for path, error in refusals.items()]
    harness = Harness([*ROUTES, *routes])
    harness.engine.state = "dead"

    async def ask_all() -> list[int]:
        paths = (*refusals, "/ready", "/health")
        return [(await harness.open("GET", path).whole())[0] for path in paths]

    assert asyncio.run(ask_all()) == [429, 503, 503, 400, 503, 503]
    found = scraped(harness)
    counts = {key[1][1]: n for key, n in found.items() if key[0] == "pensieve:requests_refused_total"}
    # Answers to a probe are not counted as refusals.
    assert counts == {"rate_limit_exceeded": 1, "overloaded": 2}


def test_every_name_exists_before_the_first_request():
    names = {name for name, *_ in scraped(Harness(ROUTES))}
    labelled = {
        *(
            "vllm:request_success_total",
            "vllm:prompt_tokens_by_source_total",
            "pensieve:history_tokens_total",
        ),
        *("pensieve:context_match_total", "pensieve:context_rebuilds_total"),
    }
    assert set(VLLM + OURS) - names <= labelled
    assert set(VLLM + OURS) <= {name for name, *_ in scraped(busy())}


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_counts_once_however_many_replies_it_gets(stream):
    """As in `usage`; here for two prompts with three replies each."""
    harness = Harness(ROUTES, FakeEngine(say("hello there", reused_gpu_tokens=30)))
    body = {"prompt": ["abc", "defgh"], "n": 3, "stream": stream, "stream_options": {"include_usage": True}}

    async def complete() -> int:
        return (await harness.open("POST", "/v1/completions", body).whole())[0]

    assert asyncio.run(complete()) == 200
    found = scraped(harness)
    num_prompts = sum(len(turn.spec.prompt_token_ids) + 30 for turn in harness.engine.turns) / 3
    assert found["vllm:prompt_tokens_total",] == found["vllm:prefix_cache_queries_total",] == num_prompts
    assert found["vllm:prefix_cache_hits_total",] == 60
    assert found["vllm:generation_tokens_total",] == 6 * 12
    assert found["vllm:request_success_total", ("finished_reason", "stop")] == 6


def test_tokens_of_turns_are_counted_by_source():
    harness = busy()
    found = scraped(harness)
    num_prompt = sum(len(turn.spec.prompt_token_ids) for turn in harness.engine.turns)
    assert found["vllm:prompt_tokens_total",] == num_prompt + 2 * 60
    assert found["vllm:generation_tokens_total",] == 12 + 6
    assert found["vllm:prefix_cache_queries_total",] == num_prompt + 120
    assert found["vllm:prefix_cache_hits_total",] == 100
    by_source = {key[1][1]: v for key, v in found.items() if key[0] == "vllm:prompt_tokens_by_source_total"}
    assert by_source == {
        "local_compute": num_prompt + 20,
        "local_cache_hit": 60,
        "external_kv_transfer": 40,
    }
    history = {key[1][1]: v for key, v in found.items() if key[0] == "pensieve:history_tokens_total"}
    assert history == {"gpu": 60, "cpu": 40, "recomputed": 20}
    assert found["vllm:request_success_total", ("finished_reason", "stop")] == 1
    assert found["vllm:request_success_total", ("finished_reason", "length")] == 1
    assert found["vllm:time_to_first_token_seconds_count",] == 2
    assert found["vllm:e2e_request_latency_seconds_count",] == 2
    assert found["pensieve:front_queue_seconds_count",] == 2


def test_all_waiting_requests_are_counted_wherever_they_wait():
    harness = busy()
    assert scraped(harness)["vllm:num_requests_waiting",] == 2
    harness.services.limits._num_waiting_of.update(a=2, b=3)
    found = scraped(harness)
    assert found["vllm:num_requests_waiting",] == 7
    assert (found["pensieve:engine_waiting",], found["pensieve:front_waiting",]) == (2, 5)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_choices", [1, 2])
def test_times_between_tokens_include_whole_answers(stream, num_choices):
    """The times are those of each choice's own tokens, not of the end of earlier choices."""

    async def scenario():
        engine = FakeEngine()
        engine.script = None
        harness = Harness(ROUTES, engine)
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream, "n": num_choices}
        asked = harness.open("POST", "/v1/chat/completions", body)
        await engine.submitted.wait()
        for text in ("one", "two", "three"):
            for turn in engine.turns:
                turn.feed(text)
            for _ in range(20):
                await asyncio.sleep(0)
        for turn in engine.turns[::-1]:
            turn.finish()
        await asked.whole()
        return harness

    found = scraped(asyncio.run(scenario()))
    assert found["vllm:time_to_first_token_seconds_count",] == num_choices
    assert found["vllm:inter_token_latency_seconds_count",] == 2 * num_choices
    assert found["pensieve:deltas_total",] == (2 * num_choices if stream else 0)


def test_the_engines_own_counters_are_exported():
    found = scraped(busy())
    assert found["vllm:num_requests_running",] == 3 and found["vllm:num_requests_waiting",] == 2
    assert found["vllm:kv_cache_usage_perc",] == 0.75 and found["pensieve:cpu_cache_usage_perc",] == 0.6
    assert found["vllm:num_preemptions_total",] == 4
    assert found["pensieve:chunks", ("state", "resting"), ("tier", "both")] == 5
    assert found["pensieve:chunks", ("state", "arriving"), ("tier", "cpu")] == 1
    assert found["pensieve:tier_bytes_total", ("from", "gpu"), ("to", "cpu")] == 5000
    assert found["pensieve:tier_bytes_total", ("from", "cpu"), ("to", "gpu")] == 1000
    assert found["pensieve:engine_host_seconds_total",] == 1.5
    assert found["vllm:iteration_tokens_total_count",] == 7
    assert (found["pensieve:commit_seconds_sum",], found["pensieve:commit_seconds_count",]) == (0.5, 4)
    assert found["vllm:iteration_tokens_total_sum",] == 20_070
    steps = [found["vllm:iteration_tokens_total_bucket", ("le", le)] for le in ("1.0", "8.0", "16.0", "32.0")]
    assert steps == [1, 1, 3, 6] and found["vllm:iteration_tokens_total_bucket", ("le", "+Inf")] == 7
    commits = [found["pensieve:commit_seconds_bucket", ("le", le)] for le in ("0.0001", "0.5", "1.0")]
    assert commits == [3, 3, 4]


def with_replicas() -> Harness:
    """Return a front end with two replicas."""
    harness = busy()
    harness.engine.last_stats = {
        "num_turns_run_again": 2,
        "replicas": {"a": {"num_running": 3, "output_tokens": 7}, "b": {"num_running": 1}},
    }
    return harness


def test_each_of_several_replicas_has_its_own_samples():
    found = scraped(with_replicas())
    assert found["pensieve:turns_run_again_total",] == 2
    assert found["pensieve:replica_running", ("replica", "a")] == 3
    assert found["pensieve:replica_running", ("replica", "b")] == 1
    assert found["pensieve:replica_generation_tokens_total", ("replica", "a")] == 7
    per_replica = {key[0] for key in scraped(busy())}
    assert "pensieve:turns_run_again_total" not in per_replica
    assert not [name for name in per_replica if name.startswith("pensieve:replica")]


def test_no_label_holds_a_clients_text():
    text = busy().services.metrics.render().decode()
    assert "nobody" not in text and "somebody" not in text


def test_if_the_engine_cannot_answer_the_known_metrics_stay():
    harness = busy()
    scraped(harness)

    async def call(name, *arguments):
        raise EngineClosedError("It has ended.")

    harness.engine.call = call
    assert scraped(harness)["pensieve:chunks", ("state", "resting"), ("tier", "both")] == 5


def test_the_dashboard_uses_only_existing_metrics():
    make_dashboard = load("scripts.dev.make_dashboard")
    text = make_dashboard.DASHBOARD.read_text("utf-8")
    assert json.loads(text) == make_dashboard.dashboard(), "run scripts/dev/make_dashboard.py"
    names, labels = set(), {}
    for harness in (busy(), with_replicas()):
        for name, *key in scraped(harness):
            names.add(name)
            labels[name] = {label for label, _ in key} | {"model_name"}
    expressions = [
        target["expr"] for panel in json.loads(text)["panels"] for target in panel.get("targets", ())
    ]
    assert len(expressions) > 30
    for expression in expressions:
        asked = re.findall(r"(?:vllm|pensieve):[a-z0-9_]+", expression)
        assert asked and set(asked) <= names, expression
        grouped = re.findall(r"sum by \(([^)]*)\)", expression)
        for label in (label.strip() for group in grouped for label in group.split(",")):
            assert all(label in labels[name] for name in asked), expression
        assert expression.count("(") == expression.count(")")
        assert expression.count('{model_name=~"$model_name"}') == len(asked)
        for name in asked:
            is_counter = name.endswith(("_total", "_bucket", "_sum", "_count"))
            assert (f"rate({name}{{" in expression) == is_counter, expression
