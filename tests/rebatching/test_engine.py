"""The engine and its front end on a tiny model: refusals, interrupts, and several devices."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random

import jax
import numpy as np
import pytest

from model_defs import LayerKind, UnsupportedModelError, abstract_model, make_mesh, preset
from pensieve_jax import (
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    SamplingParams,
    TokenizerMissingError,
)
from pensieve_jax.core.errors import PensieveError, StepFailedError
from pensieve_jax.rebatching import PaddedLLM, RebatchingConfig
from pensieve_jax.rebatching.device.runner import DeviceRunner
from pensieve_jax.rebatching.launches import Prefill
from tests.interruption import Interruption
from tests.rebatching.integrity import check_integrity
from tests.seeds import enough, new_seed

CONFIG = RebatchingConfig(max_batch=2, kv_bytes=2**18, lengths=(32, 64), prefill_batch=1, preemptive=True)
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    """Yield a tiny model; tests leave nothing running."""
    with PaddedLLM("random:llama-tiny", dtype="float32", config=CONFIG, progress=False) as one:
        yield one


def test_text_and_ids_are_answered_in_order(llm):
    """Greedy answers do not depend on other queries."""
    prompts = ["Hello", [5, 6, 7], "and then?", [9] * 40]
    together = llm.generate(prompts, GREEDY, priorities=[0, 3, -1, 0])
    alone = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    output = together[0]
    assert output.text == llm.tokenizer.decode(list(output.token_ids))
    usage = output.usage
    assert usage.prompt_tokens == usage.prefilled_tokens == len(llm.tokenizer.encode("Hello", add_bos=True))
    assert usage.output_tokens == 8 and output.finish_reason == "length"
    assert llm.generate([]) == []
    assert llm.stats()["num_compilations"] == 0


def test_prompts_have_the_priority_of_submitted_queries_without_one(llm, monkeypatch):
    """It is zero; with a lower one they would wait behind every query of `submit`."""
    submit_into, found = llm.engine.submit_into, []

    def submitted(handles, *rest):
        submit_into(handles, *rest)
        found.extend(query.priority for query in handles)

    monkeypatch.setattr(llm.engine, "submit_into", submitted)
    llm.generate([[5, 6], [7]], SamplingParams(max_tokens=1))
    llm.generate([[5, 6], [7]], SamplingParams(max_tokens=1), priorities=2)
    other = llm.engine.submit([8], SamplingParams(max_tokens=1))
    llm.engine.cancel(other)
    assert found == [0, 0, 2, 2, other.priority]


def test_stop_strings_end_a_reply(llm):
    whole = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=20, ignore_eos=True))[0]
    stop = whole.text[2:4]
    cut = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=20, ignore_eos=True, stop=[stop]))[0]
    assert cut.finish_reason == "stop" and cut.text == whole.text[: whole.text.index(stop)]
    assert cut.stop_string == stop and whole.stop_string is None


@pytest.mark.parametrize(
    ("error", "field", "call"),
    [
        (InvalidRequestError, "prompts", lambda llm: llm.generate("hi")),
        (InvalidRequestError, "prompts[1]", lambda llm: llm.generate(["hi", ""])),
        (InvalidRequestError, "max_tokens", lambda llm: llm.generate(["hi"], SamplingParams(max_tokens=0))),
        (
            InvalidRequestError,
            "prompt_logprobs",
            lambda llm: llm.generate(["hi"], SamplingParams(prompt_logprobs=0)),
        ),
        (InvalidRequestError, "prompts[1][0]", lambda llm: llm.generate([[1], [320]])),
        (InvalidRequestError, "prompt", lambda llm: llm.generate([[]])),
        (InvalidRequestError, "prompt", lambda llm: llm.engine.submit("text")),
        (InvalidRequestError, "prompt", lambda llm: llm.engine.submit(7)),
        (InvalidRequestError, "prompt", lambda llm: llm.engine.submit(np.array(5))),
        (InvalidRequestError, "prompt", lambda llm: llm.engine.submit({9, 2})),
        (InvalidRequestError, "params", lambda llm: llm.engine.submit_many([[1]], [], [])),
        (InvalidRequestError, "sampling_params", lambda llm: llm.engine.submit([1], {})),
        (InvalidRequestError, "sampling_params", lambda llm: llm.generate([[1]], [])),
        (InvalidRequestError, "priorities[1]", lambda llm: llm.generate([[1], [2]], priorities=[0, True])),
        (InvalidRequestError, "priorities", lambda llm: llm.generate([[1]], priorities=[1, 2])),
        (InvalidRequestError, "priority", lambda llm: llm.generate([[1]], priorities=[0.5])),
        (InvalidRequestError, "priority", lambda llm: llm.engine.submit([1], priority=True)),
        (InvalidRequestError, "sampling_params", lambda llm: llm.generate([[1], [2]], [GREEDY])),
        (InvalidRequestError, "logprobs", lambda llm: llm.generate([[1]], SamplingParams(logprobs=9))),
        (ContextLengthError, "prompt", lambda llm: llm.generate([[1] * 65])),
        (ContextLengthError, "prompts[1]", lambda llm: llm.generate([[1], [1] * 65])),
    ],
)
def test_invalid_queries_are_named_and_have_no_effect_on_others(llm, error, field, call):
    before = llm.engine.submit([4, 4], GREEDY)
    with pytest.raises(error) as caught:
        call(llm)
    assert caught.value.field == field
    while not before.done:
        llm.engine.step()
    assert before.result().token_ids == llm.generate([[4, 4]], GREEDY)[0].token_ids
    assert not llm.engine.has_unfinished


def test_the_error_of_one_query_carries_the_others_answers(llm, monkeypatch):
    runner = llm.engine._runner
    launch = runner.launch

    def fail(one: object) -> object:
        if isinstance(one, Prefill) and one.samples[0][0].prompt_token_ids == [7, 7]:
            raise StepFailedError("planted")
        return launch(one)

    monkeypatch.setattr(runner, "launch", fail)
    with pytest.raises(StepFailedError, match="planted") as caught:
        llm.generate([[5, 6, 7], [7, 7], [9] * 40], GREEDY)
    first, second, third = caught.value.outputs
    assert second is None
    expected = llm.generate([[5, 6, 7], [9] * 40], GREEDY)
    assert [one.token_ids for one in (first, third)] == [one.token_ids for one in expected]


def test_the_longest_query_ends_by_length(llm):
    """A prompt that leaves room for one token, and a reply that reaches the end of the longest row."""
    one, other = llm.generate([[3] * 64, [3] * 60], SamplingParams(max_tokens=50, ignore_eos=True))
    assert (len(one.token_ids), one.finish_reason) == (1, "length")
    assert (len(other.token_ids), other.finish_reason) == (5, "length")


def test_cancelled_queries_leave_at_once(llm):
    query = llm.engine.submit([1, 2], SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(3):
        llm.engine.step()
    assert llm.engine.cancel(query) and not llm.engine.cancel(query)
    assert query.result().finish_reason == "cancelled" and query.token_ids
    llm.engine.step()
    assert not llm.engine.has_unfinished and not llm.stats()["num_running"]


@pytest.mark.parametrize("number", [25, pytest.param(enough(150, 400), marks=pytest.mark.long)])
def test_after_an_interrupt_the_engine_continues(llm, number):
    """At random lines, every earlier query is done in some way, and the next answer is right."""
    rng = random.Random(new_seed())
    expected = llm.generate([[5, 6, 7]], GREEDY)[0].token_ids
    num_told = 0
    for _ in range(number):
        other = llm.engine.submit([4] * 3, SamplingParams(max_tokens=12, ignore_eos=True))
        with Interruption(rng.randrange(1, 4000)):
            try:
                llm.generate([[5, 6, 7], [8] * 40], GREEDY)
                llm.engine.cancel(other)
            except KeyboardInterrupt:
                num_told += 1
        assert llm.generate([[5, 6, 7]], GREEDY)[0].token_ids == expected
        check_integrity(llm.engine.loop, CONFIG, llm.engine._runner.ring_shapes)
        while not other.done:
            llm.engine.step()
        assert (other.output is None) == isinstance(other.error, PensieveError)
        assert not llm.engine.has_unfinished
    assert num_told > number / 3


@pytest.mark.parametrize("line", range(1, 40))
def test_an_interrupted_cancel_ends_the_query(llm, line):
    """At each of its lines, the query is done afterwards, with an output or an error, but not both."""
    query = llm.engine.submit([4] * 3, SamplingParams(max_tokens=40, ignore_eos=True))
    llm.engine.step()
    with Interruption(line), contextlib.suppress(KeyboardInterrupt):
        llm.engine.cancel(query)
    for _ in range(60):
        llm.engine.step()
    assert query.done and (query.output is None) != (query.error is None)


def test_a_cancelled_query_leaves_nothing_behind(llm):
    """Its row is forgotten at once, although no step follows; nothing of it counts twice as idle."""
    queries = llm.engine.submit_many([[4] * 3, [5] * 3, [6] * 3], [GREEDY] * 3, [0] * 3)
    llm.engine.step()
    before = llm.stats()
    for query in queries:
        llm.engine.cancel(query)
    assert not llm.engine._runner._rows
    llm.engine.step()
    after = llm.stats()
    assert after["idle_late"] - before["idle_late"] <= 2
    assert after["idle_row_share"] <= 1


def test_a_failing_observer_has_no_effect_on_queries(llm, monkeypatch):
    def raises(_: object) -> None:
        raise RuntimeError("planted")

    expected = llm.generate([[5, 6, 7]], GREEDY)[0].token_ids
    query = llm.engine.submit([5, 6, 7], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "_observe", raises)
        with pytest.raises(RuntimeError, match="planted"):
            llm.engine.step()
    while not query.done:
        llm.engine.step()
    assert query.result().token_ids == expected


def test_a_call_that_fails_leaves_no_query_behind(llm, monkeypatch):
    def raises() -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", raises)
        with pytest.raises(RuntimeError, match="planted"):
            llm.generate([[5, 6, 7], [8]], GREEDY)
    assert not llm.engine.has_unfinished


def test_a_query_without_a_priority_has_that_of_generate(llm):
    query = llm.engine.submit([5, 6, 7], GREEDY)
    llm.engine.cancel(query)
    assert query.priority == 0


def test_each_program_is_reported_as_it_is_compiled(llm, monkeypatch):
    """The report has its number and name; nothing is compiled here."""
    runner, calls = llm.engine._runner, []
    names = [job.name for job in runner.programs.jobs()]
    monkeypatch.setattr(
        "pensieve_jax.rebatching.device.runner.compile_all", lambda jobs, store: (job.name for job in jobs)
    )
    runner._compile(None, lambda *call: calls.append(call))
    assert calls == [(number, len(names), name) for number, name in enumerate(names, start=1)]


def test_a_rehearsal_waits_for_its_programs(llm, monkeypatch):
    """Their errors would otherwise appear in a later step."""
    runner, waited = llm.engine._runner, []
    shape = runner._shape
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    runner._rehearse()
    runner.reset(())
    if shape is not None:
        runner._resize(shape, None)  # the ring that the scheduler knows, which is empty
    assert len(waited) == len(runner.ring_shapes.shapes)


@pytest.mark.long
def test_two_devices_equal_one(llm):
    """Heads are split over the mesh; tokens are those of one device."""
    assert jax.device_count() >= 2
    prompts = [[5, 6, 7], [9] * 30, [3] * 12]
    changed = dataclasses.replace(CONFIG, kv_bytes=CONFIG.kv_bytes // 2, tensor_parallel_size=2)
    with PaddedLLM("random:llama-tiny", dtype="float32", config=changed, progress=False) as two:
        found = [output.token_ids for output in two.generate(prompts, GREEDY)]
        assert two.stats()["num_compilations"] == 0
    assert found == [output.token_ids for output in llm.generate(prompts, GREEDY)]


def test_a_closed_engine_refuses_calls_and_describes_itself(monkeypatch):
    """The description has a length for which the budget has no room; nothing is compiled for that."""
    monkeypatch.setattr(DeviceRunner, "warm_up", lambda self, progress=None: None)
    token_bytes = 2 * 2 * 2 * 32 * 4  # keys and values of two layers, two heads of 32, in float32
    config = dataclasses.replace(CONFIG, lengths=(32, 64, 96), kv_bytes=64 * 3 * token_bytes - 1)
    with PaddedLLM("random:llama-tiny", dtype="float32", config=config, progress=False) as llm:
        found = json.loads(json.dumps(llm.describe()))
        assert found["batch"]["shapes"] == ["2 x 32", "1 x 64"] and found["batch"]["unused_lengths"] == [96]
        assert found["batch"]["max_context_tokens"] == 65
        assert found["memory"]["token_bytes"] == token_bytes and found["model"]["name"] == "random:llama-tiny"
        assert found["kernels"]["decode"]["backend"] == "xla" and found["device"]["platform"] == "cpu"
        assert "2 x 32, 1 x 64" in str(llm.describe())
        query = llm.engine.submit([1, 2])
    with pytest.raises(EngineClosedError):
        query.result()
    for call in (
        lambda: llm.generate([[1]]),
        lambda: llm.engine.submit([1]),
        llm.engine.step,
        lambda: llm.engine.cancel(query),
    ):
        with pytest.raises(EngineClosedError):
            call()
    llm.close()


def test_an_unsupported_model_is_refused():
    """It is refused before anything is compiled."""
    with pytest.raises(ConfigError, match="RebatchingConfig"):
        PaddedLLM("random:llama-tiny", config={"max_batch": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_bytes"):
        PaddedLLM("random:llama-tiny", config=RebatchingConfig(kv_bytes=1000), progress=False)
    with pytest.raises(ConfigError, match="attention_backend"):
        backend = RebatchingConfig(attention_backend="pallas_mosaic_gpu")
        PaddedLLM("random:llama-tiny", config=backend, progress=False)
    model = abstract_model(preset("qwen3_moe-tiny"), dtype="auto", mesh=make_mesh(1))
    with pytest.raises(UnsupportedModelError, match=r"experts \(8, 3 chosen\) .* padded batches; use LLM"):
        DeviceRunner(model, CONFIG, make_mesh(1), np.dtype(np.float32))
    windowed = preset("llama-tiny", layer_kinds=(LayerKind(), LayerKind(window=16)))
    model = abstract_model(windowed, dtype="auto", mesh=make_mesh(1))
    with pytest.raises(UnsupportedModelError, match=r"window=16 is not .* padded batches; set .* at most 16"):
        DeviceRunner(model, RebatchingConfig(), make_mesh(1), "float32")


def test_a_model_without_a_tokenizer_takes_ids(llm, monkeypatch):
    monkeypatch.setattr(llm, "tokenizer", None)
    with pytest.raises(TokenizerMissingError):
        llm.generate(["hi"])
    ids = llm.generate([np.array([5, 6, 7])], GREEDY)[0].token_ids
    assert ids == llm.generate([[5, 6, 7]], GREEDY)[0].token_ids
