"""A chat's commands, typed and through a pipe, and what Ctrl-C does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from pensieve_jax import SamplingParams, TokenizerMissingError, UnknownConversationError
from tests.launching import ROOT, TINY_MODEL, load

chat_script = load("chat")
engine_config = load("pensieve_jax.commands.engine_flags").engine_config
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture
def chat(llm, text, request):
    return chat_script.Chat(llm, PARAMS, f"chat-{request.node.name}", text)


def said(chat, text, *lines):
    """What is printed for these lines."""
    start = len(text.getvalue())
    assert all([chat.handle(line) for line in lines])
    return text.getvalue()[start:]


def test_a_line_is_a_chat_turn(chat, llm, text):
    said(chat, text, "hello", "", "and again", "//not a command")
    turns = llm.history(chat.conversation_id).turns
    contents = [turn.messages[0]["content"] for turn in turns]
    assert contents == ["hello", "and again", "/not a command"]
    assert [len(turn.output_token_ids) for turn in turns] == [6, 6, 6]
    shown = said(chat, text, "/history")
    assert "[1] user: hello" in shown and "[3] reply: " in shown
    assert "last turn: " in said(chat, text, "/stats")


def test_truncate_and_regenerate(chat, llm, text):
    said(chat, text, "one", "two", "three")
    before = llm.history(chat.conversation_id).turns
    assert "from 0 to 3" in said(chat, text, "/truncate 4")
    assert "from 0 to 3" in said(chat, text, "/truncate")
    assert "kept 2 turns" in said(chat, text, "/truncate 2")
    said(chat, text, "/regenerate")
    after = llm.history(chat.conversation_id).turns
    assert len(after) == 2
    assert after[1].messages == before[1].messages
    assert after[1].output_token_ids == before[1].output_token_ids  # greedy
    said(chat, text, "/truncate 0")
    assert "no turn" in said(chat, text, "/regenerate")


def test_other_conversations(chat, llm, text):
    first = chat.conversation_id
    said(chat, text, "hello")
    assert "new conversation" in said(chat, text, f"/switch {first} two")
    said(chat, text, "hello")
    listing = said(chat, text, "/list")
    assert first in listing and f"*  {first} two" in listing
    assert "forgot" in said(chat, text, "/end")
    with pytest.raises(UnknownConversationError):
        llm.history(f"{first} two")
    assert f"in {first}, 1 turns" in said(chat, text, f"/switch {first}")


def test_errors_are_told_and_the_chat_goes_on(chat, text):
    assert "unknown command /hlp" in said(chat, text, "/hlp")
    assert "error: " in said(chat, text, "x" * 3000)
    assert "/regenerate" in said(chat, text, "/help")
    assert not chat.handle("/quit")


@pytest.mark.parametrize("line", ["/history", "/regenerate", "/truncate 5", "/truncate x", "/end"])
def test_an_empty_conversation_is_told_in_one_line(chat, text, line):
    assert said(chat, text, line) == "this conversation has no turns yet\n"


def test_no_conversations(chat, llm, text, monkeypatch):
    monkeypatch.setattr(llm, "conversations", list)
    listing = said(chat, text, "/list")
    assert "no conversations yet" in listing and listing.count("\n") == 1


def test_an_interrupt_cancels_the_reply(chat, llm, text, monkeypatch):
    said(chat, text, "hello")
    before = llm.history(chat.conversation_id).turns
    monkeypatch.setattr(chat_script, "printable", lambda delta: signal.raise_signal(signal.SIGINT) or delta)
    assert "(cancelled)" in said(chat, text, "never mind")
    assert llm.history(chat.conversation_id).turns == before
    monkeypatch.undo()
    said(chat, text, "still there?")
    assert len(llm.history(chat.conversation_id).turns) == 2


def test_a_full_conversation_says_what_can_be_done(chat, text):
    too_long = "x" * 3000
    assert chat_script.FULL not in said(chat, text, too_long)  # too long for any conversation
    assert said(chat, text, "hello", too_long).endswith(f"{chat_script.FULL}\n")


def test_a_reply_that_was_cut_is_marked(chat, text):
    assert said(chat, text, "hello").endswith(
        f"\n(cut after {PARAMS.max_tokens} tokens: {chat_script.CUT})\n"
    )


def test_a_model_of_ids_only_is_refused(llm, text, monkeypatch):
    monkeypatch.setattr(llm, "tokenizer", None)
    with pytest.raises(TokenizerMissingError):
        chat_script.Chat(llm, PARAMS, "ids", text)


def test_by_default_a_step_is_one_token_of_one_conversation(launch, monkeypatch):
    seen = []
    monkeypatch.setattr(chat_script, "main", lambda: seen.append(engine_config()) or 0)
    assert launch("chat", shared_llm=False) == 0
    assert seen[0].scheduler.token_buckets == (1, 32, 256)
    assert seen[0].scheduler.max_num_running == 1
    assert seen[0].runner.compilation_cache_dir == str(chat_script.CACHE_DIR)


def test_through_a_pipe(tmp_path, compilation_cache):
    """The whole program, with a history that a second run would find."""
    command = [sys.executable, "scripts/chat.py", f"--model={TINY_MODEL}", "--token_buckets=64"]
    command += ["--max_num_running=8"]
    command += ["--gpu_pages=24", "--max_tokens=4", f"--history={tmp_path / 'chats.sqlite'}"]
    command += [f"--compilation_cache_dir={compilation_cache}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        input="hello\n/history\n/nonsense\n/list\n",
        capture_output=True,
        text=True,
        check=False,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert "[1] user: hello" in done.stdout
    assert "unknown command /nonsense" in done.stdout
    assert "*  default" in done.stdout
    assert done.stderr == ""
    assert (tmp_path / "chats.sqlite").exists()
