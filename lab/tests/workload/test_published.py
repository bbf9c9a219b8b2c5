"""Files as their publishers write them: read whole, guessed by content, refused by line and field."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from lab.tests.workload.helpers import lengths_of, write, write_lines
from lab.tests.workload.test_chats import CHAT, TEXT_FORMATS, write_chats
from lab.tests.workload.test_logs import agent, agent_session, bailian, burstgpt, mooncake
from pensieve_lab.workload import FORMATS, TraceError, count_words, guess_format, read_trace
from pensieve_lab.workload.readers.mooncake import read_mooncake

BURST_COLUMNS = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURST_FIRST_FILES = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


def burst_csv(*rows, columns=BURST_COLUMNS):
    return "\n".join([columns, *rows]) + "\n"


def burst_row(time_s, session, elapsed_s, request, response):
    log = "Conversation log" if session else "API log"
    return f"{time_s},{session},{elapsed_s},GPT-4,{request},{response},{request + response},{log}"


@pytest.mark.parametrize("name", ["BurstGPT_3.csv", "BurstGPT_3.csv.gz"])
def test_burstgpt_requests_hold_the_rounds_before_them(tmp_path, name):
    path = write(
        tmp_path / name,
        burst_csv(
            burst_row("19440110.0", "1722ac82-0a46", 43, 906, 446),
            burst_row("19440161.0", "d5983bf9-4b48", 2, 36, 29),
            burst_row("19440301.0", "1722ac82-0a46", 10, 906 + 446 + 279, 282),
            burst_row("19440303.0", "1722ac82-0a46", 1, 50, 7),  # what was left out here is unknown
        ),
    )
    first, second = read_trace(path, format=guess_format(path)).conversations
    assert (first.conversation_id, first.arrival_s, second.arrival_s) == ("1722ac82-0a46", 0, 51)
    assert [(t.prompt_tokens, t.output_tokens) for t in first.turns] == [(906, 446), (279, 282), (1, 7)]
    assert [t.gap_s for t in first.turns] == [None, 191, 2]
    assert [t.think_s for t in first.turns] == [None, 191 - 43, 0], "an answer of 10 s, 2 s before the next"


def test_burstgpt_requests_hold_four_rounds_and_no_more(tmp_path):
    rounds = [(10, 1), (20, 2), (30, 3), (40, 4), (50, 5), (60, 6)]
    rows = []
    for index, (new, response) in enumerate(rounds):
        sent_again = sum(map(sum, rounds[max(index - 4, 0) : index]))
        rows.append(burst_row(f"{index}.0", "s", 0, sent_again + new, response))
    path = write(tmp_path / "b.csv", burst_csv(*rows))
    assert lengths_of(read_trace(path, format="burstgpt")) == [rounds]


def test_burstgpt_rows_that_belong_to_no_session_or_failed_are_left_out_and_told(tmp_path):
    rows = burst_row("5.0", "s", 1, 7, 3), burst_row("6.0", "", 1, 9, 9), burst_row("7.0", "s", 0, 12, 0)
    told: list[TraceError] = []
    path = write(tmp_path / "b.csv", burst_csv(*rows))
    assert lengths_of(read_trace(path, format="burstgpt", on_skip=told.append)) == [[(7, 3)]]
    assert [error.reason for error in told] == [
        "has 1 requests without a Session ID, which are left out",
        "has 1 requests without a token in or out, which are left out",
    ]


def test_burstgpts_first_files_have_no_sessions(tmp_path):
    rows = "5,ChatGPT,472,18,490,Conversation log", "45,ChatGPT,1087,230,1317,API log"
    path = write(tmp_path / "BurstGPT_1.csv", burst_csv(*rows, columns=BURST_FIRST_FILES))
    trace = read_trace(path, format=guess_format(path))
    assert lengths_of(trace) == [[(472, 18)], [(1087, 230)]]
    assert [c.arrival_s for c in trace.conversations] == [0, 40]


def published(request, hashes):
    """Make an agent's request with its blocks instead of the number of kept ones."""
    return {name: value for name, value in request.items() if name != "hash_keep"} | {"hash_ids": hashes}


def published_session(session_id="trace_0001"):
    pause = {"think_time": 157.0}
    return agent_session(
        published(agent(0.0, 640, 476, 0, type="s"), list(range(10))),
        published(agent(11.0, 640, 452, 0), list(range(10))),  # asked again, as is
        published(agent(178.0, 1300, 424, 0, **pause), [*range(18), 90, 91]),
        published(agent(185.0, 700, 10, 0), [0, 1, 70, 71, 72, 73, 74, 75, 76, 77]),  # rewritten
        session_id=session_id,
    )


