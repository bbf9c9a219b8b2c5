"""Token counts of a request whose KV cache comes and goes, on a sequence that the test controls."""

from __future__ import annotations

import random
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from pensieve_jax.core.conversation import Conversation
from pensieve_jax.core.outputs import Usage
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.scheduler.request import Request, _outside

CHUNK = 16
HISTORY, PROMPT = 118, 22


class Sequence:
    """Eight chunks of a prefix that other requests share, and one of its own."""

    num_shared = 8
    first_arriving = None
    fetched: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.chunks: list[Any] = [SimpleNamespace(readable=True, eviction_class=None) for _ in range(9)]
        self.num_kv_tokens = 8 * CHUNK

    def holes(self, chunk_tokens: int) -> list[tuple[int, int]]:
        return [
            (index * chunk_tokens, (index + 1) * chunk_tokens)
            for index, chunk in enumerate(self.chunks)
            if not chunk.readable
        ]

    def num_tokens_of(self, index: int, chunk_tokens: int) -> int:
        return min(chunk_tokens, self.num_kv_tokens - index * chunk_tokens)


def test_a_chunk_lost_at_one_suspension_and_back_after_the_next_does_not_count_as_reused():
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
    request.on_suspended()  # before it has recomputed the chunk
    request.on_admitted(CHUNK)
    sequence.chunks[7].readable = True  # another request has
    request.skip_filled(CHUNK)
    usage = request.usage(40)
    assert (usage.reused_gpu_tokens, usage.recomputed_tokens) == (8 * CHUNK, 0)
    assert usage.resume_recomputed_tokens == 0
    assert usage.prefilled_tokens == HISTORY + PROMPT - 8 * CHUNK


@pytest.mark.parametrize(
    ("filled", "left"),
    [
        ((), [(0, 24), (48, 64), (80, 96)]),
        ((0,), [(16, 24), (48, 64), (80, 96)]),
        ((0, 1), [(48, 64), (80, 96)]),
        ((0, 1, 3), [(80, 96)]),
        ((1, 3, 5), [(0, 24), (48, 64), (80, 96)]),
        ((0, 1, 3, 5), []),
    ],
)
def test_leading_holes_that_another_request_filled_are_skipped(filled, left):
    """It skips chunk by chunk from the front; a filled chunk behind a remaining hole waits for its turn."""
    request = request_of(6 * CHUNK + 1, Chunks([index not in filled for index in range(6)], CHUNK))
    request.holes = [(0, 24), (48, 64), (80, 96)]
    request.skip_filled(CHUNK)
    assert request.holes == left


def test_holes_in_its_own_chunks_are_not_skipped():
    sequence: Any = Chunks([False] * 6, CHUNK)
    sequence.num_shared = 3
    request = request_of(6 * CHUNK + 1, sequence)
    request.holes = [(32, 48), (48, 64)]
    request.skip_filled(CHUNK)
    assert request.holes == [(48, 64)]


@pytest.mark.parametrize(
    ("first_arriving", "reach", "expected"),
    [
        (None, 97, (57, 4)),
        (6, 96, (56, 3)),
        (5, 80, (40, 2)),
        (4, 64, (40, 2)),
        (1, 16, (16, 1)),
        (0, 0, (0, 0)),
    ],
)
def test_only_tokens_before_the_first_chunk_that_arrives_are_missing(first_arriving, reach, expected):
    """A hole that begins there takes no row of the step, and one that ends behind it is cut."""
    sequence: Any = Chunks([False] * 6, CHUNK)
    sequence.first_arriving = first_arriving
    request = request_of(6 * CHUNK + 1, sequence)
    request.holes = [(0, 24), (48, 64), (80, 96)]
    assert (request.reach(CHUNK), request.num_missing(CHUNK)) == (reach, expected)


def test_a_new_request_has_no_computed_tokens():
    request = request_of(9, Chunks([False], CHUNK))
    assert (request.num_suspensions, request.num_output_tokens, request.sample_row) == (0, 0, -1)
    assert (request.num_prompt_end, request.num_unending, request.max_total_tokens) == (9, 9, 18)
    assert not request.is_decoding and not request.exhausted


def request_of(num_tokens: int, sequence: Any) -> Request:
    """Return a turn after a history; all of its tokens but the last were computed once."""
    conversation = Conversation("a", token_ids=list(range(num_tokens)))
    conversation.num_history_tokens, conversation.num_computed_tokens = num_tokens - 1, num_tokens - 1
    options: dict[str, Any] = {"seed": 0, "ending_ids": (), "max_context_tokens": 2 * num_tokens}
    return Request(0, conversation, sequence, SamplingParams(max_tokens=40), **options)


