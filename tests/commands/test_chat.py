"""A chat's commands, typed and through a pipe, and the effects of Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from pensieve_jax import (
    ChatTemplateError,
    InvalidRequestError,
    SamplingParams,
    TokenizerMissingError,
    UnknownConversationError,
    Usage,
)
from pensieve_jax.commands import words
from tests.commands.terminal import Terminal
from tests.launching import ROOT, TINY_MODEL, load

chat_script = load("chat")
session = load("pensieve_jax.commands.chat_session")
engine_config = load("pensieve_jax.commands.engine_flags").engine_config
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture
def chat(llm, text, request):
    return session.Chat(llm, PARAMS, f"chat-{request.node.name}", text)


def said(chat, text, *lines):
    """Return what is printed for these lines."""
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
    assert "from 0 to 3" in said(chat, text, "/truncate " + "1" * 5000)
    assert "kept 2 turns" in said(chat, text, "/truncate 2")
    said(chat, text, "/regenerate")
    after = llm.history(chat.conversation_id).turns
    assert len(after) == 2
    assert after[1].messages == before[1].messages
    assert after[1].output_token_ids == before[1].output_token_ids  # greedy
    assert "kept 1 turn, " in said(chat, text, "/truncate 1")
    assert "kept 0 turns, 0 tokens" in said(chat, text, "/truncate 0")
    assert "no turn" in said(chat, text, "/regenerate")


def test_commands_on_other_chats(chat, llm, text):
    first = chat.conversation_id
    said(chat, text, "hello")
    assert "new conversation" in said(chat, text, f"/switch {first} two")
    said(chat, text, "hello")
    listing = said(chat, text, "/list")
    assert first in listing and f"*  {first} two" in listing
    assert "forgot" in said(chat, text, "/end")
    with pytest.raises(UnknownConversationError):
        llm.history(f"{first} two")
    assert f"in {first}, 1 turn\n" in said(chat, text, f"/switch {first}")


def test_another_conversation_is_ended_by_its_id(chat, llm, text):
    """The session's own conversation, which was not named, is kept."""
    first = chat.conversation_id
    said(chat, text, "hello", f"/switch {first} carl", "hello")
    assert said(chat, text, f"/end {first}") == f"forgot {first}\n"
    assert len(llm.history(f"{first} carl").turns) == 1 and chat.conversation_id == f"{first} carl"
    with pytest.raises(UnknownConversationError):
        llm.history(first)
    shown = said(chat, text, f"/end {first}")
    assert shown.startswith("error: ") and repr(first) in shown
    assert len(llm.history(f"{first} carl").turns) == 1, "nothing was ended"


@pytest.mark.parametrize("name", ["/help", "/history", "/regenerate", "/where", "/list", "/quit"])
def test_a_command_without_parameters_refuses_an_argument(chat, llm, text, name):
    said(chat, text, "hello")
    before = llm.history(chat.conversation_id).turns
    assert said(chat, text, f"{name} default") == f"{name} takes no argument\n"
    assert llm.history(chat.conversation_id).turns == before
    assert said(chat, text, "/stats al") == '/stats takes no argument, or "all"\n'


def test_errors_are_shown_and_the_chat_continues(chat, text):
    assert "unknown command /hlp" in said(chat, text, "/hlp")
    assert "error: " in said(chat, text, "x" * 3000)
    assert "/regenerate" in said(chat, text, "/help")
    assert not chat.handle("/quit")


@pytest.mark.parametrize("line", ["/history", "/regenerate", "/truncate 5", "/truncate x", "/where", "/end"])
def test_an_empty_conversation_is_reported_in_one_line(chat, text, line):
    assert said(chat, text, line) == "this conversation has no turns yet\n"


def test_without_conversations_the_list_says_so(chat, llm, text, monkeypatch):
    monkeypatch.setattr(llm, "conversations", list)
    listing = said(chat, text, "/list")
    assert "no conversations yet" in listing and listing.count("\n") == 1


def test_an_interrupt_cancels_the_reply(chat, llm, text, monkeypatch):
    said(chat, text, "hello")
    before = llm.history(chat.conversation_id).turns
    monkeypatch.setattr(session, "printable", lambda delta: signal.raise_signal(signal.SIGINT) or delta)
    assert "(cancelled)" in said(chat, text, "never mind")
    assert llm.history(chat.conversation_id).turns == before
    monkeypatch.undo()
    said(chat, text, "still there?")
    assert len(llm.history(chat.conversation_id).turns) == 2