TURNS_OF_PUBLISHED = [[(640, 452), (208, 424)], [(700, 10)]]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_agents_session_as_published(tmp_path, indent, suffix):
    path = write(tmp_path / f"trace_0001.json{suffix}", json.dumps(published_session(), indent=indent))
    trace = read_trace(path, format=guess_format(path))
    assert lengths_of(trace) == TURNS_OF_PUBLISHED
    assert [(t.gap_s, t.think_s) for t in trace.conversations[0].turns] == [(None, None), (178, 157)]


def test_agents_sessions_are_a_directory(tmp_path):
    for number in (2, 1):
        session = published_session(f"trace_{number}")
        write(tmp_path / f"trace_{number}.json", json.dumps(session))
    write(tmp_path / "cache_hit_rates.txt", "beside them")
    trace = read_trace(tmp_path, format=guess_format(tmp_path))
    assert lengths_of(trace) == 2 * TURNS_OF_PUBLISHED
    assert trace.conversations[0].conversation_id == "trace_1:0"
    assert [one.root_id for one in trace.conversations] == ["trace_1"] * 2 + ["trace_2"] * 2


def test_a_directory_without_sessions_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"without a \.json file"):
        read_trace(tmp_path, format="agent-sessions")


LENGTHS = [[(40, 35), (21, 67)], [(9, 1)]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "a.csv",
            "conversation_id,prompt_tokens,output_tokens,time_s\nx,40,35,5\ny,9,1,6\nx,21,67,65.5\n",
        ),
        (
            "a.jsonl",
            '{"conversation_id": "x", "prompt_tokens": 40, "output_tokens": 35, "time_s": 5}\n'
            '{"conversation_id": "y", "prompt_tokens": 9, "output_tokens": 1, "time_s": 6}\n'
            '{"conversation_id": "x", "prompt_tokens": 21, "output_tokens": 67, "time_s": 65.5}\n',
        ),
        ("b.jsonl.gz", '{"id": "x", "turns": [[40, 35], [21, 67]]}\n{"id": "y", "turns": [[9, 1]]}\n'),
        ("b.json", '[{"turns": [[40, 35], [21, 67]]},\n {"turns": [[9, 1]]}]'),
    ],
)
def test_lengths_of_turns_and_of_conversations(tmp_path, name, text):
    path = write(tmp_path / name, text)
    trace = read_trace(path, format=guess_format(path))
    assert lengths_of(trace) == LENGTHS
    if name.startswith("a"):
        assert [c.arrival_s for c in trace.conversations] == [0, 1]
        assert [t.gap_s for t in trace.conversations[0].turns] == [None, 60.5]


ODD_IDS = ["007", "7", "12e5", "1200000.0", "nan", "1_0", "10"]


@pytest.mark.parametrize("format", ["lengths", "burstgpt"])
def test_ids_of_a_table_are_text_whatever_they_look_like(tmp_path, format):
    if format == "lengths":
        rows = [f"{name},3,4" for name in ODD_IDS for _ in range(2)]
        text = "\n".join(["conversation_id,prompt_tokens,output_tokens", *rows])
    else:
        text = burst_csv(*(burst_row("1.0", name, 1, 100, 4) for name in ODD_IDS for _ in range(2)))
    found = read_trace(write(tmp_path / "a.csv", text), format=format).conversations
    assert [(one.conversation_id, len(one.turns)) for one in found] == [(name, 2) for name in ODD_IDS]


@pytest.mark.parametrize(
    ("format", "name", "text", "line", "reason"),
    [
        ("burstgpt", "b.csv", burst_csv("x,s,1,m,1,1,2,l"), 2, "Timestamp is 'x', but must be a finite"),
        (
            "burstgpt",
            "b.csv",
            burst_csv(burst_row(9, "s", 1, 1, 1), burst_row(8, "s", 1, 1, 1)),
            3,
            "Timestamp is 8, but must be at least 9, the time of the row before",
        ),
        ("burstgpt", "b.csv", burst_csv("1,s,1,m,-1,1,2,l"), 2, "Request tokens is -1, but must be an int"),
        ("burstgpt", "b.csv", burst_csv("1,s,1,m,1,x,2,l"), 2, "Response tokens is 'x'"),
        ("burstgpt", "b.csv", burst_csv("1,s,-2,m,1,1,2,l"), 2, "Elapsed time is -2"),
        ("burstgpt", "b.csv", burst_csv("1,s,1,m,1"), 2, "has 5 values, but must have 8, as the header"),
        ("burstgpt", "b.csv", "Timestamp,Model\n1,m\n", 2, "Request tokens is missing"),
        ("burstgpt", "b.csv", BURST_COLUMNS, None, "holds no conversation"),
        ("agent-sessions", "t.json", '{\n "id": "t",\n "block', 3, "is not JSON"),
        (
            "agent-sessions",
            "t.json",
            json.dumps(agent_session(published(agent(0, 9, 1, 0), 7))),
            1,
            "requests[0].hash_ids is 7, but must be a list",
        ),
        (
            "agent-sessions",
            "t.json",
            json.dumps(agent_session({"t": 0, "in": 9, "out": 1})),
            1,
            "requests[0].hash_keep is missing",
        ),
        ("lengths", "l.csv", "prompt_tokens,output_tokens\n5,5\n5,0\n", 3, "output_tokens is 0, but must"),
        ("lengths", "l.csv", "prompt_tokens,time_s\n5,1\n", 2, "output_tokens is missing"),
        (
            "lengths",
            "l.csv",
            "conversation_id,prompt_tokens,output_tokens,time_s\na,1,1,9\na,1,1,8\n",
            3,
            "time_s is 8, but must be at least 9, the time of the turn before",
        ),
        ("lengths", "l.jsonl", '{"turns": [[1, 1]]}\n{"turns": [[1, 0]]}\n', 2, "turns is [[1, 0]]"),
        ("lengths", "l.jsonl", '{"turns": []}\n', 1, "turns is [], but must be a list of at least 1"),
        ("lengths", "l.jsonl", '{"id": "a", "turns": [[1, 1]]}\n' * 2, 2, "id is 'a', but must be unique"),
    ],
)
def test_a_bad_file_is_refused_by_line_and_field(tmp_path, format, name, text, line, reason):
    with pytest.raises(TraceError) as caught:
        read_trace(write(tmp_path / name, text), format=format)
    assert (caught.value.line, caught.value.path.name) == (line, name)
    assert reason in caught.value.reason


