"""Padded batches as servers: ours, and static ones of a fake transformers."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest

from lab.tests.serving_fakes import session, users
from lab.tests.test_serving_baselines import module
from model_defs import preset
from pensieve_jax import CacheConfig, ConfigError, EngineConfig
from pensieve_lab.workload import UserTurn
from tests.launching import load

stateless_baselines = load("pensieve_lab.serving.stateless_baselines")
rebatching_server = load("pensieve_lab.serving.rebatching_server")
serving_client = load("pensieve_lab.serving.client")
serving_clock = load("pensieve_lab.serving.clock")
serving_run = load("pensieve_lab.serving.run")
static_server = load("pensieve_lab.serving.static_server")

TINY = preset("llama-tiny")
CONFIG = EngineConfig(cache=CacheConfig(gpu_pages=4, chunk_tokens=32))


def serve(system, *sessions):
    """Serve all turns and return the answers; users reply at once."""
    clock = serving_clock.RunClock()
    server = system.start(clock)
    client = serving_client.InlineClient(users(*sessions), serving_client.Prompts(300, 0), clock)
    run = serving_run.serve(server, client, clock, serving_run.Window())
    assert not run.num_unfinished and not server.has_unfinished
    return run


# Ours


@pytest.mark.long
@pytest.mark.parametrize(("system", "insertion"), [("rebatching", "embed"), ("rebatching-static", "none")])
def test_turns_join_and_leave(launch, capsys, compilation_cache, system, insertion):
    """Whole histories are sent, so nothing is reused."""
    flags = {"num_conversations": 5, "num_turns": 2, "prompt_tokens": 6, "output_tokens": 4}
    memory = {"gpu_pages": 16, "chunk_tokens": 16, "max_context_tokens": 33, "padded_batch": 2}
    memory |= {"padded_lengths": "32", "decode_backend": "auto" if insertion == "embed" else "xla"}
    options = {"dtype": "float32", "progress": "false", "compilation_cache_dir": compilation_cache}
    flags |= memory | options | {"system": system, "closed_loop": "true"}
    assert launch("benchmark_serving", shared_llm=False, **flags) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    (point,) = results["points"]
    assert point["num_requests"] == 10 and point["recomputed_tokens"] == 5 * (6 + 4 - 1)
    assert results["config"]["max_batch"] == 2 and results["config"]["lengths"] == [32]
    assert results["system"] == system + ("" if insertion == "embed" else ", xla")
    assert results["config"]["insertion"] == insertion
    assert (
        results["config"]["kv_bytes"] == 16 * 16 * 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    )


def test_memory_of_less_than_two_rows():
    with pytest.raises(ConfigError, match="--gpu_pages is 4, but must be at least 8, two rows"):
        rebatching_server.RebatchingSystem(
            "rebatching",
            "random:llama-tiny",
            TINY,
            "float32",
            CONFIG,
            max_batch=2,
            lengths=None,
            progress=False,
        )


# transformers


class Ids(list):
    """Fake tensor of one or two dimensions."""

    def reshape(self, size):
        assert size == -1
        return Ids([one for row in self for one in row] if self and isinstance(self[0], list) else self)

    def tolist(self):
        return list(self)


class Model:
    """Fake model that answers a row's step k with 10 * (its first id other than padding) + k."""

    def __init__(self):
        self.calls, self.error, self.gate = [], None, threading.Event()
        self.gate.set()
        self.device, self.config = "cpu", SimpleNamespace(_attn_implementation="sdpa")

    def eval(self):
        return self

    def generate(self, ids, *, attention_mask, generation_config, streamer):
        self.calls.append((ids, attention_mask, generation_config))
        if self.error is not None:
            raise self.error
        streamer.put(ids)
        firsts = [row[mask.index(1)] for row, mask in zip(ids, attention_mask, strict=True)]
        for step in range(generation_config.max_new_tokens):
            streamer.put(Ids(10 * first + step for first in firsts))
            self.gate.wait()
        streamer.end()


@pytest.fixture
def model(monkeypatch):
    model = Model()
    causal = SimpleNamespace(from_config=lambda *_, **options: model, from_pretrained=None)
    config = SimpleNamespace(for_model=lambda **values: values)
    named = {"AutoConfig": config, "AutoModelForCausalLM": causal, "GenerationConfig": SimpleNamespace}
    module(monkeypatch, "transformers", __version__="5.17", **named)

    class Device:
        def __init__(self, name):
            pass

        __enter__ = __exit__ = lambda self, *_: None

    cuda = SimpleNamespace(is_available=lambda: False)
    tensor = lambda values, device: Ids(values)  # noqa: E731
    module(monkeypatch, "torch", __version__="2.11", float32="f32", device=Device, cuda=cuda, tensor=tensor)
    return model


