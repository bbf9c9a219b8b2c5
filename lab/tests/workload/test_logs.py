"""Readers of lengths: logs of requests that are linked to conversations, sessions, and single requests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.tests.workload.helpers import lengths_of, write, write_lines
from pensieve_lab.workload import TraceError, read_trace
from pensieve_lab.workload.readers.chains import LoggedRequest, chain_requests


def chain(*requests):
    """Chain (time, input, output, parent) tuples whose ids are their numbers."""
    logged = (
        LoggedRequest(str(index), time_s, inputs, outputs, None if parent is None else str(parent))
        for index, (time_s, inputs, outputs, parent) in enumerate(requests)
    )
    return list(chain_requests(logged))


def test_a_prompt_is_the_input_without_the_history():
    one, two = chain((0, 100, 20, None), (5, 30, 5, None), (9, 150, 10, 0))
    assert [(t.prompt_tokens, t.output_tokens, t.gap_s) for t in one.turns] == [(100, 20, None), (30, 10, 9)]
    assert (one.conversation_id, one.arrival_s) == ("0", 0)
    assert (two.conversation_id, two.arrival_s) == ("1", 5)


def test_an_answer_that_was_left_out_of_the_next_input_is_made_up_for_later():
    (one,) = chain((0, 100, 50, None), (1, 120, 10, 0), (2, 400, 10, 1))
    assert [turn.prompt_tokens for turn in one.turns] == [100, 1, 239]
    assert one.num_history_tokens(2) + 239 == 400


@pytest.mark.parametrize(
    "second",
    [(1, 200, 10, None), (1, 200, 10, 7), (1, 99, 10, 0), (1, 100, 10, 0)],
    ids=["no parent", "a parent outside of the log", "a shorter input", "the same input again"],
)
def test_what_continues_nothing_begins_a_conversation_of_its_whole_input(second):
    one, two = chain((0, 100, 20, None), second)
    assert [turn.prompt_tokens for turn in one.turns] == [100]
    assert [turn.prompt_tokens for turn in two.turns] == [second[1]]


def test_a_request_is_continued_once():
    one, two = chain((0, 100, 20, None), (1, 150, 10, 0), (2, 160, 10, 0))
    assert [len(c.turns) for c in (one, two)] == [2, 1]
    assert two.turns[0].prompt_tokens == 160


def test_a_fork_is_of_the_session_that_it_forks_from():
    """This holds for every cause of a fork: the split into halves depends on the session."""
    root, edited, again, cut, other = chain(
        (0, 100, 20, None), (1, 150, 10, 0), (2, 160, 10, 0), (3, 170, 10, 0), (4, 90, 5, 1), (5, 9, 9, None)
    )
    assert [one.conversation_id for one in (root, edited, again, cut, other)] == ["0", "2", "3", "4", "5"]
    assert [one.session_id for one in (root, edited, again, cut, other)] == [None, "0", "0", "0", None]
    assert [one.root_id for one in (root, edited, again, cut, other)] == ["0", "0", "0", "0", "5"]
    one, two = chain((0, 100, 20, 77), (1, 150, 10, 77))
    assert one.root_id == two.root_id == "77", "both continue what lies before the log"


@given(
    st.lists(
        st.tuples(st.integers(1, 1000), st.integers(1, 1000), st.integers(-1, 30)), min_size=1, max_size=30
    )
)
def test_every_request_is_one_turn_and_no_context_falls_short_of_the_recorded(requests):
    log = [(i, inputs, outputs, p if 0 <= p < i else None) for i, (inputs, outputs, p) in enumerate(requests)]
    conversations = chain(*log)
    assert sum(len(c.turns) for c in conversations) == len(log)
    seen = sorted((c.arrival_s + sum(t.gap_s or 0 for t in c.turns[: k + 1]), t.output_tokens,
                   c.num_history_tokens(k) + t.prompt_tokens)
                  for c in conversations for k, t in enumerate(c.turns))  # fmt: skip
    for (time_s, inputs, outputs, _), (seen_s, seen_outputs, seen_inputs) in zip(log, seen, strict=True):
        assert (time_s, outputs) == (seen_s, seen_outputs)
        assert seen_inputs >= inputs


def mooncake(timestamp, inputs, outputs, hashes):
    return {"timestamp": timestamp, "input_length": inputs, "output_length": outputs, "hash_ids": hashes}


@pytest.mark.parametrize("name", ["m.jsonl", "m.jsonl.gz"])
def test_mooncake_finds_conversations_by_their_blocks(tmp_path, name):
    path = write_lines(
        tmp_path / name,
        mooncake(0, 1300, 100, [0, 1, 2]),
        mooncake(0, 600, 2, [0, 8]),  # of one full block, which is the system prompt of all
        mooncake(0, 1500, 10, [0, 3, 4]),
        mooncake(2000, 1700, 50, [0, 1, 5, 6]),  # keeps the two full blocks of the first
        mooncake(2500, 400, 1, [0]),
        mooncake(9000, 2100, 50, [0, 1, 5, 6, 7]),
    )
    trace = read_trace(path, format="mooncake")
    assert lengths_of(trace) == [[(1300, 100), (300, 50), (350, 50)], [(600, 2)], [(1500, 10)], [(400, 1)]]
    assert [turn.gap_s for turn in trace.conversations[0].turns] == [None, 2, 7]
    assert [c.arrival_s for c in trace.conversations] == [0, 0, 0, 2.5]


def test_mooncake_takes_parents_that_are_named(tmp_path):
    def request(line, parent, inputs):
        return {
            "line": line,
            "parent_line": parent,
            "timestamp_ms": line,
            "input_tokens": inputs,
            "output_tokens": 5,
        }

    path = write_lines(tmp_path / "m.jsonl", request(3, -1, 10), request(4, 2, 10), request(8, 3, 30))
    trace = read_trace(path, format="mooncake")
    assert [(c.conversation_id, len(c.turns)) for c in trace.conversations] == [("3", 2), ("4", 1)]


def bailian(chat_id, parent, timestamp, inputs=100, outputs=10, **fields):
    return {"chat_id": chat_id, "parent_chat_id": parent, "timestamp": timestamp, "input_length": inputs,
            "output_length": outputs, "type": "text", "turn": 1, "hash_ids": [1, 2], **fields}  # fmt: skip


def test_bailian_follows_parents_in_order_of_time(tmp_path):
    path = write_lines(
        tmp_path / "q.jsonl",
        bailian(9, 7, 61.25, 150),
        bailian(7, -1, 0.5),
        bailian(8, -1, 0.25, 30),
        bailian(4, 1, 2.0, 500),
    )
    trace = read_trace(path, format="bailian")
    assert [(c.conversation_id, c.arrival_s) for c in trace.conversations] == [
        ("8", 0.25),
        ("7", 0.5),
        ("4", 2),
    ]
    assert lengths_of(trace) == [[(30, 10)], [(100, 10), (40, 10)], [(500, 10)]]
    assert trace.conversations[1].turns[1].gap_s == 60.75


def burstgpt(session, *turns, start_s=4):
    fields = ("gap_s", "new_tokens", "output_tokens")
    return {
        "session": session,
        "start_s": start_s,
        "turns": [dict(zip(fields, t, strict=True)) for t in turns],
    }


def test_burstgpt_sessions_keep_their_gaps(tmp_path):
    path = write_lines(
        tmp_path / "b.jsonl", burstgpt("x", (None, 9, 4), (191, 2, 8)), burstgpt("y", (None, 1, 1))
    )
    trace = read_trace(path, format="burstgpt")
    assert lengths_of(trace) == [[(9, 4), (2, 8)], [(1, 1)]]
    assert [turn.gap_s for turn in trace.conversations[0].turns] == [None, 191]
    assert trace.conversations[0].arrival_s == 4


def agent(t, inputs, outputs, keep, **fields):
    known = {"think_time": 2.0, "api_time": 1.0, "type": "n", "stop": "tool_use"}
    return known | {"t": t, "in": inputs, "out": outputs, "hash_keep": keep} | fields


def agent_session(*requests, session_id="s"):
    return {"id": session_id, "block_size": 64, "requests": list(requests)}


def test_agent_sessions_are_cut_where_their_history_was_rewritten(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        agent_session(
            agent(0, 6400, 100, 0),
            agent(9, 7000, 50, 100),
            agent(20, 7500, 50, 104),  # a few blocks at the end moved
            agent(30, 3000, 0, 20),  # compacted, and cut off before its first token
            agent(40, 3500, 10, 46),
            agent(50, 9000, 10, 20),  # rewritten, and longer than before
        ),
    )
    trace = read_trace(path, format="agent-sessions")
    assert lengths_of(trace) == [[(6400, 100), (500, 50), (450, 50)], [(3000, 1), (499, 10)], [(9000, 10)]]
    assert [c.conversation_id for c in trace.conversations] == ["s:0", "s:3", "s:5"]
    assert all(c.arrival_s is None for c in trace.conversations)
    assert [(turn.gap_s, turn.think_s) for turn in trace.conversations[0].turns] == [
        (None, None),
        (9, 2),
        (11, 2),
    ]


def test_an_agents_think_time_behind_an_unknown_end_is_not_believed(tmp_path):
    unknown_end = agent(5, 200, 10, 1)
    del unknown_end["api_time"]
    path = write_lines(
        tmp_path / "a.jsonl", agent_session(agent(0, 100, 10, 0), unknown_end, agent(9, 300, 10, 3))
    )
    (conversation,) = read_trace(path, format="agent-sessions").conversations
    assert [(turn.gap_s, turn.think_s) for turn in conversation.turns] == [(None, None), (5, 2), (4, None)]


def test_sub_agents_are_conversations_of_their_own(tmp_path):
    nested = [agent(0, 50, 5, 0), agent(3, 100, 5, 0)]
    path = write_lines(
        tmp_path / "a.jsonl",
        agent_session(
            agent(0, 100, 10, 0),
            {"t": 4, "type": "subagent", "agent_id": "agent_001", "requests": nested},
            agent(9, 300, 10, 1),
        ),
    )
    trace = read_trace(path, format="agent-sessions")
    assert [c.conversation_id for c in trace.conversations] == ["s:0", "s/1:0"]
    assert lengths_of(trace) == [[(100, 10), (190, 10)], [(50, 5), (45, 5)]]


@pytest.mark.parametrize("zone", ["", "+00:00"])
def test_azure_rows_are_arrivals_of_single_turns(tmp_path, zone):
    rows = f"2023-11-16 18:15:46.6805900{zone},374,44\n2023-11-16 18:15:50.9951690{zone},396,109\n"
    path = write(tmp_path / "a.csv.gz", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    trace = read_trace(path, format="azure")
    assert lengths_of(trace) == [[(374, 44)], [(396, 109)]]
    assert [c.arrival_s for c in trace.conversations] == pytest.approx([0, 4.314579], abs=2e-6)


def test_lengths_are_single_turns_without_times(tmp_path):
    path = write(tmp_path / "l.csv", "num_prefill_tokens,num_decode_tokens,num_total_tokens\n74,918,992\n")
    trace = read_trace(path, format="lengths")
    assert lengths_of(trace) == [[(74, 918)]]
    assert trace.conversations[0].arrival_s is None


def test_a_row_without_an_id_is_no_turn_of_a_conversation_of_that_number(tmp_path):
    """The second row of a file was appended to the conversation whose id is 1."""
    text = "conversation_id,prompt_tokens,output_tokens\n1,10,20\n,30,40\n1,5,6\n"
    trace = read_trace(write(tmp_path / "l.csv", text), format="lengths")
    assert lengths_of(trace) == [[(10, 20), (5, 6)], [(30, 40)]]
    assert [one.conversation_id for one in trace.conversations] == ["1", "1#"]
    whole = write_lines(tmp_path / "l.jsonl", {"id": "1", "turns": [[1, 2]]}, {"turns": [[3, 4]]})
    trace = read_trace(whole, format="lengths")
    assert [one.conversation_id for one in trace.conversations] == ["1", "1#"]


def test_lengths_by_the_wall_clock_arrive_from_the_earliest_on(tmp_path):
    """Seconds since 1970 were used as arrivals: a run of ten minutes had no users, and the GPU was idle."""
    rows = ["b,1,2,1700000009", "a,3,4,1700000000", "a,5,6,1700000004"]
    text = "\n".join(["conversation_id,prompt_tokens,output_tokens,time_s", *rows])
    trace = read_trace(write(tmp_path / "l.csv", text), format="lengths")
    assert [(one.conversation_id, one.arrival_s) for one in trace.conversations] == [("b", 9), ("a", 0)]
    assert [turn.gap_s for turn in trace.conversations[1].turns] == [None, 4]


GOOD = {
    "mooncake": mooncake(5, 10, 10, [0]),
    "bailian": bailian(1, -1, 5),
    "burstgpt": burstgpt("x", (None, 1, 1)),
    "agent-sessions": agent_session(agent(1, 10, 10, 0)),
    "lengths": {"id": "x", "turns": [[1, 2]]},
}


@pytest.mark.parametrize(
    ("format", "bad", "reason"),
    [
        (
            "mooncake",
            mooncake(4, 10, 10, [0]),
            "timestamp is 4, but must be at least 5, the time of the request before",
        ),
        ("mooncake", mooncake(-4, 10, 10, [0]), "timestamp is -4, but must be a finite number, 0 or more"),
        ("mooncake", mooncake(5, 0, 10, [0]), "input_length is 0, but must be an int of at least 1"),
        ("mooncake", mooncake(5, 10, 10, ["a"]), "hash_ids is ['a'], but must be a list of ints"),
        ("mooncake", {"timestamp": 5, "input_length": 9, "output_length": 9}, "hash_ids is missing"),
        ("mooncake", mooncake(5, 10, 10, []) | {"parent_line": -2}, "parent_line is -2"),
        ("bailian", bailian(1, -1, 6), "chat_id is 1, but must be unique in the file; line 1 has it too"),
        ("bailian", bailian(2, None, 6), "parent_chat_id is None"),
        ("bailian", bailian(2, 1, "6"), "timestamp is '6'"),
        ("bailian", bailian(2, 1, 6, outputs=-1), "output_length is -1"),
        ("burstgpt", burstgpt("y"), "turns is [], but must be a list of at least 1 items"),
        ("burstgpt", burstgpt("y", (3, 1, 1)), "turns[0].gap_s is 3, but must be null"),
        ("burstgpt", burstgpt("y", (None, 1, 1), (None, 1, 1)), "turns[1].gap_s is None"),
        ("burstgpt", burstgpt("y", (None, 1, 1), (-1, 1, 1)), "turns[1].gap_s is -1"),
        ("burstgpt", burstgpt("y", (None, 1, 1.5)), "turns[0].output_tokens is 1.5"),
        ("burstgpt", burstgpt("x", (None, 1, 1)), "session is 'x', but must be unique in the file"),
        ("burstgpt", {"session": "y", "start_s": 0}, "turns is missing"),
        ("agent-sessions", agent_session(session_id="t"), "requests is [], but must be a list of at least 1"),
        ("agent-sessions", agent_session(agent(0, 1, -1, 0), session_id="t"), "requests[0].out is -1"),
        (
            "agent-sessions",
            agent_session(agent(5, 9, 1, 0), agent(4, 9, 1, 0), session_id="t"),
            "requests[1].t is 4",
        ),
        ("agent-sessions", GOOD["agent-sessions"], "id is 's', but must be unique in the file"),
        ("lengths", {"turns": [[True, 2]]}, "turns is [[True, 2]], but must be a list of [prompt, output]"),
        (
            "lengths",
            {"conversation_id": "x", "prompt_tokens": 1, "output_tokens": 1},
            "conversation_id is 'x', but must be different from the id of a row with all turns",
        ),
    ],
)
def test_a_bad_line_is_refused_by_name(tmp_path, format, bad, reason):
    with pytest.raises(TraceError) as caught:
        read_trace(write_lines(tmp_path / "a.jsonl", GOOD[format], bad), format=format)
    assert caught.value.line == 2
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("format", "text", "line", "reason"),
    [
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", 2, "TIMESTAMP is 'yesterday'"),
        ("azure", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,1\n", 2, "GeneratedTokens is missing"),
        ("lengths", "num_prefill_tokens,num_decode_tokens\n5,5\n5,-5\n", 3, "num_decode_tokens is -5"),
        ("lengths", "num_prefill_tokens,num_decode_tokens\n", None, "holds no conversation"),
        ("lengths", "", None, "holds no conversation"),
        ("mooncake", "", None, "holds no conversation"),
        ("burstgpt", '{"session": "x", "sta', 1, "is not JSON"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, format, text, line, reason):
    with pytest.raises(TraceError) as caught:
        read_trace(write(tmp_path / "a.txt", text), format=format)
    assert caught.value.line == line
    assert reason in caught.value.reason


@given(
    text=st.text(max_size=60), format=st.sampled_from(["mooncake", "bailian", "burstgpt", "azure", "lengths"])
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_noise_is_never_anything_but_a_trace_error(tmp_path, text, format):
    path = tmp_path / "a.txt"
    path.write_text(text)
    with pytest.raises(TraceError):
        read_trace(path, format=format)
