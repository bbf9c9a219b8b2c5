"""What the demonstration says while it works, and how it says what its seconds are worth."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pensieve_jax.commands import demo_run, demo_screen
from pensieve_jax.commands.demo_speed import Speed
from pensieve_jax.text import ChatFormat, EarlierTurn
from pensieve_jax.text.loading import byte_tokenizer


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Reference:
    """Finds each turn as it is."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def replay_turn(self, history: Any, prompt: Any, token_ids: Any, *_: object) -> SimpleNamespace:
        return SimpleNamespace(token_ids=np.array(token_ids), margins=np.ones(1))


def turns(number: int) -> list[Any]:
    output = SimpleNamespace(token_ids=(1, 2), seed=0)
    return [SimpleNamespace(output=output, history_ids=(), prompt_ids=(), params=None)] * number


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_run, "load_model", lambda *_, **__: None)
    monkeypatch.setattr(demo_run, "resolve_model", lambda model: model)
    monkeypatch.setattr(demo_run, "DenseReference", _Reference)


def test_progress_is_lines_where_there_is_no_terminal(
    replayed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)
    equal, _ = demo_run.replay("model", turns(30))
    assert equal == [True] * 30
    assert said.getvalue().splitlines() == [
        f"{number} of 30 turns are replayed by the dense model" for number in (12, 24, 30)
    ]


def test_a_terminal_gets_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    said = _Terminal()
    monkeypatch.setattr("sys.stderr", said)
    demo_run.say_progress("anything")
    assert said.getvalue() == ""


@pytest.mark.parametrize(("load", "is_busy"), [(0.0, False), (0.9, False), (1.0, True), (123.4, True)])
def test_seconds_beside_other_work_are_said_to_be_worth_little(load: float, is_busy: bool) -> None:
    usage = SimpleNamespace(prefilled_tokens=7, recomputed_tokens=0, resume_recomputed_tokens=0)
    turn: Any = SimpleNamespace(output=SimpleNamespace(usage=usage), history_ids=(1,) * 9, prompt_ids=(2,))
    kept, scratch = Speed(928, 0.012, 600.0), Speed(928, 0.24, 60.0)
    lines = demo_screen.savings([turn], kept, scratch, load=load, num_processors=2).splitlines()
    assert max(map(len, lines)) <= demo_screen.COLUMNS
    assert lines[1].split() == [
        "first",
        "token,",
        "behind",
        "928",
        "tokens",
        "240",
        "ms",
        "12",
        "ms",
        "20.0",
        "times",
        "sooner",
    ]
    assert lines[2].endswith("60           600  10.0 times as many")
    assert lines[3].split()[-3:] == ["10", "7", "70%"]
    last = lines[-1]
    assert last.startswith("Wall time ")
    assert last.endswith("compare tokens.") is is_busy


class _ChatModel:
    """Answers each turn with a space, which its template does not write again."""

    def __init__(self) -> None:
        self.tokenizer = byte_tokenizer()
        self.tokenizer.chat_template = str(self.tokenizer.chat_template).replace(
            "message.content", "message.content | trim"
        )
        self.contexts: dict[str, tuple[int, ...]] = {}
        self._turns: dict[str, list[EarlierTurn]] = {}

    def history(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(token_ids=np.array(self.contexts[name]))

    def explain(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(chunks=[])

    def share_prefix(self, token_ids: list[int]) -> None: ...

    def chat(
        self, messages: Any, params: Any, *, conversation_ids: list[str], prefix: None
    ) -> list[SimpleNamespace]:
        reply = (ord(" "), 261)
        for name, new in zip(conversation_ids, messages, strict=True):
            before, turns = self.contexts.get(name, ()), self._turns.setdefault(name, [])
            keep, prompt = ChatFormat(self.tokenizer).turn_prompt(turns, before, new)
            self.contexts[name] = (*before[:keep], *prompt, *reply)
            turns.append(EarlierTurn(new, " ", reply, len(self.contexts[name])))
        return [SimpleNamespace(text=" ", token_ids=reply, seed=0) for _ in conversation_ids]


def test_a_template_that_rewrites_replies_is_demonstrated_too() -> None:
    model: Any = _ChatModel()
    served = demo_run.serve(model)
    last = {turn.conversation_id: turn for turn in served}
    assert len(served) > len(last)
    for name, turn in last.items():
        context = (*turn.history_ids, *turn.prompt_ids, *turn.output.token_ids)
        assert context == model.contexts[name], "the dense model replays what was served"
