"""Valid lines of a conversations file, and the errors of invalid ones."""

import gzip
import json

import pytest

from pensieve_jax import SamplingParams
from tests.launching import load

conversations_file = load("pensieve_jax.commands.conversations_file")
DEFAULTS = SamplingParams(max_tokens=5)


def request(**changed):
    """Return a request of OpenAI's batch format; its own keys, or else those of its body, may be changed."""
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
    line = {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    for name, value in changed.items():
        (line if name in line or name == "extra" else body)[name] = value
    return line


def read(tmp_path, *lines, name="in.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return conversations_file.read_conversations(str(path), DEFAULTS, "chat")


def test_lines_of_one_turn(tmp_path):
    """Recorded replies are context, but the last one is what the turn writes."""
    user, reply = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
    conversations = read(
        tmp_path,
        {"messages": [user], "max_tokens": 9},
        {"id": "tuning", "messages": [user, reply, user, reply]},
        {"prompt": "once", "temperature": 0.5},
        {"conversation_id": "ids", "prompt": [3, 4]},
    )
    assert [c.conversation_id for c in conversations] == ["line-1", "tuning", "line-3", "ids"]
    turns = [turn for c in conversations for turn in c.turns]
    assert [turn.prompt for turn in turns] == [(user,), (user, reply, user), "once", [3, 4]]
    assert [turn.params.max_tokens for turn in turns] == [9, 5, 5, 5]
    assert turns[2].params.temperature == 0.5
    assert all(c.url is None and c.is_single for c in conversations)


def test_requests_of_openais_batch_format(tmp_path):
    chat, text = "/v1/chat/completions", "/v1/completions"
    fields = {"max_completion_tokens": 9, "stop": ".", "logit_bias": {"7": -1}, "n": 1, "stream": False}
    conversations = read(
        tmp_path,
        request(**fields, temperature=None, user="ada", metadata={}),
        request(custom_id="r-2", url=text, body={"prompt": "once", "max_tokens": 3}),
    )
    assert [(c.conversation_id, c.url) for c in conversations] == [("r-1", chat), ("r-2", text)]
    (first,), (second,) = (c.turns for c in conversations)
    assert first.prompt == ({"role": "user", "content": "hi"},) and second.prompt == "once"
    assert (first.params.max_tokens, first.params.stop) == (9, (".",))
    assert first.params.logit_bias == {7: -1} and first.params.temperature == DEFAULTS.temperature
    assert second.params.max_tokens == 3


def test_plain_lines_are_messages(tmp_path):
    lines = "\ufeffWhat is 2 + 2?", "", '{"this": "is text, too"}'
    conversations = read(tmp_path, *lines, name="questions.txt")
    assert [c.conversation_id for c in conversations] == ["line-1", "line-3"]
    turns = [turn for c in conversations for turn in c.turns]
    assert [turn.text for turn in turns] == ["What is 2 + 2?", lines[2]]
    assert [turn.prompt[0]["content"] for turn in turns] == [turn.text for turn in turns]
    (one,) = read(tmp_path, {"prompt": "json"}, name="questions.txt")
    assert one.turns[0].prompt == "json", "the first line decides"


def test_plain_lines_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "questions"
    path.write_bytes(b"good\n\xff\n")
    with pytest.raises(conversations_file.InputFileError, match=r"questions:2: .*utf-8"):
        conversations_file.read_conversations(str(path), DEFAULTS)


def test_every_kind_of_turn(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    conversations = read(
        tmp_path,
        {
            "conversation_id": "a",
            "turns": [
                {"prompt": "x"},
                {"prompt": [3, 4], "max_tokens": 9, "stop": ["."]},
                {"messages": messages},
            ],
        },
        "",
        {"turns": [["U", "one"], ["S", "left out"], ["U", "two"]]},
        {"id": "dev/7", "services": ["Music_1"], "turns": [["U", "one"], ["A", "left out"]]},
    )
    assert [c.conversation_id for c in conversations] == ["a", "line-3", "dev/7"]
    assert [c.line_number for c in conversations] == [1, 3, 4]
    first = conversations[0].turns
    assert [turn.prompt for turn in first] == ["x", [3, 4], tuple(messages)]
    assert [turn.is_chat for turn in first] == [False, False, True]
    assert [turn.params.max_tokens for turn in first] == [5, 9, 5]
    assert list(first[1].params.stop) == ["."]
    assert [turn.prompt for turn in conversations[1].turns] == ["one", "two"]


def test_compressed(tmp_path):
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"turns": [{"prompt": "x"}]}\n'))
    assert len(conversations_file.read_conversations(str(path), DEFAULTS)) == 1


@pytest.mark.parametrize("harm", [lambda data: data[:-12], lambda data: data[:12] + b"x" * 80])
def test_an_incomplete_compressed_file_is_refused(tmp_path, harm):
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(harm(gzip.compress(b'{"turns": [{"prompt": "x"}]}\n' * 100)))
    with pytest.raises(OSError, match="not a complete gzip archive"):
        conversations_file.read_conversations(str(path), DEFAULTS)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON object"),
        ({"turns": []}, "at least one turn"),
        ({"turns": [["S", "only a reply"]]}, "at least one turn"),
        ({"turns": "x"}, "turns is 'x'"),
        ({"turns": [{}]}, r"turns\[0\] is"),
        ({"turns": [{"prompt": "x", "messages": []}]}, "either prompt or messages"),
        ({"turns": [{"prompt": ""}]}, r"turns\[0\].prompt"),
        ({"turns": [{"prompt": []}]}, r"turns\[0\].prompt"),
        ({"turns": [{"prompt": [1, "2"]}]}, r"turns\[0\].prompt"),
        ({"turns": [{"prompt": [True]}]}, r"turns\[0\].prompt"),
        (
            {"turns": [{"prompt": "x"}, {"prompt": "x", "temprature": 1}]},
            r"unknown key turns\[1\].temprature is 1, .* perhaps temperature is meant",
        ),
        (
            {"turns": [{"prompt": "x", "zzz": 1}]},
            r"unknown key turns\[0\].zzz is 1, .* known are .*max_tokens",
        ),
        ({"turns": [{"prompt": "x"}], "max_tokens": 9}, "unknown key max_tokens is 9, .* belongs to a turn"),
        ({"turnz": [{"prompt": "x"}]}, "unknown key turnz is .* perhaps turns is meant"),
        ({"turns": [{"prompt": "x"}], "messages": []}, "unknown key messages is .* belongs to a turn"),
        ({"messages": []}, "messages is .*, but must be a list of at least one"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages is .* at least one"),
        ({"messages": [{"role": "user"}]}, r"2: messages\[0\].content"),
        ({"messages": [{"role": "user", "content": "x"}], "temprature": 1}, "perhaps temperature is meant"),
        ({"prompt": ""}, "2: prompt is ''"),
        ({"prompt": "x", "temperature": -1}, "2: temperature is -1"),
        (request(custom_id=7), "custom_id is 7"),
        (request(custom_id=None), "custom_id is None"),
        (request(method="GET"), "method is 'GET', but must be POST"),
        (request(url="/v1/embeddings"), "url is '/v1/embeddings', but must be one of /v1/chat/completions"),
        (request(extra=1), "unknown key extra is 1"),
        (request(body=None), "body is None"),
        (request(body={}), "body.messages is None, but must be given"),
        (request(model="gpt-4o"), "body.model is 'gpt-4o', but must be 'chat' or left out.* --served_model"),
        (request(stream=True), "body.stream is True, but must be left out, or False"),
        (request(tools=[{}]), r"body.tools is .* left out, or \[\]"),
        (request(response_format={"type": "json_object"}), "body.response_format is .* left out"),
        (request(logprobs=True), "body.logprobs is True"),
        (
            request(url="/v1/completions", body={"prompt": "x", "logprobs": 0}),
            "body.logprobs is 0, .* left out",
        ),
        (request(temperature=-1), "body.temperature is -1"),
        (request(logit_bias={"x": 1}), "body.logit_bias is 'x'"),
        (request(messages=[{"role": "user"}]), r"body.messages\[0\].content"),
        ({"turns": [{"prompt": "x", "temperature": -1}]}, r"turns\[0\].temperature is -1"),
        ('{"turns": [{"prompt": "x", "top_p": NaN}]}', r"turns\[0\].top_p is nan"),
        ({"turns": [{"prompt": "x", "stop": 5}]}, r"turns\[0\].stop is 5"),
        ({"turns": [{"messages": [{"role": "user"}]}]}, r"turns\[0\].messages\[0\].content"),
        ({"conversation_id": 7, "turns": [{"prompt": "x"}]}, "conversation_id is 7"),
        ({"conversation_id": "\ud800", "turns": [{"prompt": "x"}]}, "conversation_id is .* UTF-8 can hold"),
        ('{"turns": [{"prompt": [' + "1" * 5000 + "]}]}", "not JSON: .* 5000 digits"),
        ('{"turns": ' + "[" * 100_000, "not JSON: .* recursion"),
    ],
)
def test_an_invalid_line_is_named(tmp_path, line, reason):
    good = {"turns": [{"prompt": "x"}]}
    with pytest.raises(conversations_file.InputFileError, match=reason) as caught:
        read(tmp_path, good, line)
    assert [number for number, _ in caught.value.problems] == [2]
    assert "in.jsonl:2: " in str(caught.value)


def test_all_invalid_lines_are_named_at_once(tmp_path):
    good = {"conversation_id": "a", "turns": [{"prompt": "x"}]}
    with pytest.raises(conversations_file.InputFileError, match="unlike that of line 1") as caught:
        read(tmp_path, good, "{", good, "{")
    assert [number for number, _ in caught.value.problems] == [2, 3, 4]


def test_an_empty_file_is_an_error(tmp_path):
    with pytest.raises(conversations_file.InputFileError, match="no conversations"):
        read(tmp_path, "")
