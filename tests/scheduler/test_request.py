"""The accounting of a request whose state comes and goes, on a sequence that is told what it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pensieve_jax.core.conversation import Conversation
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.scheduler.request import Request

CHUNK = 16
HISTORY, PROMPT = 118, 22


class Sequence:
    """Eight chunks of a prefix that other requests have, too, and one that they have not."""

    num_shared = 8
    first_arriving = None
    fetched: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.chunks: list[Any] = [SimpleNamespace(readable=True, shelf=None) for _ in range(9)]
        self.num_kv_tokens = 8 * CHUNK

    def holes(self, chunk_tokens: int) -> list[tuple[int, int]]:
        return [
            (index * chunk_tokens, (index + 1) * chunk_tokens)
            for index, chunk in enumerate(self.chunks)
            if not chunk.readable
        ]

    def num_tokens_of(self, index: int, chunk_tokens: int) -> int:
        return min(chunk_tokens, self.num_kv_tokens - index * chunk_tokens)


def test_what_was_lost_at_one_suspension_and_came_back_after_the_next_is_no_state_that_was_found():
    conversation = Conversation("a", token_ids=list(range(HISTORY)))
    conversation.num_history_tokens, conversation.num_computed_tokens = HISTORY, HISTORY - 1
    conversation.token_ids += range(PROMPT)
    sequence: Any = Sequence()
    options: dict[str, Any] = {"seed": 0, "ending_ids": (), "max_context_tokens": 400}
    request = Request(0, conversation, sequence, SamplingParams(max_tokens=40), **options)
    request.on_admitted(CHUNK)
    sequence.num_kv_tokens = 9 * CHUNK
    request.on_suspended()
    sequence.chunks[7].readable = False
    request.on_admitted(CHUNK)
    assert request.resume_recomputed_tokens == CHUNK
    request.on_suspended()  # before it has computed the chunk again
    request.on_admitted(CHUNK)
    sequence.chunks[7].readable = True  # another one has
    request.skip_filled(CHUNK)
    usage = request.usage(40)
    assert (usage.reused_gpu_tokens, usage.recomputed_tokens) == (8 * CHUNK, 0)
    assert usage.resume_recomputed_tokens == 0
    assert usage.prefilled_tokens == HISTORY + PROMPT - 8 * CHUNK