def test_an_interrupt_of_a_second_answer_says_that_the_turn_was_cancelled(chat, llm, text, monkeypatch):
    said(chat, text, "hello", "and again")
    monkeypatch.setattr(session, "printable", lambda delta: signal.raise_signal(signal.SIGINT) or delta)
    assert "the turn is removed" in said(chat, text, "/regenerate")
    assert len(llm.history(chat.conversation_id).turns) == 1


def test_each_turn_is_accounted_for_on_request(llm, text):
    chat = session.Chat(llm, PARAMS, "chat-accounts", text, tells_accounts=True)
    first, second = (said(chat, text, line).splitlines()[-1] for line in ("hello", "and again"))
    assert re.fullmatch(r"\[\d+ new tokens; first token after .*\]", first)
    found = re.fullmatch(
        r"\[(\d+) tokens reused from device memory, 0 recomputed, (\d+) new; first token after [\d.]+ m?s\]",
        second,
    )
    turns = llm.history("chat-accounts").turns
    assert found, second
    assert int(found[1]) == len(turns[0].prompt_token_ids) + 6 - 1  # the last one has no KV yet
    assert int(found[2]) == len(turns[1].prompt_token_ids) + 1
    assert found[0].strip("[]") in said(chat, text, "/stats")


def test_accounts_as_text():
    usage = Usage(
        prompt_tokens=12,
        reused_gpu_tokens=1412,
        swapped_in_tokens=96,
        recomputed_tokens=7,
        prefilled_tokens=13,
        output_tokens=5,
        num_suspensions=1,
    )
    assert words.describe_usage(usage, 0.031, "GPU memory") == (
        "1,412 tokens reused from GPU memory, 96 copied from host memory, 7 recomputed, 13 new; "
        "paused 1 time for lack of memory; first token after 31 ms"
    )
    assert [words.duration(s) for s in (0.0312, 0.9996, 75, 99.6, 6000)] == [
        *("31 ms", "1.0 s", "75.0 s", "2 min", "1.7 h")
    ]


def test_new_conversations_begin_with_the_system_prompt_and_share_its_kv_cache(llm, text):
    system = "You are a bookshop. " * 8
    chat = session.Chat(llm, PARAMS, "chat-system", text, system=system, tells_accounts=True)
    said(chat, text, "hello")
    shared = said(chat, text, "/switch chat-system two", "hello").splitlines()[-1]
    num_shared = int(re.match(r"\[(\d+) tokens reused", shared)[1])
    assert num_shared and num_shared % 32 == 0
    for name in ("chat-system", "chat-system two"):
        (turn,) = llm.history(name).turns
        assert [message["role"] for message in turn.messages] == ["system", "user"]
    said(chat, text, "/regenerate", "more")
    again, more = llm.history("chat-system two").turns
    assert again.output_token_ids == turn.output_token_ids and again.messages == turn.messages
    assert [message["role"] for message in more.messages] == ["user"]


def test_a_system_prompt_that_cannot_be_shared_is_still_sent(llm, text, monkeypatch):
    def refuse(_):
        raise ChatTemplateError("written as one")

    monkeypatch.setattr(llm, "share_prefix", refuse)
    chat = session.Chat(llm, PARAMS, "chat-unshared", text, system="Be kind.")
    said(chat, text, "hello", "again", "/batch chat-unshared,chat-unshared-2 hi")
    roles = [[m["role"] for m in turn.messages] for turn in llm.history("chat-unshared").turns]
    assert roles == [["system", "user"], ["user"], ["user"]]
    (turn,) = llm.history("chat-unshared-2").turns
    assert [m["role"] for m in turn.messages] == ["system", "user"]


def test_several_conversations_are_answered_together(chat, llm, text):
    said(chat, text, "hello")
    name = chat.conversation_id
    before = llm.stats()["num_steps"]
    shown = said(chat, text, f"/batch {name},{name}-b,{name}-c how are you?")
    assert llm.stats()["num_steps"] - before < 2 * 6
    assert all(f"{one}: " in shown for one in (name, f"{name}-b", f"{name}-c"))
    assert [len(llm.history(one).turns) for one in (name, f"{name}-b", f"{name}-c")] == [2, 1, 1]
    assert "takes conversation ids" in said(chat, text, "/batch a,b")
    assert "busy" in said(chat, text, "/batch x,x hi")
    assert not llm.unfinished


def test_an_interrupt_cancels_a_batch(chat, llm, text, monkeypatch):
    name, step = chat.conversation_id, llm.step
    monkeypatch.setattr(llm, "step", lambda: signal.raise_signal(signal.SIGINT) or step())
    assert f"(cancelled: {name}-b, {name}-c)" in said(chat, text, f"/batch {name}-b,{name}-c hi")
    assert not llm.unfinished
    with pytest.raises(UnknownConversationError):
        llm.history(f"{name}-b")