def static(max_batch=2):
    return static_server.StaticSystem(
        "random:llama-tiny", TINY, "float32", CONFIG, "paged|sdpa", max_batch=max_batch
    )


def turn(name, prompt, num_output, first_id):
    found = UserTurn(name, 0, 0.0, 0, len(prompt), num_output, True)
    found.token_ids = [first_id, *prompt[1:]]
    return found


def test_batches_are_padded_on_the_left_and_run_to_their_end(model):
    server = static().start(clock := serving_clock.RunClock())
    clock.start()
    model.calls.clear()
    for one in (turn("a", [0] * 3, 2, 5), turn("b", [0] * 5, 4, 6), turn("c", [0], 1, 7)):
        server.submit(one)
    answers = []
    while server.has_unfinished:
        answers += server.step(0.0)
    assert [answer.turn.conversation_id for answer in answers] == ["a", "b", "c"]
    (ids, mask, config), (second, _, _) = model.calls
    assert ids == [[0, 0, 5, 0, 0], [6, 0, 0, 0, 0]] and mask == [[0, 0, 1, 1, 1], [1] * 5]
    assert second == [[7]], "it waited for the batch before it"
    assert config.max_new_tokens == 4 and config.eos_token_id == -1 and config.do_sample is False
    assert server._transcripts.add("a", []) == [5, 0, 0, 50, 51]
    assert server._transcripts.add("b", [])[5:] == [60, 61, 62, 63]
    first, last = answers[0], answers[1]
    assert first.first_token_s == last.first_token_s <= first.end_s <= last.end_s


def test_the_benchmark_serves_static_batches(model, launch, capsys):
    """From the flags to the document, in an open loop of several load points."""
    flags = {"num_conversations": 50, "rates": "20", "seeds": "0,1", "max_client_lag_s": 1e6}
    times = {"mid_life_s": 0, "warm_up_s": 0.1, "window_s": 0.5, "drain_s": 5}
    memory = {"gpu_pages": 32, "chunk_tokens": 32, "max_context_tokens": 1024, "padded_batch": 2}
    flags |= times | memory | {"system": "transformers-static", "dtype": "float32", "progress": "false"}
    assert launch("benchmark_serving", shared_llm=False, **flags) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert results["system"] == "transformers-static" and results["max_padded_tokens"] == 1024
    assert [point["seed"] for point in results["points"]] == [0, 1]
    assert all(point["num_requests"] > 0 == point["num_unfinished"] for point in results["points"])
    assert sum(len(ids) for ids, *_ in model.calls) > 10


def test_an_answer_is_told_before_its_batch_has_ended(model):
    server = static().start(clock := serving_clock.RunClock())
    clock.start()
    model.gate.clear()
    server.submit(turn("a", [0], 1, 5))
    server.submit(turn("b", [0], 3, 6))
    answers = []
    while not answers:
        answers += server.step(0.0)
    assert [answer.turn.conversation_id for answer in answers] == ["a"] and server.num_unfinished == 1
    model.gate.set()
    while server.has_unfinished:
        server.step(0.0)


def test_memory_makes_batches_smaller(model):
    server = static(max_batch=8).start(clock := serving_clock.RunClock())  # of 128 tokens
    clock.start()
    model.calls.clear()
    for index in range(5):
        server.submit(turn(str(index), [0] * 30, 10, index + 1))
    while server.has_unfinished:
        server.step(0.0)
    assert [len(ids) for ids, *_ in model.calls] == [3, 2]


def test_conversations_go_on(model):
    run = serve(static(), session("a", 0.0, (5, 3), (4, 2), think_s=[0.0]), session("b", 0.0, (2, 1)))
    assert len(run.answers) == 3 and run.counters == {}
    last = next(answer.usage for answer in run.answers if answer.turn.turn_index == 1)
    assert (last.reused_gpu_tokens, last.recomputed_tokens, last.prefilled_tokens) == (0, 7, 5)


def test_a_batch_that_fails(model):
    server = static().start(clock := serving_clock.RunClock())
    clock.start()
    model.error = RuntimeError("out of memory")
    server.submit(turn("a", [0], 1, 5))
    with pytest.raises(stateless_baselines.BaselineError, match="transformers failed a batch: out of memory"):
        while server.has_unfinished:
            server.step(0.0)


def test_what_runs_is_given_up(model):
    system = static()
    server = system.start(clock := serving_clock.RunClock())
    clock.start()
    server.submit(turn("a", [0], 10**9, 5))
    server.step(0.0)
    system.close()
    assert server._batch._running.done()
