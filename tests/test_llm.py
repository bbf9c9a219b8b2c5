"""The public API, on a tiny random model with a byte tokenizer."""

from __future__ import annotations

import contextlib
import gc
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub.utils import filter_repo_objects

import pensieve_jax
from pensieve_jax import (
    LLM,
    CacheConfig,
    ConfigError,
    ContextLengthError,
    ConversationBusyError,
    EngineClosedError,
    EngineConfig,
    InvalidRequestError,
    LogitsError,
    RunnerConfig,
    SamplingParams,
    SchedulerConfig,
    UnknownConversationError,
    assembly,
    model_source,
)
from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.device.dense_reference import DenseReference
from pensieve_jax.model_source import DEFAULT_MODEL, resolve_model
from pensieve_jax.scheduler import SchedulerOutput
from tests.launching import ROOT

BOS, END = 256, 261
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def clock() -> VirtualClock:
    return VirtualClock(1000.0)


@pytest.fixture(scope="module")
def llm(clock: VirtualClock) -> Iterator[LLM]:
    config = EngineConfig(
        cache=CacheConfig(gpu_pages=24, chunk_tokens=16, idle_ttl_s=1000.0),
        scheduler=SchedulerConfig(max_num_running=4, max_num_batched_tokens=64, token_buckets=(64,)),
        runner=RunnerConfig(max_logprobs=3),
    )
    with LLM("random:llama-tiny", config=config, progress=False, clock=clock) as llm:
        yield llm


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_end_their_turn_only(llm: LLM, value: float) -> None:
    """One token has an embedding that is not finite; the pages that it spoils are used again."""
    prompts = [[9, 8, 77, 7], [1, 2, 3]]
    params = replace(SHORT, seed=1)
    _, expected = llm.generate(prompts, params)
    programs = llm.engine._runner._programs  # type: ignore[attr-defined]
    before = programs.front
    programs.front = [before[0].at[77].set(value)]
    try:
        with pytest.raises(LogitsError) as caught:
            llm.generate(prompts, params)
    finally:
        programs.front = before
    assert caught.value.outputs == [None, expected] and caught.value.num_tokens == 0
    assert llm.generate(prompts, params)[1] == expected
    assert llm.stats()["num_logits_errors"] >= 1


def prompt_of(llm: LLM, conversation_id: str, turn: int = 0) -> tuple[int, ...]:
    return llm.history(conversation_id).turns[turn].prompt_token_ids


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 2, 5)]
    outputs = llm.generate(["a", [15, 27, 3], np.array([5, 6])], params, conversation_ids=["x", None, "y"])
    assert [len(output.token_ids) for output in outputs] == [9, 2, 5]
    assert [output.conversation_id for output in outputs] == ["x", None, "y"]
    assert prompt_of(llm, "x") == (BOS, ord("a")) and prompt_of(llm, "y") == (5, 6)


def test_the_beginning_token_is_at_the_start_only(llm: LLM, clock: VirtualClock) -> None:
    for _ in range(2):
        llm.generate(["hi"], SHORT, conversation_ids=["bos"])
    assert prompt_of(llm, "bos", 0) == (BOS, *b"hi") and prompt_of(llm, "bos", 1) == tuple(b"hi")
    clock.advance(2000.0)  # it expires: what follows is a new conversation, in text and in chat
    llm.generate(["hi"], SHORT, conversation_ids=["bos"])
    assert prompt_of(llm, "bos", 0) == (BOS, *b"hi")
    llm.chat([{"role": "user", "content": "hi"}], SHORT, conversation_id="chat")
    first = prompt_of(llm, "chat")
    assert first[0] == BOS and END in first
    clock.advance(2000.0)
    llm.chat([{"role": "user", "content": "hi"}], SHORT, conversation_id="chat")
    assert prompt_of(llm, "chat") == first and len(llm.history("chat").turns) == 1


