"""The trace type: what it refuses, its digest, and its file."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.tests.workload.helpers import conversation, traces, write
from pensieve_lab.workload import ConversationTrace, Trace, TraceError, TurnTrace, WorkloadError, read_trace


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ((0, 1), "prompt_tokens"),
        ((1, -3), "output_tokens"),
        ((1.5, 1), "prompt_tokens"),
        ((True, 1), "prompt_tokens"),
        ((1, 1, -0.5), "gap_s"),
        ((1, 1, None, float("nan")), "think_s"),
        ((1, 1, None, float("inf")), "think_s"),
        ((1, 1, None, 10**400), "think_s"),
    ],
)
def test_a_turn_refuses_what_cannot_be(values, field):
    with pytest.raises(WorkloadError) as caught:
        TurnTrace(*values)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} is ")


@pytest.mark.parametrize(
    ("conversation_id", "lengths", "arrival_s", "field"),
    [
        ("", [(1, 1)], 0.0, "conversation_id"),
        ("a", [], 0.0, "turns of 'a'"),
        ("a", [(1, 1)], -1.0, "arrival_s"),
    ],
)
def test_a_conversation_refuses_what_cannot_be(conversation_id, lengths, arrival_s, field):
    with pytest.raises(WorkloadError) as caught:
        conversation(conversation_id, *lengths, arrival_s=arrival_s)
    assert caught.value.field == field


def test_ids_are_unique():
    with pytest.raises(WorkloadError, match="conversation_id is 'a', but must be unique"):
        Trace("t", (conversation("a", (1, 1)), conversation("a", (2, 2))))


def test_history_is_all_that_was_said_before():
    one = conversation("a", (10, 20), (3, 4), (5, 6))
    assert [one.num_history_tokens(k) for k in range(4)] == [0, 30, 37, 48]
    assert one.num_tokens == 48
    assert Trace("t", (one,)).num_turns == 3


@given(traces())
def test_the_digest_ignores_names_and_spellings_but_nothing_else(trace):
    as_floats = tuple(
        ConversationTrace(
            c.conversation_id,
            tuple(
                TurnTrace(t.prompt_tokens, t.output_tokens, _float(t.gap_s), _float(t.think_s))
                for t in c.turns
            ),
            _float(c.arrival_s),
        )
        for c in trace.conversations
    )
    assert Trace("other", as_floats).digest == trace.digest
    assert Trace("other", (*as_floats, conversation("a new one", (1, 1)))).digest != trace.digest


def _float(time_s):
    return None if time_s is None else -0.0 if time_s == 0 else float(time_s)


@given(traces(min_conversations=1), st.data())
def test_any_change_of_a_turn_changes_the_digest(trace, data):
    index = data.draw(st.integers(0, len(trace.conversations) - 1))
    changed = trace.conversations[index]
    turn = changed.turns[-1]
    other = data.draw(
        st.sampled_from(
            [
                TurnTrace(turn.prompt_tokens + 1, turn.output_tokens, turn.gap_s, turn.think_s),
                TurnTrace(turn.prompt_tokens, turn.output_tokens + 1, turn.gap_s, turn.think_s),
                TurnTrace(turn.prompt_tokens, turn.output_tokens, 2e9, turn.think_s),
                TurnTrace(turn.prompt_tokens, turn.output_tokens, turn.gap_s, 2e9),
            ]
        )
    )
    conversations = list(trace.conversations)
    conversations[index] = ConversationTrace(
        changed.conversation_id, (*changed.turns[:-1], other), changed.arrival_s
    )
    assert Trace(trace.name, tuple(conversations)).digest != trace.digest


@given(trace=traces(), name=st.sampled_from(["t.jsonl", "t.jsonl.gz"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_saved_is_loaded(trace, name, tmp_path):
    trace.save(tmp_path / name)
    loaded = Trace.load(tmp_path / name)
    assert loaded == trace
    assert loaded.digest == trace.digest


def test_a_session_is_saved_and_part_of_the_digest(tmp_path):
    parts = [replace(conversation("a", (1, 2)), session_id=session) for session in (None, "s", "t")]
    assert len({Trace("t", (part,)).digest for part in parts}) == 3
    Trace("t", (parts[1],)).save(tmp_path / "t.jsonl")
    (loaded,) = Trace.load(tmp_path / "t.jsonl").conversations
    assert loaded == parts[1] and (loaded.root_id, parts[0].root_id) == ("s", "a")
    with pytest.raises(WorkloadError, match="session_id is ''"):
        replace(parts[0], session_id="")


def test_an_archive_says_nothing_of_when_it_was_made(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    Trace("t", (conversation("a", (1, 2), arrival_s=0.5),)).save(path)
    assert path.read_bytes()[4:8] == bytes(4)  # where gzip keeps the time


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "trace.jsonl"
    Trace("t", (conversation("a", (1, 2), (3, 4), gaps=(None, 5)), conversation("b", (6, 7)))).save(path)
    return path


@pytest.mark.parametrize(
    ("edit", "line", "reason"),
    [
        (lambda text: "", 1, "must be a header"),
        (lambda text: text.replace("pensieve-trace-1", "pensieve-trace-0"), 1, "must be a header"),
        (lambda text: text.replace('"digest"', '"other"'), 1, "digest is missing"),
        (lambda text: text.rsplit("\n", 2)[0] + "\n", None, "has 1 conversations, but its header says 2"),
        (lambda text: text.replace('"output_tokens": 4', '"output_tokens": 5'), None, "has the digest"),
        (
            lambda text: text.replace('"output_tokens": 4', '"output_tokens": 0'),
            2,
            "turns[1].output_tokens is 0",
        ),
        (lambda text: text.replace('"gap_s": 5.0', '"gap_s": NaN'), 2, "turns[1].gap_s is nan"),
        (lambda text: text.replace('"b"', '"a"'), 3, "unique in the file; line 2 has it too"),
        (lambda text: text[:-20], 3, "is not JSON"),
    ],
)
def test_a_damaged_file_is_refused_with_the_line(saved, edit, line, reason):
    write(saved, edit(saved.read_text()))
    with pytest.raises(TraceError) as caught:
        Trace.load(saved)
    assert caught.value.line == line
    assert reason in caught.value.reason
    assert str(saved) in str(caught.value)


def test_read_trace_knows_the_own_format(saved):
    assert read_trace(saved, format="pensieve") == Trace.load(saved)


def test_the_file_is_made_of_plain_json_lines(saved):
    header, first, _ = map(json.loads, saved.read_text().splitlines())
    assert header["num_conversations"] == 2
    assert first["turns"][1] == {"prompt_tokens": 3, "output_tokens": 4, "gap_s": 5.0}


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(TraceError("a.jsonl", 3, "gap_s is -1")))
    assert str(error) == "a.jsonl, line 3: gap_s is -1."