def test_where_shows_the_tiers_of_chunks(chat, text):
    said(chat, text, "hello")
    assert "in device memory" in said(chat, text, "/where")


def test_stats_are_a_few_lines_and_every_counter_on_demand(chat, text):
    said(chat, text, "hello")
    assert said(chat, text, "/stats").count("\n") == 3
    assert "num_swap_in_copies" in said(chat, text, "/stats all")


def test_help_lists_every_command(chat, text):
    shown = said(chat, text, "/help")
    known = {*chat._commands, *chat._plain_commands, "/quit"}
    assert all(name in shown for name in known)
    assert set(session.COMMANDS) == known
    assert max(map(len, shown.splitlines())) <= 80


def test_a_full_conversation_gives_a_hint(chat, text):
    too_long = "x" * 3000
    assert session.FULL not in said(chat, text, too_long)  # too long for any conversation
    assert said(chat, text, "hello", too_long).endswith(f"{session.FULL}\n")


def test_a_truncated_reply_is_marked(chat, text):
    assert said(chat, text, "hello").endswith(f"\n(cut after {PARAMS.max_tokens} tokens: {session.CUT})\n")


def test_a_model_of_ids_only_is_refused(llm, text, monkeypatch):
    monkeypatch.setattr(llm, "tokenizer", None)
    with pytest.raises(TokenizerMissingError):
        session.Chat(llm, PARAMS, "ids", text)


@pytest.mark.parametrize("conversation_id", ["", "a\0b", "\ud800"])
def test_an_invalid_id_is_refused_before_anything_is_loaded(launch, monkeypatch, conversation_id):
    """Once, the model was loaded, every line was an error, and the status was 0."""
    monkeypatch.setattr(load("chat"), "open_llm", lambda **_: pytest.fail("loaded"))
    with pytest.raises(InvalidRequestError, match="--conversation_id is "):
        launch("chat", shared_llm=False, conversation_id=conversation_id)


@pytest.mark.long
def test_through_a_pipe(tmp_path, compilation_cache):
    """Runs the whole program, with a history that a second run would find."""
    command = [sys.executable, "scripts/chat.py", f"--model={TINY_MODEL}", "--token_buckets=64"]
    command += ["--max_num_running=8"]
    command += [
        "--gpu_pages=24",
        "--cpu_pages=0",
        "--max_context_tokens=512",
        "--max_tokens=4",
        f"--history={tmp_path / 'chats.sqlite'}",
    ]
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
    assert done.stderr == "loading; the first start compiles for a minute or more\n"
    assert (tmp_path / "chats.sqlite").exists()


@pytest.mark.long
def test_on_a_terminal(tmp_path, compilation_cache):
    """Types a line too long for terminals, and Ctrl-C in a reply and at the prompt; checks the history."""
    command = [sys.executable, "scripts/chat.py", f"--model={TINY_MODEL}", "--token_buckets=64"]
    command += [
        "--gpu_pages=24",
        "--max_num_running=8",
        "--cpu_pages=0",
        "--max_tokens=700",
        "--ignore_eos",
        "--max_context_tokens=768",
    ]
    command += [f"--compilation_cache_dir={compilation_cache}", "--noprogress"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment |= {"XDG_STATE_HOME": str(tmp_path / "state")}
    with Terminal(command, root=ROOT, environment=environment) as one:
        one.see("/help lists commands")
        one.see("default> ")
        one.type("x" * 5000 + "\r")
        one.see("error: ")
        one.see("5")  # thousand tokens, not 4,096 bytes
        one.see("default> ")
        one.type("hello\r")
        one.see("hello\n")
        one.see_something()  # of the reply
        one.type("\x03")
        one.see("(cancelled)")
        one.see("default> ")
        one.type("half a line")
        one.see("half a line")
        one.interrupt()
        one.see("Ctrl-C again")
        one.see("default> ")
        one.type("/history\r")
        one.see(session.NO_TURNS)
        one.see("default> ")
        one.interrupt()
        one.see("Ctrl-C again")
        one.see("default> ")
        one.interrupt()
        assert one.wait() == 130
    kept = (tmp_path / "state" / "pensieve_jax" / "chat_lines.jsonl").read_text().splitlines()
    assert [len(line) for line in kept] == [5002, 7, 10]


def test_the_history_shows_calls(chat, llm, text):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": "so?"},
    ]
    llm.chat(messages, PARAMS, conversation_id=chat.conversation_id)
    shown = said(chat, text, "/history")
    assert '[1] assistant: add({"x": 1})' in shown and "None" not in shown
