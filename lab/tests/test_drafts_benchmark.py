"""A small run of `benchmark_drafts`, and the edits that it makes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.launching import load

tasks = load("pensieve_lab.drafts.tasks")
ROOT = Path(__file__).parents[2]


def test_search_and_replace_makes_the_new_file() -> None:
    choose, others = random.Random(5), [f"other {i}\n" for i in range(9)]
    for _ in range(30):
        old = [f"line {choose.randrange(12)} of text\n" for _ in range(60)]
        new = tasks.edited(old, others, choose)
        text, result = "".join(old), "".join(new)
        assert new != old
        for block in tasks.search_and_replace(old, new).split(">>>>>>> REPLACE\n")[:-1]:
            before, after = block.removeprefix("<<<<<<< SEARCH\n").split("=======\n")
            assert before in text and after in result
        assert tasks.whole_file(old, new) == result


def test_edits_are_the_same_in_each_form_and_run() -> None:
    first, again, other = (
        list(tasks.edits(ROOT, 5, write))
        for write in (tasks.whole_file, tasks.whole_file, tasks.search_and_replace)
    )
    assert first == again and len(first) == 5
    assert [context for context, _ in first] == [context for context, _ in other]


def test_chats_are_read(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    lines = [
        {"turns": [["U", "a"], ["A", "b"], ["U", "c"], ["A", "d"], ["U", "e"]]},
        {"turns": [["U", "a"], ["A", "b"]]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines * 3))
    assert list(tasks.chats(path, 2)) == [("a\nb\nc\n", "d")] * 2


@pytest.mark.long
def test_every_set_is_measured_with_and_without_drafts(launch, compilation_cache, capsys) -> None:
    launch(
        "benchmark_drafts",
        shared_llm=False,
        model="random:llama-tiny",
        users="1,2",
        num_turns=8,
        max_prompt_tokens=1900,
        max_reply_tokens=60,
        compilation_cache_dir=compilation_cache,
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert found["num_wrong_replies"] == 0
    with_drafts, without = found["figures"]["history"], found["figures"]["off"]
    assert with_drafts["num_compilations_while_serving"] == 0
    assert with_drafts["edit, whole file"]["1"]["num_accepted_draft_tokens"] > 0
    for name, users in with_drafts.items():
        if name != "num_compilations_while_serving":
            assert set(users) == {"1", "2"}
            assert without[name]["1"]["num_drafts"] == 0
            assert without[name]["1"]["reply_tokens"] == users["1"]["reply_tokens"] > 0
