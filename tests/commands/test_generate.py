"""Conversations in, turns out: the output, refusals, and what an interrupt leaves."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter

import pytest

from pensieve_jax import InvalidRequestError, SamplingParams
from pensieve_jax.commands import batch
from pensieve_jax.commands.conversations_file import InputTurn
from pensieve_jax.commands.engine_flags import CACHE_DIR, engine_config
from pensieve_jax.model_source import DEFAULT_MODEL
from tests.launching import ROOT, load

generate = load("generate")


def write_input(tmp_path, *conversations):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(conversation) + "\n" for conversation in conversations))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def three(prefix, num_turns=2):
    """Return three conversations, one of each kind of prompt."""
    user = [{"role": "user", "content": "hello"}]
    return [
        {"conversation_id": f"{prefix}-text", "turns": [{"prompt": "some text"}] * num_turns},
        {"conversation_id": f"{prefix}-ids", "turns": [{"prompt": [5, 6, 7], "max_tokens": 3}] * num_turns},
        {"conversation_id": f"{prefix}-chat", "turns": [{"messages": user}] * num_turns},
    ]


def test_turns_equal_the_librarys(launch, llm, tmp_path, capsys):
    path, output = write_input(tmp_path, *three("lib")), tmp_path / "out.jsonl"
    flags = {"max_tokens": 6, "ignore_eos": True, "concurrency": 2, "logprobs": 1}
    assert launch("generate", input=path, output=output, **flags) == 0
    lines = read(output)
    order = [line["turn"] for line in lines]
    assert sorted(order) == [0, 0, 0, 1, 1, 1]
    assert {line["finish_reason"] for line in lines} == {"length"}
    by_key = {(line["conversation_id"], line["turn"]): line for line in lines}
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    for turn in (0, 1):
        expected = llm.generate([[5, 6, 7]], params, conversation_ids=["lib-again"])[0]
        line = by_key["lib-ids", turn]
        assert line["token_ids"] == list(expected.token_ids)
        assert line["usage"]["reused_gpu_tokens"] == expected.usage.reused_gpu_tokens
        assert line["prompt"] == [5, 6, 7]
        assert [entry["token_id"] for entry in line["logprobs"]] == line["token_ids"]
    assert by_key["lib-chat", 0]["prompt"] == [{"role": "user", "content": "hello"}]
    assert "recomputed" in capsys.readouterr().out


def test_compiled_steps_are_stored_for_the_next_start(launch, monkeypatch):
    """Once, every start compiled again."""
    seen = []
    monkeypatch.setattr(generate, "main", lambda: seen.append(engine_config()) or 0)
    assert launch("generate", shared_llm=False) == 0
    assert seen[0].runner.compilation_cache_dir == str(CACHE_DIR)


def test_a_conversation_continues_before_another_begins(launch, tmp_path):
    one = [{"prompt": [9]}] * 3
    path = write_input(tmp_path, *({"conversation_id": f"order-{i}", "turns": one} for i in range(4)))
    launch("generate", input=path, output=tmp_path / "out", max_tokens=4, ignore_eos=True, concurrency=1)
    lines = read(tmp_path / "out")
    assert [line["conversation_id"][-1] for line in lines] == list("000111222333")
    assert [line["turn"] for line in lines] == [0, 1, 2] * 4


@pytest.mark.long
def test_the_order_reuses_history_that_a_sweep_would_recompute(launch, llm, tmp_path):
    """Twelve conversations of about 200 tokens on 768 tokens of device memory: the same tokens, less work."""
    rng = random.Random(20)
    prompts = [[[rng.randrange(5, 300) for _ in range(56)] for _ in range(3)] for _ in range(12)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    swept = [
        llm.generate(
            [turns[i] for turns in prompts], params, conversation_ids=[f"swept-{n}" for n in range(12)]
        )
        for i in range(3)
    ]
    path = write_input(
        tmp_path,
        *(
            {"conversation_id": f"kept-{n}", "turns": [{"prompt": prompt} for prompt in turns]}
            for n, turns in enumerate(prompts)
        ),
    )
    assert launch("generate", input=path, output=tmp_path / "out", max_tokens=8, ignore_eos=True) == 0
    lines = {(line["conversation_id"], line["turn"]): line for line in read(tmp_path / "out")}
    assert len(lines) == 36
    for i, outputs in enumerate(swept):
        for n, output in enumerate(outputs):
            assert lines[f"kept-{n}", i]["token_ids"] == list(output.token_ids)
    recomputed = sum(line["usage"]["recomputed_tokens"] for line in lines.values())
    found = sum(line["usage"]["reused_gpu_tokens"] for line in lines.values())
    swept_usages = [output.usage for outputs in swept for output in outputs]
    assert recomputed == 0 < sum(usage.recomputed_tokens for usage in swept_usages)
    assert found == 12 * (63 + 127) > sum(usage.reused_gpu_tokens for usage in swept_usages)
    for n in range(12):
        llm.end(f"swept-{n}")
        llm.end(f"kept-{n}")


def test_a_conversation_larger_than_all_room_still_runs(launch, llm, tmp_path, monkeypatch):
    """The estimate of a conversation's length decides when others begin, not whether it runs."""
    monkeypatch.setattr(batch, "num_prompt_tokens", lambda turn, tokenizer: 10_000)
    path = write_input(tmp_path, *three("big"))
    assert launch("generate", input=path, output=tmp_path / "out", max_tokens=6, ignore_eos=True) == 0
    order = [line["conversation_id"] for line in read(tmp_path / "out")]
    assert sorted(set(order)) == ["big-chat", "big-ids", "big-text"]
    assert order[::2] == order[1::2], "one after the other"


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": [9] * 5000},
        {"prompt": [320]},
        {"prompt": [-1]},
        {"prompt": "x", "top_k": -2},
        {"prompt": "\ud800"},
        {"prompt": "x" * 767},
        {"prompt": [9], "logprobs": 50},
        {"prompt": [9], "stop_token_ids": [1_000_000]},
        {"prompt": [9], "min_tokens": 2, "stop_token_ids": list(range(10, 30))},
        {"messages": [{"role": "user", "content": "x" * 800}]},
    ],
)
def test_an_invalid_line_runs_nothing_and_changes_nothing(launch, llm, tmp_path, capsys, bad):
    path = write_input(tmp_path, *three("bad"), {"turns": [bad]})
    output = tmp_path / "out.jsonl"
    output.write_text("precious\n")
    num_steps = llm.stats()["num_steps"]
    assert launch("generate", input=path, output=output) == 2
    assert f"{path}:4: turns[0]" in capsys.readouterr().err
    assert output.read_text() == "precious\n"
    assert llm.stats()["num_steps"] == num_steps