def test_a_chat_turn_closes_a_truncated_reply(llm: LLM) -> None:
    for _ in range(2):
        llm.chat([{"role": "user", "content": "hi"}], SHORT, conversation_id="cut")
    assert prompt_of(llm, "cut", 1)[0] == END


def test_logprobs_equal_the_dense_reference(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=6.0, seed=5, logprobs=2, ignore_eos=True)
    output = llm.generate([[9, 8, 7]], params)[0]
    assert output.logprobs is not None
    replay = DenseReference(_model(llm)).replay_turn([], [9, 8, 7], output.token_ids, params, seed=5)
    assert tuple(replay.token_ids.tolist()) == output.token_ids
    np.testing.assert_allclose([one.logprob for one in output.logprobs], replay.logprobs, atol=1e-4)
    assert all(len(one.top) == 2 and max(one.top.values()) >= one.logprob for one in output.logprobs)


def test_a_prompt_of_text_is_scored_as_by_the_dense_reference(llm: LLM) -> None:
    """Without a history and with one, whose KV cache is reused, in steps of 64 tokens."""
    name = "scored"
    params = SamplingParams(max_tokens=0, prompt_logprobs=3)
    prompts = ["The sky is blue, and the grass is green. " * 2, "What colour is the sky? " * 4]
    history: list[int] = []
    for turn, prompt in enumerate(prompts):
        (output,) = llm.generate([prompt], params, conversation_ids=[name])
        token_ids = list(prompt_of(llm, name, turn))
        assert output.prompt_logprobs is not None and output.text == "" and not output.token_ids
        assert output.usage.reused_gpu_tokens == max(len(history) - 1, 0)
        entries = [entry for entry in output.prompt_logprobs if entry is not None]
        expected = DenseReference(_model(llm)).score_prompt(history, token_ids, 3)
        assert [entry.token_id for entry in entries] == token_ids[0 if history else 1 :]
        np.testing.assert_allclose([entry.logprob for entry in entries], expected.logprobs, atol=1e-4)
        assert [entry.rank for entry in entries] == expected.ranks.tolist()
        assert [list(entry.top) for entry in entries] == expected.top_ids.tolist()
        history += token_ids


def test_a_chat_goes_on_after_a_turn_without_a_reply(llm: LLM) -> None:
    """The reply is empty, as one that was cut by its length; the template then writes its end."""
    said = [{"role": "user", "content": "hi"}]
    (first,) = [llm.chat(said, SamplingParams(max_tokens=0), conversation_id="silent")]
    second = llm.chat(said, SHORT, conversation_id="silent")
    assert (first.text, second.usage.output_tokens) == ("", 4)
    assert prompt_of(llm, "silent", 1)[0] == END


