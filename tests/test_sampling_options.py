"""Sampling options through `LLM`, on a tiny model whose ids are bytes, against the dense reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from model_defs import load_model, make_mesh
from pensieve_jax import (
    LLM,
    CacheConfig,
    EngineConfig,
    InvalidRequestError,
    RunnerConfig,
    SamplingParams,
    SchedulerConfig,
)
from pensieve_jax.device.dense_reference import DenseReference
from pensieve_jax.engine.late_rows import JoinedRows
from pensieve_jax.engine.option_rows import option_rows

LETTERS = tuple(range(ord("a"), ord("k")))
PROMPT = [ord(letter) for letter in "a beaded facade "]
OPTIONS: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "presence_penalty": {"presence_penalty": 1.5},
    "logit_bias": {"logit_bias": {ord("a"): -100, ord("b"): 1.5}},
    "allowed_token_ids": {"allowed_token_ids": LETTERS[:3]},
    "bad_words": {"bad_words": ("ab", "cde", "d")},
    "everything": {
        **{"min_p": 0.01, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.5},
        **{"logit_bias": {ord("c"): 0.5}, "bad_words": ("ba", "eee")},
    },
}


def config(num_devices: int = 1, **runner: Any) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(gpu_pages=24, chunk_tokens=16),
        scheduler=SchedulerConfig(max_num_running=4, max_num_batched_tokens=64, token_buckets=(64,)),
        runner=RunnerConfig(tensor_parallel_size=num_devices, **runner),
    )


def params_of(name: str, temperature: float = 1.5) -> SamplingParams:
    options = {"allowed_token_ids": LETTERS} | OPTIONS[name]
    return SamplingParams(max_tokens=40, temperature=temperature, seed=5, **options)


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.long), 2])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("random:llama-tiny", config=config(request.param), progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference() -> DenseReference:
    model = load_model("random:llama-tiny", dtype="float32", mesh=make_mesh(1), seed=0)
    return DenseReference(model, min_padded_tokens=128, min_padded_outputs=64)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_follows_the_dense_reference(llm: LLM, reference: DenseReference, name: str) -> None:
    """Also beside other turns and alone, on one device and on two, and nothing is compiled for it."""
    for temperature in (0.0, 1.5):
        params = params_of(name, temperature)
        num_compilations = llm.stats()["num_compilations"]
        (output,) = llm.generate([PROMPT], params)
        plain = SamplingParams(max_tokens=40, temperature=temperature, seed=5, allowed_token_ids=LETTERS)
        company = llm.generate([PROMPT[2:], PROMPT, PROMPT], [plain, params, plain])
        assert llm.stats()["num_compilations"] == num_compilations
        assert company[1].token_ids == output.token_ids
        assert temperature == 0 or company[2].token_ids != output.token_ids, "the option has no effect"
        assert set(output.token_ids) <= set(params.allowed_token_ids or ())
        rows = option_rows(params, llm.tokenizer, 320, ())
        replay = reference.replay_turn([], PROMPT, output.token_ids, params, 5, row=JoinedRows(rows))
        assert replay.possible.all()
        for word in params.bad_words:
            assert word not in output.text


def test_log_probabilities_are_those_of_the_model(llm: LLM, reference: DenseReference) -> None:
    """Twenty alternatives by default; options change none of them."""
    params = SamplingParams(max_tokens=5, logprobs=20, allowed_token_ids=LETTERS, frequency_penalty=2.0)
    (output,) = llm.generate([PROMPT], params)
    replay = reference.replay_turn([], PROMPT, output.token_ids, params)
    assert output.logprobs is not None
    for entry, logprob in zip(output.logprobs, replay.logprobs, strict=True):
        assert entry.logprob == pytest.approx(logprob, abs=1e-4)
        assert len(entry.top) == 20 and list(entry.top.values()) == sorted(entry.top.values(), reverse=True)


def test_text_ends_behind_the_stop_string_if_wanted(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, temperature=1.5, seed=5, allowed_token_ids=LETTERS)
    (whole,) = llm.generate([PROMPT], params)
    stop = whole.text[10:13]
    end = whole.text.index(stop)
    for includes, expected in ((False, whole.text[:end]), (True, whole.text[: end + 3])):
        wanted = SamplingParams(
            max_tokens=60,
            temperature=1.5,
            seed=5,
            allowed_token_ids=LETTERS,
            stop=[stop],
            include_stop_str_in_output=includes,
        )
        (output,) = llm.generate([PROMPT], wanted)
        assert (output.text, output.finish_reason) == (expected, "stop")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"allowed_token_ids": [97, 320]}, r"allowed_token_ids\[1\] is 320"),
        ({"allowed_token_ids": [97, 98], "bad_words": ["a", "b"]}, "allowed_token_ids is"),
        ({"allowed_token_ids": [97, 261], "stop_token_ids": [97], "min_tokens": 1}, "allowed_token_ids is"),
        ({"allowed_token_ids": [98], "bad_words": ["ab"]}, "allowed_token_ids is"),
        ({"logit_bias": {320: 1.0}}, "logit_bias is 320"),
        ({"logprobs": 21}, "logprobs is 21"),
    ],
)
def test_options_that_a_model_cannot_serve_are_refused(llm: LLM, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        llm.generate([PROMPT], SamplingParams(**options))


def test_an_engine_without_counts_refuses_penalties() -> None:
    with LLM("random:llama-tiny", config=config(penalties=False), progress=False) as llm:
        with pytest.raises(InvalidRequestError, match=r"presence_penalty is 1.0.*set runner\.penalties"):
            llm.generate([PROMPT], SamplingParams(presence_penalty=1.0))
        (output,) = llm.generate([PROMPT], params_of("bad_words"))
        assert not set(output.text) & {"d"}
