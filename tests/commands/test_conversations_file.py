"""Valid lines of a conversations file, and the errors of invalid ones."""

import gzip
import json

import pytest

from pensieve_jax import SamplingParams
from tests.launching import load

conversations_file = load("pensieve_jax.commands.conversations_file")
DEFAULTS = SamplingParams(max_tokens=5)


def read(tmp_path, *lines):
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return conversations_file.read_conversations(str(path), DEFAULTS)


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
        ({"messages": [{"role": "user", "content": "x"}]}, "unknown key messages is .* belongs to a turn"),
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
