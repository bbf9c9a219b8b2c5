"""The bytes of plans, compared with digests from before the layout became one table."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from pensieve_jax.cache import CachedSequence
from pensieve_jax.cache.sequence import Chunk
from pensieve_jax.core.conversation import PENDING_TOKEN, Conversation
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.scheduler import Grant, PlanLayout, Planner, Request, SchedulerOutput
from tests.scheduler.helpers import page_table

CHUNK, NUM_PAGES = 16, 40
LAYOUTS = {size: PlanLayout(size, 6, 6, 4, 3, (2,)) for size in (16, 64, 160)}
GREEDY = SamplingParams(max_tokens=9)
DRAWN = SamplingParams(max_tokens=9, min_tokens=5, temperature=0.7, top_k=5, top_p=0.8, logprobs=2)


def request(number: int, num_tokens: int, params: SamplingParams, *, is_pending: bool = False) -> Request:
    """Return a request of `num_tokens` tokens on its own pages; its last token may be pending."""
    conversation = Conversation(f"c{number}", [7 * number + i for i in range(num_tokens)])
    sequence = CachedSequence(f"c{number}")
    made = Request(
        number,
        conversation,
        sequence,
        params,
        seed=2**40 + number,
        ending_ids=(3, 5),
        max_context_tokens=96,
    )
    if is_pending:
        made.token_ids[-1] = PENDING_TOKEN
        made.sample_row = 2
    for index in range(-(-num_tokens // CHUNK)):
        sequence.chunks.append(Chunk())
        sequence.chunks[index].page = 1 + 6 * number + index
    return made


def fill_tiles(plan):
    plan.tiles[0][:] = [plan.num_rows[0], plan.cu_q_lens[-1]]


def digest_of(*grants: Grant) -> str:
    table = page_table(grant.request for grant in grants)
    planner = Planner(
        LAYOUTS,
        fill_tiles,
        table,
        chunk_tokens=CHUNK,
        num_device_pages=NUM_PAGES,
        scoring_bucket=max(LAYOUTS),
    )
    num_tokens = sum(grant.end - grant.start for grant in grants)
    for grant in grants:
        if grant.samples:
            grant.request.token_ids.append(PENDING_TOKEN)  # as the scheduler does
    plan = planner.plan(SchedulerOutput(grants, num_tokens, (), (), (), (), (), ()))
    fields = plan.layout.fields
    words = np.delete(plan.buffer, slice(fields["min_p"].offset, fields["seed"].offset))  # a later field
    return hashlib.sha256(words.tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("grants", "digest"),
    [
        ([(request(1, 30, GREEDY), 0, 30, True)], "361346fec68442e8"),
        ([(request(1, 30, GREEDY), 5, 20, False)], "4239d80e3e9eb633"),
        ([(request(1, 33, DRAWN, is_pending=True), 32, 33, True)], "3e634e545fdf80a2"),
        (
            [
                (request(1, 90, GREEDY), 0, 16, False),
                (request(1, 90, GREEDY), 64, 90, True),
                (request(2, 20, DRAWN, is_pending=True), 19, 20, True),
                (request(3, 50, DRAWN), 2, 50, True),
            ],
            "11b23e2d34e12c29",
        ),
        ([(request(n, 96, GREEDY if n % 2 else DRAWN), 70, 96, n < 4) for n in range(6)], "80b774875983029c"),
    ],
    ids=["prompt", "part", "decode", "mixed", "full"],
)
def test_the_bytes_of_a_plan_are_unchanged(grants, digest):
    assert digest_of(*(Grant(*grant) for grant in grants)) == digest