def test_a_first_turn_that_the_template_refuses_changes_nothing(launch, llm, tmp_path, capsys, monkeypatch):
    """Once, it was refused when it ran, after the output had been emptied."""
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    template += "{{ m.content }}{% endfor %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    path = write_input(tmp_path, {"turns": [{"messages": [{"role": "system", "content": "x"}]}]})
    output = tmp_path / "out.jsonl"
    output.write_text("precious\n")
    assert launch("generate", input=path, output=output) == 2
    assert f"{path}:1: turns[0]: " in capsys.readouterr().err
    assert output.read_text() == "precious\n"


def test_too_many_logprobs_change_nothing(launch, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out.jsonl"
    output.write_text("precious\n")
    path = write_input(tmp_path, *three("logprobs"))
    message = refusal(launch, monkeypatch, input=path, output=output, logprobs=99)
    assert message == "--logprobs is 99, but must be at most 20; raise --max_logprobs."
    path = write_input(tmp_path, {"turns": [{"prompt": "x", "logprobs": 21}]})
    assert launch("generate", shared_llm=False, input=path, output=output) == 2
    assert "logprobs is 21, but must be at most 20; raise --max_logprobs." in capsys.readouterr().err
    assert output.read_text() == "precious\n"


@pytest.mark.parametrize("bad", [{"prompt": [320]}, {"prompt": [9] * 5000}])
def test_ids_and_lengths_are_checked_before_the_model_is_loaded(launch, tmp_path, monkeypatch, bad):
    monkeypatch.setattr(generate, "open_llm", lambda **_: pytest.fail("loaded"))
    path = write_input(tmp_path, {"turns": [bad]})
    assert launch("generate", shared_llm=False, input=path, output=tmp_path / "out") == 2


def refusal(launch, monkeypatch, **flags):
    """Return the error message of a run that must not load anything."""
    monkeypatch.setattr(generate, "open_llm", lambda **_: pytest.fail("loaded"))
    with pytest.raises(InvalidRequestError) as caught:
        launch("generate", shared_llm=False, **flags)
    return str(caught.value)


@pytest.mark.parametrize("how", ["same", "relative", "symlink", "hard link", "partial"])
def test_the_input_is_never_overwritten(launch, tmp_path, monkeypatch, how):
    path = write_input(tmp_path, *three("kept"))
    content, output = path.read_bytes(), tmp_path / "out"
    if how == "same":
        output = path
    elif how == "relative":
        monkeypatch.chdir(tmp_path)
        output = "./in.jsonl"
    elif how == "symlink":
        output.symlink_to(path)
    elif how == "hard link":
        output.hardlink_to(path)
    else:
        path = path.rename(tmp_path / "out.partial")
    assert "another file" in refusal(launch, monkeypatch, input=path, output=output)
    assert path.read_bytes() == content


def test_the_history_is_never_overwritten(launch, tmp_path, monkeypatch):
    path, history = write_input(tmp_path, *three("kept")), tmp_path / "chats.sqlite"
    message = refusal(launch, monkeypatch, input=path, output=history, history=history)
    assert "another file than --history" in message
    assert not history.exists()


def test_an_output_that_cannot_be_written_is_refused_at_once(launch, tmp_path, monkeypatch):
    path = write_input(tmp_path, *three("nowhere"))
    message = refusal(launch, monkeypatch, input=path, output=tmp_path / "no" / "x.jsonl")
    assert message.startswith("--output is ") and "existing directory" in message and "partial" not in message
    assert "must be a file" in refusal(launch, monkeypatch, input=path, output=tmp_path)


def test_an_input_that_cannot_be_read_names_the_flag(launch, tmp_path, monkeypatch):
    for path in (tmp_path / "none", tmp_path):
        message = refusal(launch, monkeypatch, input=path, output=tmp_path / "out")
        assert message.startswith(f"--input is '{path}', but must be a file of conversations")


def test_a_turn_that_does_not_fit_ends_its_conversation_only(launch, tmp_path, capsys):
    long = {"conversation_id": "long", "turns": [{"prompt": [9]}, {"prompt": [9] * 767}, {"prompt": [9]}]}
    path = write_input(tmp_path, *three("fits"), long)
    assert launch("generate", input=path, output=tmp_path / "out", max_tokens=3, ignore_eos=True) == 1
    counts = Counter(line["conversation_id"] for line in read(tmp_path / "out"))
    assert counts == {"fits-text": 2, "fits-ids": 2, "fits-chat": 2, "long": 1}
    assert f"{path}:4: turns[1]" in capsys.readouterr().err


def test_an_interrupt_keeps_ended_turns_and_the_next_run_continues(launch, llm, tmp_path, monkeypatch):
    path, output = write_input(tmp_path, *three("stop", num_turns=3)), tmp_path / "out.jsonl"
    flags = {"input": path, "output": output, "max_tokens": 9, "ignore_eos": True}
    made = generate.output_line

    def interrupting(*args):
        signal.raise_signal(signal.SIGINT)
        return made(*args)

    with monkeypatch.context() as patch:
        patch.setattr(generate, "output_line", interrupting)
        assert launch("generate", **flags) == 130
    kept = read(output)
    assert 0 < len(kept) < 9
    llm.engine.check_integrity()
    assert not llm.engine.has_unfinished or llm.engine.step() == []
    stored = {i.conversation_id: i.num_turns for i in llm.conversations()}
    assert all(line["turn"] < stored[line["conversation_id"]] for line in kept)

    output.write_bytes(output.read_bytes() + b'{"conversation_id": "stop-te')  # as a crash would leave it
    assert launch("generate", **flags) == 0
    lines = read(output)
    assert all(line in lines for line in kept)
    keys = [(line["conversation_id"], line["turn"]) for line in lines]
    assert len(set(keys)) == len(keys) == 9
    assert all(line["usage"] is not None for line in lines)

    output.unlink()
    assert launch("generate", **flags) == 0
    assert all(line["usage"] is None for line in read(output))
    rebuilt = {(line["conversation_id"], line["turn"]): line["token_ids"] for line in read(output)}
    assert rebuilt == {(line["conversation_id"], line["turn"]): line["token_ids"] for line in lines}


def requests(*names):
    """Return requests of OpenAI's batch format; the first is a chat, others continue text."""
    urls = {name: "/v1/completions" for name in names} | {names[0]: "/v1/chat/completions"}
    prompts = {name: {"prompt": "once"} for name in names}
    prompts[names[0]] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    return [
        {"custom_id": name, "method": "POST", "url": urls[name], "body": {"model": "tiny"} | prompts[name]}
        for name in names
    ]


def test_requests_of_openais_batch_format_are_answered_in_it(launch, llm, tmp_path):
    turn = {"conversation_id": "beside", "prompt": [5, 6]}
    path, output = write_input(tmp_path, *requests("r-chat", "r-text"), turn), tmp_path / "out.jsonl"
    flags = {"max_tokens": 6, "ignore_eos": True, "served_model_name": "tiny"}
    assert launch("generate", input=path, output=output, **flags) == 0
    lines = {line.get("custom_id", "turn"): line for line in read(output)}
    assert lines["turn"]["conversation_id"] == "beside" and len(lines["turn"]["token_ids"]) == 6
    chat, text = (lines[name]["response"]["body"] for name in ("r-chat", "r-text"))
    assert (chat["object"], text["object"]) == ("chat.completion", "text_completion")
    assert {chat["model"], text["model"]} == {"tiny"}
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    expected = llm.chat([{"role": "user", "content": "hello"}], params)
    message = {"role": "assistant", "content": expected.text, "refusal": None}
    assert chat["choices"] == [{"index": 0, "logprobs": None, "finish_reason": "length", "message": message}]
    num_prompt = expected.usage.prompt_tokens
    assert chat["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 4,
        "total_tokens": num_prompt + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert isinstance(text["choices"][0]["text"], str) and text["usage"]["completion_tokens"] == 6
    for name in ("r-chat", "r-text"):
        assert lines[name]["error"] is None and lines[name]["response"]["status_code"] == 200
    before = read(output)
    assert launch("generate", input=path, output=output, **flags) == 0
    assert read(output) == before, "the history has them, and the file keeps its lines"
    output.unlink()
    assert launch("generate", input=path, output=output, **flags) == 0
    again = {line.get("custom_id", "turn"): line for line in read(output)}["r-chat"]["response"]["body"]
    assert again["choices"] == chat["choices"] and again["usage"] is None


def test_logprobs_have_no_place_in_results_of_requests(launch, tmp_path, monkeypatch):
    """Once, they were computed and left out."""
    path = write_input(tmp_path, *requests("r-chat", "r-text"))
    flags = {"input": path, "output": tmp_path / "out", "served_model_name": "tiny"}
    message = refusal(launch, monkeypatch, logprobs=2, **flags)
    assert message.startswith(
        "--logprobs is 2, but must be left out beside requests of OpenAI's batch format"
    )


def test_a_request_that_fails_has_a_line_that_says_so(launch, llm, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(generate, "check_text", lambda *_: None)  # so that it is refused only when it runs
    first, second = requests("e-chat", "e-text")
    second["body"]["prompt"] = "x" * 2000
    path, output = write_input(tmp_path, first, second), tmp_path / "out.jsonl"
    assert launch("generate", input=path, output=output, served_model_name="tiny") == 1
    lines = {line["custom_id"]: line for line in read(output)}
    assert lines["e-chat"]["error"] is None
    assert lines["e-text"]["response"] is None
    assert lines["e-text"]["error"]["code"] == "ContextLengthError"
    assert f"{path}:2: prompt is " in capsys.readouterr().err


def test_lines_of_one_turn_and_plain_text(launch, llm, tmp_path, monkeypatch):
    user, reply = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}
    flags = {"max_tokens": 4, "ignore_eos": True, "output": tmp_path / "out"}
    path = write_input(tmp_path, {"id": "one-turn", "messages": [user, reply, user, reply]})
    assert launch("generate", input=path, **flags) == 0
    (line,) = read(tmp_path / "out")
    assert line["prompt"] == [user, reply, user] and len(line["token_ids"]) == 4
    llm.end("one-turn")
    path.write_text("")
    (tmp_path / "lines").write_text("hello\n")
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    assert launch("generate", input=tmp_path / "lines", **flags) == 0
    assert read(tmp_path / "out")[0]["text"] == llm.chat([user], params).text
    llm.end("line-1")
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    assert launch("generate", input=tmp_path / "lines", **flags) == 0
    assert read(tmp_path / "out")[0]["token_ids"] == list(llm.generate(["hello"], params)[0].token_ids)
    llm.end("line-1")


def test_the_example_is_accepted(launch, tmp_path, monkeypatch):
    """The model of these tests has less context, so nothing runs."""
    read_all = []
    monkeypatch.setattr(generate, "generate", lambda _, found, *__: read_all.extend(found) or 0)
    source = ROOT / "examples" / "conversations.jsonl"
    flags = {"model": DEFAULT_MODEL, "output": tmp_path / "out"}
    assert launch("generate", input=source, **flags) == 0
    assert [len(conversation.turns) for conversation in read_all] == [3, 2, 1, 1, 1]
    assert [conversation.url for conversation in read_all][-1] == "/v1/chat/completions"


def test_another_prompt_in_the_history_is_refused(launch, llm, tmp_path):
    llm.generate([[8, 8]], SamplingParams(max_tokens=2), conversation_ids=["other"])
    path = write_input(tmp_path, {"conversation_id": "other", "turns": [{"prompt": [8, 9]}]})
    with pytest.raises(
        ValueError, match=r"line 1, turns\[0\] is .* what the history has as turn 0 of 'other'"
    ):
        launch("generate", input=path, output=tmp_path / "out")
    path = write_input(tmp_path, {"conversation_id": "other", "prompt": [8, 9]})
    with pytest.raises(ValueError, match=r"line 1 is \[8, 9\], but must be what the history has"):
        launch("generate", input=path, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_timeline_is_drawn(launch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path, picture = write_input(tmp_path, *three("drawn")), tmp_path / "out.png"
    flags = {"max_tokens": 6, "ignore_eos": True, "timeline": picture}
    assert launch("generate", input=path, output=tmp_path / "out", **flags) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "swapped in" in out and "MB to host" in out and "seconds stalled" in out


def test_a_timeline_without_matplotlib_is_refused_before_the_model_is_loaded(launch, tmp_path, monkeypatch):
    monkeypatch.setattr(generate.check_timeline.__globals__["importlib"].util, "find_spec", lambda _: None)
    path = write_input(tmp_path, *three("undrawn"))
    flags = {"input": path, "output": tmp_path / "out", "timeline": tmp_path / "out.png"}
    assert "pip install matplotlib" in refusal(launch, monkeypatch, **flags)


def test_the_size_of_a_prompt_counts_its_calls(llm):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    size = [
        batch.num_prompt_tokens(
            InputTurn(({**called, "tool_calls": [call] * count},), SamplingParams()), llm.tokenizer
        )
        for count in (1, 2)
    ]
    assert batch.MARKUP_TOKENS < size[0] < size[1]