def test_the_example_of_the_page_about_prompts_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "prompt_logprobs.md").read_text(encoding="utf-8")
    (piece,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.setattr(pensieve_jax, "LLM", lambda: contextlib.nullcontext(llm))
    exec(compile(piece, "prompt_logprobs.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == len("The sky is blue.")


def _model(llm: LLM) -> Any:
    from model_defs import load_model, make_mesh

    return load_model("random:llama-tiny", dtype="float32", mesh=make_mesh(1))


BAD_CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "an empty turn": (lambda llm: llm.generate([""]), InvalidRequestError, "prompt"),
    "no ids": (lambda llm: llm.generate([[]]), InvalidRequestError, "prompt"),
    "bytes": (lambda llm: llm.generate([b"abc"]), InvalidRequestError, "prompt"),
    "a string of prompts": (lambda llm: llm.generate("abc"), InvalidRequestError, "prompts"),
    "no prompts": (lambda llm: llm.generate(5), InvalidRequestError, "prompts"),
    "too long": (lambda llm: llm.generate([[1] * 384]), ContextLengthError, "383"),
    "outside the vocabulary": (lambda llm: llm.generate([[1, 320]]), InvalidRequestError, "319"),
    "parameters of another kind": (
        lambda llm: llm.stream("a", {"top_k": 1}),
        InvalidRequestError,
        "sampling_",
    ),
    "a dict for all": (
        lambda llm: llm.generate(["a"], {"max_tokens": 5}),
        InvalidRequestError,
        "sampling_params is .*, but must be one SamplingParams for all, or a list of 1",
    ),
    "a string of ids": (
        lambda llm: llm.generate(["a"], conversation_ids="a"),
        InvalidRequestError,
        "conversation_ids is 'a', but must be a list of 1",
    ),
    "logprobs below none": (
        lambda llm: llm.generate(["a"], SamplingParams(logprobs=-1)),
        InvalidRequestError,
        "logprobs is -1, .*max_logprobs",
    ),
    "none for one": (lambda llm: llm.generate(["a"], [None]), InvalidRequestError, "sampling_params"),
    "too few parameters": (lambda llm: llm.generate(["a", "b"], [SHORT]), InvalidRequestError, "sampling_"),
    "too many logprobs": (
        lambda llm: llm.generate(["a"], SamplingParams(logprobs=4)),
        InvalidRequestError,
        "3",
    ),
    "a surrogate id": (lambda llm: llm.history("\ud800"), InvalidRequestError, "conversation_id"),
    "a list for an id": (lambda llm: llm.truncate(["t"], 1), InvalidRequestError, "conversation_id"),
    "an unknown conversation": (lambda llm: llm.end("nobody"), UnknownConversationError, "nobody"),
    "one id twice": (
        lambda llm: llm.generate(["a", "b"], SHORT, conversation_ids=["i", "i"]),
        ConversationBusyError,
        "once",
    ),
    "a prefix that is text": (
        lambda llm: llm.generate(["a"], prefix="p"),
        InvalidRequestError,
        "share_prefix",
    ),
    "a prefix of no text": (lambda llm: llm.share_prefix(""), InvalidRequestError, "^prefix"),
    "a prefix of another kind": (lambda llm: llm.share_prefix(5), InvalidRequestError, "^prefix"),
    "an empty prefix": (lambda llm: llm.share_prefix([]), InvalidRequestError, "prefix"),
    "a prefix of strange ids": (lambda llm: llm.share_prefix([3, 10**6]), InvalidRequestError, "prefix"),
    "a long prefix": (lambda llm: llm.share_prefix([5] * 5000), ContextLengthError, "prefix"),
    "a late prefix": (
        lambda llm: [llm.generate(["a"], SHORT, conversation_ids=["late"], prefix=p) for p in prefixes(llm)],
        InvalidRequestError,
        "first turn",
    ),
    "a message without a role": (lambda llm: llm.chat([{"content": "a"}]), InvalidRequestError, "role"),
}


def prefixes(llm: LLM) -> Iterator[SharedPrefix | None]:
    """Yield a prefix for a first turn, and one for a second turn, which may have none."""
    yield None
    yield llm.share_prefix("p")


@pytest.mark.parametrize("name", BAD_CALLS)
def test_invalid_calls_are_typed_errors_without_effect_on_others(llm: LLM, name: str) -> None:
    call, kind, words = BAD_CALLS[name]
    stream = llm.stream([1, 2, 3], SHORT)
    with pytest.raises(kind, match=words):
        call(llm)
    assert sum(len(delta.token_ids) for delta in stream) == 4


def test_a_fork_answers_as_a_conversation_with_the_same_history(llm: LLM) -> None:
    """Forks all of a conversation, and the beginning of one: each continues separately."""
    llm.generate(["once upon a time"], SHORT, conversation_ids=["tale"])
    whole = llm.history("tale").token_ids.tolist()
    llm.fork("tale", "other")
    llm.fork("tale", "beginning", 9)
    outputs = llm.generate(["there"] * 2, SHORT, conversation_ids=["tale", "other"])
    (told,) = llm.generate([whole[:9]], SamplingParams(max_tokens=1), conversation_ids=["told"])
    llm.truncate("told", 9)
    outputs += llm.generate(["there"] * 2, SHORT, conversation_ids=["beginning", "told"])
    assert outputs[0].token_ids == outputs[1].token_ids and outputs[2].token_ids == outputs[3].token_ids
    assert len(told.token_ids) == 1
    histories = {name: llm.history(name) for name in ("tale", "other", "beginning", "told")}
    assert histories["tale"].turns[0].turn_id == histories["other"].turns[0].turn_id
    assert histories["beginning"].token_ids.tolist() == histories["told"].token_ids.tolist()
    with pytest.raises(InvalidRequestError, match="new_conversation_id"):
        llm.fork("tale", "other")
    for name in histories:
        llm.end(name)


def test_a_second_turn_while_one_runs_is_busy(llm: LLM) -> None:
    with llm.stream("a", SHORT, conversation_id="busy"):
        for call in (
            lambda: llm.generate(["b"], SHORT, conversation_ids=["busy"]),
            lambda: llm.truncate("busy", 0),
            lambda: llm.end("busy"),
        ):
            with pytest.raises(ConversationBusyError):
                call()
    with pytest.raises(UnknownConversationError):
        llm.history("busy")


def test_a_closed_stream_yields_nothing_more(llm: LLM) -> None:
    stream = llm.stream("a", SHORT, conversation_id="closed")
    llm.generate(["b"], SHORT)
    stream.close()
    assert list(stream) == []


def test_a_stream_that_is_garbage_collected_during_a_step_has_no_effect_on_others(
    llm: LLM, monkeypatch: Any
) -> None:
    dropped = llm.stream("a", SamplingParams(max_tokens=50, ignore_eos=True), conversation_id="dropped")
    holder = [dropped]
    del dropped

    def collect(output: SchedulerOutput) -> None:
        holder.clear()
        gc.collect()

    monkeypatch.setattr(llm.engine, "_observe", collect)
    assert len(llm.generate(["b"], SHORT)[0].token_ids) == 4
    with pytest.raises(UnknownConversationError):
        llm.history("dropped")
    assert llm.stats()["num_turns_failed"] == llm.stats()["num_logits_errors"]


def test_a_shared_prefix_is_computed_once(llm: LLM) -> None:
    """All users share the full chunks; the reply is that of the whole text."""
    text = "You are a helpful assistant, and you answer in riddles only. "
    prefix = llm.share_prefix(text)
    alone = llm.generate([text + "hello"], SHORT, conversation_ids=["alone"])[0]
    first, second = llm.generate(["hello"] * 2, SHORT, conversation_ids=["p1", "p2"], prefix=prefix)
    third = llm.generate(["hello"], SHORT, prefix=prefix)[0]
    assert first.token_ids == second.token_ids == third.token_ids == alone.token_ids
    assert prompt_of(llm, "p1") == prompt_of(llm, "alone") and prompt_of(llm, "p1")[0] == BOS
    num_shared = len(prefix.token_ids) // 16 * 16
    assert [one.usage.reused_gpu_tokens for one in (first, second, third)] == [0, num_shared, num_shared]
    assert llm.stats()["num_shared_prefixes"] >= 1
    again = llm.generate(["more"], SHORT, conversation_ids=["p1"])[0]
    assert again.usage.reused_gpu_tokens == len(first.token_ids) + len(prompt_of(llm, "p1")) - 1


def test_chats_share_a_system_message(llm: LLM) -> None:
    """After its release the conversations that began with it continue."""
    system, hi = (
        {"role": "system", "content": "You answer in riddles only."},
        {"role": "user", "content": "hi"},
    )
    whole = llm.chat([system, hi], SHORT, conversation_id="s0")
    prefix = llm.share_prefix([system])
    outputs = llm.chat([[hi], [hi]], SHORT, conversation_ids=["s1", "s2"], prefix=prefix)
    assert [output.token_ids for output in outputs] == [whole.token_ids] * 2
    assert outputs[1].usage.reused_gpu_tokens == 16
    llm.release_prefix(prefix)
    ids = [llm.chat([hi], SHORT, conversation_id=name).token_ids for name in ("s0", "s1", "s2")]
    assert ids[1:] == [ids[0]] * 2
    for name in ("s0", "s1", "s2"):
        llm.end(name)
    llm.engine.check_integrity()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"config": CacheConfig()}, "EngineConfig"),
        ({"config": {}}, "EngineConfig"),
        ({"model": 5}, "model"),
        ({"model": ""}, "model is ''"),
        ({"history": 5, "model": "random:llama-tiny"}, "history is 5"),
        (
            {
                "model": "random:llama-tiny",
                "config": EngineConfig(runner=RunnerConfig(tensor_parallel_size=9)),
                "history": "no/such/directory/x",
            },
            r"runner\.tensor_parallel_size is 9, but must be at most 4",
        ),
        (
            {"model": "random:llama-tiny", "config": EngineConfig(cache=CacheConfig(cpu_bytes=10**17))},
            r"cache\.cpu_bytes is 1000\d+, but must be at most [\d,]+ bytes \([\d,]+ pages\): .*; lower it,",
        ),
        ({"model": "./no/such/directory"}, "no such directory"),
        ({"model": "path/to/hf-model"}, "no such directory, and it is not a valid hub name"),
        ({"config": EngineConfig(scheduler=SchedulerConfig(max_context_tokens=4096))}, "positions"),
    ],
)
def test_an_invalid_start_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(**arguments, progress=False)


