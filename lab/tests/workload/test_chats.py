"""Readers of texts: one conversation in five formats, and files with irregular content."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.tests.workload.helpers import count_words, lengths_of, write, write_lines
from pensieve_lab.workload import TraceError, WorkloadError, read_trace

TEXT_FORMATS = ("sharegpt", "ultrachat", "openai", "vllm", "dialogues")
ARRAYS = ("sharegpt", "vllm")

type Messages = list[tuple[str, str]]  # "user" or "assistant", and the text


def to_format(format: str, conversation_id: str, messages: Messages) -> dict[str, object]:
    match format:
        case "sharegpt":
            speakers = {"user": "human", "assistant": "gpt"}
            said = [{"from": speakers[role], "value": text} for role, text in messages]
            return {"id": conversation_id, "conversations": said}
        case "ultrachat":
            return {"id": conversation_id, "data": [text for _, text in messages]}
        case "dialogues":
            return {
                "id": conversation_id,
                "turns": [["UA"[role == "assistant"], text] for role, text in messages],
            }
        case _:
            said = [{"role": role, "content": text} for role, text in messages]
            return {"id": conversation_id, "messages": said}


def write_chats(path, format, *chats: Messages):
    objects = [to_format(format, f"chat {index}", messages) for index, messages in enumerate(chats)]
    return write(path, json.dumps(objects, indent=1)) if format in ARRAYS else write_lines(path, *objects)


def read(path, format, **options):
    return read_trace(path, format=format, count_tokens=count_words, **options)


CHAT = [("user", "one two"), ("assistant", "a b c"), ("user", "three"), ("assistant", "d")]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("format", TEXT_FORMATS)
def test_a_chat_becomes_turns(tmp_path, format, suffix):
    trace = read(write_chats(tmp_path / f"chats.json{suffix}", format, CHAT, CHAT[:2]), format)
    assert lengths_of(trace) == [[(2, 3), (1, 1)], [(2, 3)]]
    assert [c.conversation_id for c in trace.conversations] == ["chat 0", "chat 1"]
    assert all(c.arrival_s is None for c in trace.conversations)
    assert all(turn.gap_s is None and turn.think_s is None for c in trace.conversations for turn in c.turns)
    assert trace.name == f"chats.json{suffix}"


texts = st.lists(st.sampled_from(["w", ""]), max_size=4).map(" ".join)


@given(
    format=st.sampled_from(("sharegpt", "openai", "vllm", "dialogues")),
    messages=st.lists(st.tuples(st.sampled_from(["user", "assistant"]), texts), max_size=8),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_token_is_made_up_and_none_between_prompt_and_answer_is_lost(tmp_path, format, messages):
    """For any order of speakers, the result is compared with a count over the messages from the end."""
    served = [("user", "p"), ("assistant", "a")]
    trace = read(write_chats(tmp_path / "chats.json", format, served, messages), format)
    turns = lengths_of(trace)[1] if len(trace.conversations) == 2 else []
    expected: list[list[int]] = []
    for role, text in messages:
        words = count_words(text)
        waiting = bool(expected) and expected[-1][1] == 0
        if role == "user" and words:
            if waiting:
                expected[-1][0] += words
            else:
                expected.append([words, 0])
        elif role == "assistant" and expected:
            expected[-1][1] += words
    assert turns == [tuple(lengths) for lengths in expected if lengths[1]]


@pytest.mark.parametrize("format", TEXT_FORMATS)
def test_what_cannot_be_served_is_left_out_and_told(tmp_path, format):
    skipped: list[TraceError] = []
    chats = ([], CHAT, [("user", "no answer")], [("user", ""), ("assistant", "an answer to nothing")])
    trace = read(write_chats(tmp_path / "chats.json", format, *chats), format, on_skip=skipped.append)
    assert [c.conversation_id for c in trace.conversations] == ["chat 1"]
    assert len(skipped) == 3
    assert all("no prompt with an answer" in error.reason and error.line for error in skipped)


@pytest.mark.parametrize("format", TEXT_FORMATS)
def test_a_file_without_any_chat_is_refused(tmp_path, format):
    with pytest.raises(TraceError, match="no conversation that can be served"):
        read(write_chats(tmp_path / "chats.json", format, []), format)


@pytest.mark.parametrize("format", TEXT_FORMATS)
def test_a_truncated_file_is_refused_with_the_line(tmp_path, format):
    path = write_chats(tmp_path / "chats.json", format, CHAT, CHAT)
    text = path.read_text().rstrip()
    write(path, text[: len(text) - 8])
    with pytest.raises(TraceError, match="is not JSON") as caught:
        read(path, format)
    assert caught.value.line >= 2


@pytest.mark.parametrize(
    ("format", "content", "reason"),
    [
        ("sharegpt", [{"id": "a"}], "conversations is missing, but must be a list"),
        ("sharegpt", [{"conversations": [{"from": "human"}]}], r"conversations[0].value is missing"),
        ("sharegpt", [{"conversations": [{"from": "me", "value": ""}]}], "from is 'me', but must be one of"),
        ("sharegpt", [{"conversations": ["hi"]}], "must be a list of objects; item 0 is not an object"),
        ("sharegpt", [to_format("sharegpt", "", CHAT)], "id is '', but must be a non-empty string or an int"),
        ("vllm", [{"id": "a", "messages": [{"role": "user", "content": 3}]}], r"messages[0].content is 3"),
        ("vllm", [{"id": "a", "messages": [{"role": "user", "content": [{"type": "text"}]}]}],
         r"messages[0].content[0].text is missing"),
        ("vllm", {"filetype": "generate_conversations"}, "messages is missing, but must be a list"),
    ],
)  # fmt: skip
def test_fields_that_are_wrong_are_named(tmp_path, format, content, reason):
    with pytest.raises(TraceError) as caught:
        read(write(tmp_path / "a.json", json.dumps(content)), format)
    assert caught.value.line == 1
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("format", "line", "reason"),
    [
        (
            "ultrachat",
            {"id": 1, "data": ["a", 2]},
            "data is ['a', 2], but must be a list of strings; item 1 is not a string",
        ),
        ("ultrachat", {"id": 1, "data": "a"}, "must be a list"),
        ("openai", {"messages": [{"content": "a"}]}, "messages[0].role is missing, but must be a string"),
        ("openai", {"messages": [{"role": "assistant", "content": None}]}, "messages[0].content is None"),
        ("dialogues", {"id": 1, "turns": [["U", "a"], ["X", "b"]]}, "item 1 is not"),
        ("dialogues", {"id": 1, "turns": [["U", "a", "b"]]}, "item 0 is not"),
    ],
)
def test_lines_that_are_wrong_are_named(tmp_path, format, line, reason):
    path = write_lines(tmp_path / "a.jsonl", to_format(format, "good", CHAT), line)
    with pytest.raises(TraceError) as caught:
        read(path, format)
    assert caught.value.line == 2
    assert reason in caught.value.reason


def test_openai_messages_count_all_that_the_model_reads(tmp_path):
    calls = [{"function": {"name": "find", "arguments": "{}"}}]
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "what is"}, {"type": "image_url"}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "found it"},
        {"role": "assistant", "content": "this"},
    ]
    trace = read_trace(
        write_lines(tmp_path / "a.jsonl", {"messages": messages}), format="openai", count_tokens=len
    )
    call_tokens = len(json.dumps(calls))
    assert lengths_of(trace) == [
        [(len("be kind") + len("what is"), call_tokens), (len("found it"), len("this"))]
    ]
    assert trace.conversations[0].conversation_id == "line 1"


def test_ids_that_come_twice_are_numbered(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *(to_format("ultrachat", "x", CHAT) for _ in range(3)))
    assert [c.conversation_id for c in read(path, "ultrachat").conversations] == ["x", "x#2", "x#3"]


def test_texts_need_a_tokenizer_and_formats_a_name(tmp_path):
    path = write_chats(tmp_path / "a.json", "vllm", CHAT)
    with pytest.raises(WorkloadError, match="count_tokens is None, but must be given for 'vllm'"):
        read_trace(path, format="vllm")
    with pytest.raises(WorkloadError, match="format is 'csv', but must be one of pensieve, sharegpt"):
        read(path, "csv")


@pytest.mark.parametrize("ids", [["a", "a", "a#2"], ["a#2", "a", "a"], ["line 2", None, "x"]])
def test_ids_that_look_like_numbered_ones_are_told_apart(tmp_path, ids):
    """The whole file was refused, without a line."""
    chat = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    rows = ({"conversations": chat} | ({} if one is None else {"id": one}) for one in ids)
    path = write_lines(tmp_path / "a.jsonl", *rows)
    trace = read_trace(path, format="sharegpt", count_tokens=count_words)
    assert len(trace.conversations) == 3
