"""Log-probabilities of prompts as columns: their entries, and what a message of them takes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from pensieve_jax.core.outputs import Output, Usage
from pensieve_jax.core.prompt_logprobs import PromptColumns, PromptLogprob, PromptLogprobs
from pensieve_jax.server.engine_process.messages import Ending, EngineMessage, Report
from pensieve_jax.server.engine_process.wire import FrameReader, FrameWriter

USAGE = Usage(0, 0, 0, 0, 0, 0)


def entries(num_tokens: int, num_top: int = 2) -> list[PromptLogprob | None]:
    tops = [{at + rank: -rank / 4 for rank in range(num_top)} for at in range(num_tokens)]
    return [None, *(PromptLogprob(at, -at / 2, at + 1, tops[at]) for at in range(1, num_tokens))]


def report(num_tokens: int) -> Report:
    found = PromptLogprobs.of(entries(num_tokens))
    return Report(endings=[Ending(1, Output(None, (), "", "length", USAGE, 0, None, found))])


def num_values(value: Any) -> int:
    """Return how many objects a decoder has to make for a value."""
    inner = value.items() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(num_values, inner))


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 700])
def test_entries_are_those_that_were_given(num_tokens, num_top):
    given = entries(num_tokens, num_top)
    found = PromptLogprobs.of(given)
    assert list(found) == given and len(found) == num_tokens
    assert [found[at] for at in range(-num_tokens, num_tokens)] == given + given
    assert list(found[1:-1]) == given[1:-1] and found[0] is None
    with pytest.raises(IndexError):
        found[num_tokens]


def test_a_prompt_behind_a_history_has_an_entry_for_its_first_token():
    given = entries(9)[1:]
    found = PromptLogprobs.of(given)
    assert list(found) == given and len(found) == 8 and found[0] == given[0]


def test_no_tokens_have_no_entries():
    assert list(PromptLogprobs.of([])) == [] and list(PromptLogprobs.joined([], has_first=True)) == [None]


def test_parts_of_a_prompt_are_joined_in_order():
    def part(begin: int, end: int) -> PromptColumns:
        rows = np.arange(begin, end, dtype=np.int32)
        top = np.stack([rows, rows + 1], axis=1)
        return PromptColumns(rows, rows.astype(np.float32), rows + 1, top, top.astype(np.float32))

    found = PromptLogprobs.joined([part(0, 3), part(3, 3), part(3, 400)], has_first=False)
    assert [one.token_id for one in found] == list(range(400)) and found[7].top == {7: 7.0, 8: 8.0}


def test_a_message_has_as_many_values_for_a_long_prompt_as_for_a_short_one():
    """The front end's event loop reads it in one go, so its objects must not grow with the prompt."""
    writer = FrameWriter()
    short, long = (
        num_values(msgspec.msgpack.decode(writer.frame(report(n))[8:], strict=False)) for n in (2, 5_000)
    )
    assert short == long < 100


def test_a_message_brings_all_entries():
    (received,) = FrameReader(EngineMessage.__value__).feed(bytes(FrameWriter().frame(report(700))))
    assert list(received.endings[0].output.prompt_logprobs) == entries(700)