def test_every_format_is_guessed(tmp_path):
    files = {
        "mooncake": write_lines(tmp_path / "m", mooncake(0, 1, 1, [])),
        "bailian": write_lines(tmp_path / "q", bailian(1, -1, 0)),
        "burstgpt": write_lines(tmp_path / "b", burstgpt("x", (None, 9, 4))),
        "agent-sessions": write_lines(tmp_path / "a", agent_session(agent(0, 1, 1, 0))),
        "azure": write(
            tmp_path / "z.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\n"
        ),
        "lengths": write(tmp_path / "l.csv", '\n"num_prefill_tokens","num_decode_tokens"\n5,5\n'),
        **{format: write_chats(tmp_path / format, format, CHAT) for format in TEXT_FORMATS},
    }
    (tmp_path / "pensieve").touch()
    files["pensieve"] = tmp_path / "pensieve"
    read_trace(files["azure"], format="azure").save(files["pensieve"])
    assert files.keys() == set(FORMATS)
    for format, path in files.items():
        guessed = guess_format(path)
        assert guessed == ("openai" if format == "vllm" else format)  # the same fields, the same reader
        assert read_trace(path, format=guessed, count_tokens=count_words).num_turns


@pytest.mark.parametrize(
    ("text", "shown"),
    [("", "''"), ("[]", "none"), ('{"a": 1, "turns": 7}', "'a', 'turns'"), ("a,b\n1,2\n", "'a', 'b'")],
)
def test_what_is_of_no_format_says_what_it_has(tmp_path, text, shown):
    with pytest.raises(TraceError) as caught:
        guess_format(write(tmp_path / "x", text))
    assert f"({shown}): name the format" in caught.value.reason


def test_text_formats_are_arrays_or_lines(tmp_path):
    chat = {"conversations": [{"from": "human", "value": "one, two"}, {"from": "gpt", "value": "three"}]}
    array = write(tmp_path / "a.json", json.dumps([chat, chat]))
    lines = write_lines(tmp_path / "b.json", chat, chat)
    for path in (array, lines):
        assert guess_format(path) == "sharegpt"
        assert lengths_of(read_trace(path, format="sharegpt", count_tokens=count_words)) == [[(3, 1)]] * 2


def test_words_and_marks_are_counted():
    assert count_words("It's 3.5 cm, über-long!") == 12


@pytest.mark.parametrize("seed", range(5))
def test_mooncake_sessions_are_found_again_by_their_hashes(tmp_path, seed):
    """Conversations whose blocks are known; the file has them in order of time, without a session."""
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    requests, next_block = [], 1
    for session in range(40):
        blocks, num_tokens, time_ms = [0], 0, int(rng.integers(0, 10**6))
        for _ in range(rng.integers(1, 6)):
            num_tokens += int(rng.integers(1024, 3000))  # two full blocks, for the first is of all
            while len(blocks) < -(-num_tokens // 512):
                blocks.append(next_block)
                next_block += 1
            requests.append((time_ms, session, mooncake(time_ms, num_tokens, 5, list(blocks))))
            # A block that was not full gets another hash when it is.
            del blocks[num_tokens // 512 :]
            num_tokens += 5
            time_ms += int(rng.integers(1, 10**5))
    requests.sort(key=lambda request: request[:2])
    path = write_lines(tmp_path / "m.jsonl", *(line for _, _, line in requests))
    found = {
        requests[int(conversation.conversation_id)][1]: len(conversation.turns)
        for conversation in read_mooncake(path)
    }
    assert found == Counter(session for _, session, _ in requests)