@pytest.mark.parametrize(("name", "words"), [("m.gguf", "GGUF is not"), ("m.safetensors", "a file")])
def test_a_file_in_place_of_a_directory_is_refused(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=words):
        resolve_model(tmp_path / name)


def test_an_error_of_the_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError("404 Client Error.\n\nRepository Not Found for url: x.\nIs it private?.")

    monkeypatch.setattr(model_source.huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError) as caught:
        resolve_model("org/model")
    message = str(caught.value)
    assert "\n" not in message and not message.endswith("..")
    assert message.endswith("404 Client Error; Repository Not Found for url: x; Is it private?.")


def test_a_download_brings_the_descriptions_of_quantized_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[str] = []
    monkeypatch.setattr(
        model_source.huggingface_hub,
        "snapshot_download",
        lambda name, allow_patterns: wanted.extend(allow_patterns) or name,
    )
    resolve_model("org/model")
    files = ["config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json"]
    assert list(filter_repo_objects([*files, "model.safetensors", "model.gguf"], allow_patterns=wanted)) == [
        *files,
        "model.safetensors",
    ]


def test_the_default_model_comes_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so in any directory, even one that contains a directory of its name."""
    (tmp_path / DEFAULT_MODEL).mkdir()
    (tmp_path / DEFAULT_MODEL / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    directory = Path(resolve_model(DEFAULT_MODEL))
    assert directory.parent == Path(pensieve_jax.__file__).parent
    assert sum(file.stat().st_size for file in directory.iterdir()) <= 12e6
    assert "CC-BY-SA-4.0" in (directory / "README.md").read_text(encoding="utf-8")
    assert resolve_model(f"./{DEFAULT_MODEL}") == f"./{DEFAULT_MODEL}"
    assert inspect.signature(LLM).parameters["model"].default == DEFAULT_MODEL


def test_a_closed_llm_refuses_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is closed before the first turn; nothing is compiled for this test."""
    monkeypatch.setattr(assembly.ModelRunner, "warm_up", lambda self, progress=None: None)
    config = EngineConfig(
        cache=CacheConfig(gpu_pages=4),
        scheduler=SchedulerConfig(max_num_running=2, max_num_batched_tokens=64, token_buckets=(64,)),
    )
    llm = LLM("random:opt-tiny", config=config, progress=False)
    llm.close()
    llm.close()
    for call in (
        lambda: llm.history("a"),
        llm.conversations,
        lambda: llm.generate(["a"]),
        lambda: llm.end("a"),
    ):
        with pytest.raises(EngineClosedError):
            call()