class Chunks(Sequence):
    """Any number of chunks, all of them shared."""

    def __init__(self, lost: list[bool], chunk_tokens: int) -> None:
        self.chunks = [SimpleNamespace(readable=not is_lost, eviction_class=None) for is_lost in lost]
        self.num_shared = len(lost)
        self.num_kv_tokens = chunk_tokens * len(lost)

    def lose(self, lost: list[bool]) -> None:
        for chunk, is_lost in zip(self.chunks, lost, strict=True):
            chunk.readable = not is_lost


@pytest.mark.parametrize("seed", range(20))
def test_counts_equal_a_count_by_position(seed: int) -> None:
    """Chunks come and go at random while a request is repeatedly suspended."""
    chance = random.Random(seed)
    lost = [[chance.random() < 0.4 for _ in range(12)] for _ in range(6)]
    sequence: Any = Chunks(lost[0], CHUNK)
    request = request_of(12 * CHUNK + 1, sequence)
    request.on_admitted(CHUNK)
    never_had, num_recomputed = set(request_positions(request)), 0
    num_reused = 12 * CHUNK - len(never_had)
    for now_lost in lost[1:]:
        had = set(range(12 * CHUNK)) - request_positions(request)
        never_had -= had
        request.on_suspended()
        sequence.lose(now_lost)
        request.on_admitted(CHUNK)
        has = set(range(12 * CHUNK)) - request_positions(request)
        num_recomputed += len(had - has) - len((has - had) - never_had)
        num_reused += len((has - had) & never_had)
        usage = request.usage(0)
        assert (usage.resume_recomputed_tokens, usage.reused_gpu_tokens) == (num_recomputed, num_reused)
        assert usage.recomputed_tokens == 12 * CHUNK - num_reused


def request_positions(request: Request) -> set[int]:
    """Return the positions that it must recompute."""
    return {position for start, end in request.holes for position in range(start, end)}


def test_counting_does_not_iterate_over_tokens() -> None:
    """The engine's thread runs it, and histories may be long."""
    chunk_tokens = 1 << 17
    sequence: Any = Chunks([False] * 8, chunk_tokens)
    request = request_of(8 * chunk_tokens + 1, sequence)
    request.on_admitted(chunk_tokens)
    request.on_suspended()
    sequence.lose([True, False] * 4)
    tracemalloc.start()
    request.on_admitted(chunk_tokens)
    num_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert request.resume_recomputed_tokens == 4 * chunk_tokens
    assert num_bytes < 100_000, "a megabyte or more stands for a value for each token"


def test_usage_before_admission_counts_only_the_prompt() -> None:
    request = request_of(9, Chunks([False], CHUNK))
    assert request.usage(0) == Usage(
        prompt_tokens=1,
        reused_gpu_tokens=0,
        swapped_in_tokens=0,
        recomputed_tokens=0,
        prefilled_tokens=0,
        output_tokens=0,
    )


def test_usage_of_a_new_conversation_counts_prefilled_tokens() -> None:
    """The cache is empty at admission: every prompt token is prefilled, and none is reused."""
    conversation = Conversation("a", token_ids=list(range(9)))
    options: dict[str, Any] = {"seed": 0, "ending_ids": (), "max_context_tokens": 40}
    request = Request(0, conversation, Chunks([], CHUNK), SamplingParams(max_tokens=4), **options)  # type: ignore[arg-type]
    request.on_admitted(CHUNK)
    usage = request.usage(2)
    assert (usage.prompt_tokens, usage.prefilled_tokens, usage.output_tokens) == (9, 9, 2)
    assert (usage.reused_gpu_tokens, usage.swapped_in_tokens, usage.recomputed_tokens) == (0, 0, 0)


@pytest.mark.parametrize(
    ("holes", "num_tokens", "expected"),
    [
        ([], 0, []),
        ([], 5, [(0, 5)]),
        ([(0, 2)], 5, [(2, 5)]),
        ([(1, 2)], 5, [(0, 1), (2, 5)]),
        ([(0, 2), (4, 5)], 5, [(2, 4)]),
        ([(0, 5)], 5, []),
    ],
)
def test_the_complement_of_holes_starts_at_zero(holes, num_tokens, expected) -> None:
    assert _outside(holes, num_tokens) == expected
