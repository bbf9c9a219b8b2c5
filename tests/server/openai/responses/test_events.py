"""Streams of stored responses: their events, and that they do not block other tasks."""

from __future__ import annotations

import asyncio

import pytest

from pensieve_jax.core.template_input import NO_INPUT
from pensieve_jax.server.async_engine import AsyncDelta
from pensieve_jax.server.openai.responses.events import run_events, stored_events
from pensieve_jax.server.openai.responses.output import output_items
from pensieve_jax.server.openai.responses.pieces import ReplyPieces
from pensieve_jax.server.openai.responses.response import ResponseHead
from pensieve_jax.server.openai.responses.run import ResponseRun
from pensieve_jax.text.loading import byte_tokenizer
from pensieve_jax.text.token_texts import TokenTexts

NUM_TOKENS = 2000
HEAD = ResponseHead(response_id="resp_1", turn_id="1", created_at_s=0.0, echo={})
TOKENIZER = byte_tokenizer()
TEXTS = TokenTexts(TOKENIZER)
REPLY = AsyncDelta("a" * NUM_TOKENS, (*TOKENIZER.encode("a", add_bos=False),) * NUM_TOKENS)
RESPONSE = HEAD.object(
    "completed", output=output_items("1", NO_INPUT, "a" * NUM_TOKENS, "completed", None, TEXTS)
)


def running():
    run = ResponseRun("", "", lambda shown: ReplyPieces(TOKENIZER, shown), background=False)
    run.take(REPLY)
    run.end(RESPONSE)
    return run


def streams(starting_after):
    return [
        stored_events(HEAD, RESPONSE, REPLY, ReplyPieces(TOKENIZER), TEXTS, starting_after),
        run_events(running(), HEAD, TEXTS, starting_after),
    ]


@pytest.mark.parametrize("kind", [0, 1], ids=["kept", "running"])
@pytest.mark.parametrize("starting_after", [-1, 10**9])
def test_a_stream_of_a_finished_reply_lets_other_tasks_run(kind: int, starting_after: int) -> None:
    """Skipping the events that the client already has takes as long as writing them."""
    num_turns = 0

    async def others():
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def scenario():
        beside = asyncio.ensure_future(others())
        events = [data async for data in streams(starting_after)[kind]]
        beside.cancel()
        return events

    events = asyncio.run(scenario())
    num_events = b"".join(events).count(b"data: ")
    assert num_events == (1 if starting_after > 0 else NUM_TOKENS + 9)
    assert num_turns >= NUM_TOKENS // 64
