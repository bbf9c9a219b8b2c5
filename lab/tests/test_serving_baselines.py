"""The adapters for other servers, on fake modules."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lab.tests.serving_fakes import session, users
from model_defs import PRESETS, preset
from model_defs.hf_config import parse_hf_config
from pensieve_jax import CacheConfig, ConfigError, EngineConfig, SchedulerConfig
from pensieve_lab.workload import History, UserTurn
from tests.launching import load

stateless_baselines = load("pensieve_lab.serving.stateless_baselines")
serving_client = load("pensieve_lab.serving.client")
serving_clock = load("pensieve_lab.serving.clock")
serving_run = load("pensieve_lab.serving.run")
transformers_server = load("pensieve_lab.serving.transformers_server")
vllm_server = load("pensieve_lab.serving.vllm_server")

CONFIG = EngineConfig(
    cache=CacheConfig(gpu_pages=64, cpu_pages=32, chunk_tokens=32),
    scheduler=SchedulerConfig(max_num_running=8, max_num_batched_tokens=128),
)
TINY = preset("llama-tiny")


class Calls(list):
    """Recorder that makes functions, records their calls, and returns given answers."""

    def of(self, name, answer=None):
        def call(*args, **kwargs):
            self.append((name, args, kwargs))
            return answer(*args, **kwargs) if callable(answer) else answer

        return call

    def named(self, name):
        return [(args, kwargs) for found, args, kwargs in self if found == name]


def module(monkeypatch, name, **values):
    found = ModuleType(name)
    found.__dict__.update(values)
    monkeypatch.setitem(sys.modules, name, found)
    return found


def serve(system, *sessions):
    """Serve two turns of a conversation; returns their answers."""
    clock = serving_clock.RunClock()
    prompts = serving_client.Prompts(300, 0)
    server = system.start(clock)
    begun = [s for s in sessions if s.first_turn]
    server.remember(
        History(s.conversation.conversation_id, s.num_history_tokens, 0.0, [9] * s.num_history_tokens)
        for s in begun
    )
    client = serving_client.InlineClient(users(*sessions), prompts, clock)
    run = serving_run.serve(server, client, clock, serving_run.Window())
    assert not run.num_unfinished
    assert run.counters == {} and run.steps == {}
    return run


# transformers


class PagedCache:
    """Cache with the first 4 tokens of prompts of 9 and more; waiting requests are looked up repeatedly."""

    def search_prefix_match(self, request_id, prompt_ids):
        return 4 if len(prompt_ids) > 8 else 0


class Manager:
    """Manager that answers every request at once, with ids 7, 8, 9, ..."""

    def __init__(self, calls):
        self.calls, self.results, self.running, self.error = calls, [], False, None
        self.batch_processor = SimpleNamespace(cache=PagedCache())

    def warmup(self):
        self.calls.append(("warmup", (), {}))

    def start(self):
        self.running = True

    def is_running(self):
        return self.running

    def stop(self, *, block, timeout, hard_stop):
        assert block and timeout and hard_stop, "stop must not wait for unfinished requests"
        self.running = False

    def add_request(self, input_ids, *, request_id, max_new_tokens, eos_token_id, record_timestamps=False):
        self.calls.append(("add", (list(input_ids),), {"max_new_tokens": max_new_tokens}))
        assert eos_token_id == -1
        for prompt_ids in (input_ids[:1], input_ids, [*input_ids, *range(99)]):
            self.batch_processor.cache.search_prefix_match(request_id, prompt_ids)
        stamps = [transformers_now() for _ in range(max_new_tokens)] if record_timestamps else None
        self.results.append(
            SimpleNamespace(
                request_id=request_id,
                generated_tokens=list(range(7, 7 + max_new_tokens)),
                timestamps=stamps,
                error=self.error,
                is_finished=lambda: True,  # what failed is finished as well
            )
        )

    def get_result(self, *, timeout):
        assert timeout < 0.1
        return self.results.pop(0) if self.results else None


def transformers_now():
    return serving_clock.time.perf_counter()


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture
def manager(monkeypatch, calls):
    """Install a fake transformers; returns its manager."""
    manager = Manager(calls)
    shape = SimpleNamespace(_attn_implementation="paged|sdpa")
    model = SimpleNamespace(init_continuous_batching=calls.of("init", manager), config=shape)
    module(
        monkeypatch,
        "transformers",
        __version__="5.17",
        AutoConfig=SimpleNamespace(for_model=calls.of("for_model", lambda **values: values)),
        AutoModelForCausalLM=SimpleNamespace(
            from_config=calls.of("from_config", model), from_pretrained=calls.of("from_pretrained", model)
        ),
    )
    make = SimpleNamespace
    module(monkeypatch, "transformers.generation", GenerationConfig=make, ContinuousBatchingConfig=make)

    class Device:
        def __init__(self, name):
            calls.append(("device", (name,), {}))

        __enter__ = __exit__ = lambda self, *_: None

    cuda = SimpleNamespace(is_available=lambda: False)
    module(monkeypatch, "torch", __version__="2.11", bfloat16="bf16", device=Device, cuda=cuda)
    return manager


def test_transformers(manager, calls):
    system = transformers_server.TransformersSystem("random:llama-tiny", TINY, "bfloat16", CONFIG, "sdpa")
    ((shape, options),) = calls.named("from_config")
    assert shape[0]["num_key_value_heads"] == 2 and options == {
        "dtype": "bf16",
        "attn_implementation": "sdpa",
    }
    run = serve(system, session("a", 0.0, (5, 3), (4, 2), think_s=[0.0]))
    ((_, options),) = calls.named("init")
    batching = options["continuous_batching_config"]
    assert (batching.num_blocks * batching.block_size, batching.max_requests_per_batch) == (64 * 32, 8)
    assert batching.max_batch_tokens == 128 and options["generation_config"].eos_token_id == -1
    warm_up, first, second = calls.named("add")
    assert len(warm_up[0][0]) == 8 and len(first[0][0]) == 5
    assert second[0][0][:8] == [*first[0][0], 7, 8, 9] and len(second[0][0]) == 12, "the whole history"
    usages = [answer.usage for answer in run.answers]
    assert [usage.output_tokens for usage in usages] == [3, 2]
    assert usages[0].reused_gpu_tokens == 0 and usages[0].prefilled_tokens == 5
    assert (usages[1].reused_gpu_tokens, usages[1].recomputed_tokens, usages[1].prefilled_tokens) == (4, 3, 5)
    assert all(0 < a.first_token_s <= a.end_s for a in run.answers)
    described = system.describe()
    assert (described["transformers"], described["attention"]) == ("5.17", "paged|sdpa")
    assert system.device_name() == "cpu"
    system.close()
    assert not manager.running


def test_transformers_from_a_directory_in_mid_life(manager, calls, tmp_path):
    system = transformers_server.TransformersSystem(str(tmp_path), TINY, "bfloat16", CONFIG, "eager")
    assert calls.named("from_pretrained")[0][0] == (str(tmp_path),)
    run = serve(system, session("a", 0.0, (5, 3), (4, 2), think_s=[1.0], first_turn=1))
    _, history, turn = calls.named("add")
    assert history == (([9] * 8,), {"max_new_tokens": 1}), "read once, before the run"
    assert turn[0][0][:8] == [9] * 8 and len(run.answers) == 1


def test_transformers_fails(manager):
    system = transformers_server.TransformersSystem("random:llama-tiny", TINY, "bfloat16", CONFIG, "sdpa")
    server = system.start(serving_clock.RunClock())
    turn = UserTurn("a", 0, 0.0, 0, 2, 3, True)
    manager.error = "out of memory"
    turn.token_ids = [1, 2]
    server.submit(turn)
    with pytest.raises(stateless_baselines.BaselineError, match="out of memory"):
        server.step(0.0)
    manager.running = False
    with pytest.raises(stateless_baselines.BaselineError, match="ended before its time"):
        server.step(0.0)
    manager.start = lambda: None
    with pytest.raises(stateless_baselines.BaselineError, match="warming up"):
        manager.get_result = lambda **_: None
        system.start(serving_clock.RunClock())


# vLLM


class VllmEngine:
    """Engine that gives every request a token per step, and has cached all but the last block of 16
    tokens."""

    def __init__(self, calls):
        self.calls, self.running = calls, {}
        self.resets = iter(())  # what the next calls of it return; True behind them

    def reset_prefix_cache(self, **options):
        self.calls.append(("reset", (), options))
        return next(self.resets, True)

    def add_request(self, request_id, prompt, params):
        self.calls.append(("add", (prompt["prompt_token_ids"],), vars(params)))
        self.running[request_id] = [len(prompt["prompt_token_ids"]), params.max_tokens]

    def has_unfinished_requests(self):
        return bool(self.running)

    def abort_request(self, request_ids):
        for request_id in request_ids:
            del self.running[request_id]

    def step(self):
        outputs = []
        for request_id, state in list(self.running.items()):
            state[1] -= 1
            if not state[1]:
                del self.running[request_id]
            ids = SimpleNamespace(token_ids=[7])
            found = max(state[0] // 16 - 1, 0) * 16
            outputs.append(
                SimpleNamespace(
                    request_id=request_id, outputs=[ids], finished=not state[1], num_cached_tokens=found
                )
            )
        return outputs


@pytest.fixture
def vllm(monkeypatch, calls):
    engine = VllmEngine(calls)
    module(
        monkeypatch,
        "vllm",
        __version__="0.26",
        EngineArgs=calls.of("args", lambda **options: options),
        LLMEngine=SimpleNamespace(from_engine_args=calls.of("engine", engine)),
        SamplingParams=SimpleNamespace,
    )
    module(monkeypatch, "vllm.sampling_params", RequestOutputKind=SimpleNamespace(DELTA="delta"))
    module(monkeypatch, "vllm.config", KVTransferConfig=SimpleNamespace)
    cuda = SimpleNamespace(get_device_name=lambda _: "a GPU")
    module(monkeypatch, "torch", __version__="2.11", cuda=cuda)
    return engine


def test_vllm(vllm, calls):
    system = vllm_server.VllmSystem("vllm", "random:llama-tiny", TINY, "bfloat16", CONFIG)
    ((_, options),) = calls.named("args")
    assert (options["block_size"], options["num_gpu_blocks_override"]) == (32, 64)
    assert options["enable_prefix_caching"] and options["load_format"] == "dummy"
    assert "kv_offloading_size" not in options and options["max_model_len"] == 2048
    begun = session("b", 0.0, (30, 20), (4, 2), think_s=[1.0], first_turn=1)
    run = serve(system, session("a", 0.0, (40, 3), (4, 2), think_s=[0.0]), begun)
    adds = calls.named("add")
    assert [len(args[0]) for args, _ in adds] == [50, 40, 54, 47], "whole histories, b's before the run"
    assert [params["max_tokens"] for _, params in adds] == [1, 3, 2, 2]
    params = adds[0][1]
    assert params["ignore_eos"] and params["temperature"] == 0 and params["output_kind"] == "delta"
    found = {(a.turn.conversation_id, a.turn.turn_index): a.usage for a in run.answers}
    assert found["b", 1].reused_gpu_tokens == 32 and found["b", 1].recomputed_tokens == 17
    assert found["a", 1].reused_gpu_tokens == 16 and found["a", 1].prefilled_tokens == 5
    assert calls.named("reset") == [((), {"reset_running_requests": False, "reset_connector": False})]
    assert system.device_name() == "cuda: a GPU"
    assert (system.describe()["vllm"], system.describe()["torch"]) == ("0.26", "2.11")


def test_vllm_without_a_cache_and_with_host_memory(vllm, calls):
    vllm_server.VllmSystem("vllm-no-prefix", "random:llama-tiny", TINY, "bfloat16", CONFIG)
    system = vllm_server.VllmSystem("vllm-offload", "/model", TINY, "bfloat16", CONFIG)
    (_, plain), (_, offload) = calls.named("args")
    assert not plain["enable_prefix_caching"] and offload["model"] == "/model"
    page_bytes = 2 * 32 * 2 * 2 * 32 * 2  # layers, tokens, K and V, heads, width, bytes
    # As many bytes as our engine uses for this many packed chunks: 50 rows for 64.
    assert offload["kv_offloading_size"] * 2**30 == 32 * page_bytes * 50 // 64
    server = system.start(serving_clock.RunClock())
    server.submit(UserTurn("a", 0, 0.0, 0, 2, 3, True, [1, 2]))
    system.start(serving_clock.RunClock())
    assert not vllm.running, "the load point before was given up"
    with pytest.raises(ConfigError, match="--cpu_bytes"):
        without = EngineConfig(cache=CacheConfig(gpu_pages=64))
        vllm_server.VllmSystem("vllm-offload", "/model", TINY, "bfloat16", without)


@pytest.mark.parametrize("prompt_only", [False, True])
def test_what_vllm_offloads(vllm, calls, prompt_only):
    """The setting reaches the engine and the document, and the engine gets its own copy."""
    system = vllm_server.VllmSystem(
        "vllm-offload", "/model", TINY, "bfloat16", CONFIG, offload_prompt_only=prompt_only
    )
    ((_, options),) = calls.named("args")
    given = options["kv_transfer_config"]
    assert (given.kv_connector, given.kv_role) == ("OffloadingConnector", "kv_both")
    assert given.kv_connector_extra_config == {"offload_prompt_only": prompt_only}
    given.kv_connector_extra_config["cpu_bytes_to_use"] = 1
    told = system.describe()["options"]["kv_transfer_config"]
    assert told["kv_connector_extra_config"] == {"offload_prompt_only": prompt_only}
    assert json.loads(json.dumps(told)) == told
    assert system.label == ("vllm-offload, prompts only" if prompt_only else "vllm-offload")


def test_vllm_empties_host_memory_between_load_points(vllm, calls, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(vllm_server.time, "sleep", pauses.append)
    system = vllm_server.VllmSystem("vllm-offload", "/model", TINY, "bfloat16", CONFIG)
    vllm.resets = iter([False])
    system.start(serving_clock.RunClock())
    assert len(calls.named("reset")) == 1 and not pauses, "nothing was cached before the first load point"
    vllm.resets = iter([False, False, True])
    system.start(serving_clock.RunClock())
    resets = calls.named("reset")[1:]
    assert [options["reset_connector"] for _, options in resets] == [True] * 3 and len(pauses) == 2
    vllm.resets = itertools.repeat(False)
    with pytest.raises(stateless_baselines.BaselineError, match="did not empty its caches"):
        system.start(serving_clock.RunClock())


def test_vllm_with_pages_in_8_bits(vllm, calls):
    def options(kv_dtype: str | None) -> dict[str, Any]:
        cache = dataclasses.replace(CONFIG.cache, kv_dtype=kv_dtype)
        config = dataclasses.replace(CONFIG, cache=cache)
        vllm_server.VllmSystem("vllm", "/model", TINY, "bfloat16", config)
        return calls.named("args")[-1][1]

    assert options(None)["kv_cache_dtype"] == "auto"
    assert options("float8_e4m3fn")["kv_cache_dtype"] == "fp8"
    with pytest.raises(ConfigError, match="--kv_dtype"):
        options("int8")


# Both


def test_an_answer_of_another_length():
    with pytest.raises(stateless_baselines.BaselineError, match="2 output tokens; it must have 3"):
        stateless_baselines.check_length(UserTurn("a", 0, 0.0, 0, 2, 3, True), [1, 2])


def test_where_tokens_came_from():
    first = stateless_baselines.usage(UserTurn("a", 0, 0.0, 0, 20, 3, False), num_found=16)
    assert (first.reused_gpu_tokens, first.recomputed_tokens, first.prefilled_tokens) == (0, 0, 20)
    second = stateless_baselines.usage(UserTurn("a", 1, 0.0, 23, 20, 3, True), num_found=16)
    assert (second.reused_gpu_tokens, second.recomputed_tokens, second.prefilled_tokens) == (16, 6, 21)


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"opt-tiny"}))
def test_presets_as_hugging_face_describes_them(name):
    config = PRESETS[name]
    read = parse_hf_config(stateless_baselines.hf_config(config, config.dtype))
    ours = {"initializer_range", "initial_norm_scale"}  # of random weights
    fields = vars(config).keys() - ours
    assert {field: getattr(read, field) for field in fields} == {f: getattr(config, f) for f in fields}


def test_shapes_that_no_preset_has():
    for odd in (preset("opt-tiny"), preset("qwen3-8b", mlp_bias=True)):
        with pytest.raises(ConfigError, match="--model"):
            stateless_baselines.hf_config(odd, "float32")
