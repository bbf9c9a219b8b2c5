"""Prompts that are spread over steps while others decode: their share of each step, and that none starves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve_jax.scheduler import RequestStatus
from tests.scheduler.helpers import CHUNK, SchedulerHarness

SIZES = (16, 256, 512, 1024)


def lengths(harness, name):
    """Return the number of tokens that one request was granted in every step."""
    return [sum(end - start for who, start, end, _ in step if who == name) for step in harness.steps]


def harness_of(prompt_steps, **options):
    """Return a harness with a request that decodes for long."""
    sizes = {"num_pages": 800, "max_num_batched_tokens": 1024, "token_buckets": SIZES} | options
    harness = SchedulerHarness(prompt_steps=prompt_steps, **sizes)
    harness.add("decodes", 5, max_tokens=200)
    harness.step()
    return harness


@pytest.mark.parametrize(
    ("prompt_steps", "expected"),
    [
        (0, [1023, 1023, 1023, 511, 255, 65]),  # as much as fills a bucket
        (1, [1023, 1023, 1023, 831]),  # as much as fits
        (8, [511] * 4 + [255] * 7 + [71]),  # an eighth while that is more than fills a small step
        (1000, [255] * 15 + [75]),
    ],
)
def test_a_prompt_is_spread_over_steps_beside_decodes(prompt_steps, expected):
    harness = harness_of(prompt_steps)
    prompt = harness.add("long", 3900, max_tokens=1)
    while prompt.status is not RequestStatus.FINISHING:
        harness.step()
    assert [n for n in lengths(harness, "long") if n] == expected
    assert all(lengths(harness, "decodes")), "a token in every step"


@pytest.mark.parametrize("prompt_steps", [0, 8])
def test_a_prompt_alone_is_not_delayed(prompt_steps):
    harness = SchedulerHarness(
        800, max_num_batched_tokens=1024, token_buckets=SIZES, prompt_steps=prompt_steps
    )
    harness.add("long", 3900, max_tokens=1)
    for _ in range(5):
        harness.step()
    assert lengths(harness, "long") == [1024, 1024, 1024, 512, 256]


@settings(deadline=None, max_examples=60)
@given(
    prompt_steps=st.integers(0, 20),
    prompts=st.lists(st.integers(1, 1500), min_size=1, max_size=6),
    holes=st.sets(st.integers(0, 30), max_size=20),
    buckets=st.sampled_from([(64, 320), (16, 64, 256, 512), (1024,), SIZES]),
    with_decodes=st.booleans(),
)
def test_no_request_starves(prompt_steps, prompts, holes, buckets, with_decodes):
    """In every step the oldest request gains tokens, and each decoding request gains one."""
    options = {"token_buckets": buckets, "max_num_batched_tokens": buckets[-1], "max_num_running": 5}
    harness = (
        harness_of(prompt_steps, **options)
        if with_decodes
        else SchedulerHarness(800, prompt_steps=prompt_steps, **options)
    )
    harness.conversation("back", 500, *holes)
    harness.add("back", 7, max_tokens=3)
    for i, length in enumerate(prompts):
        harness.add(f"new{i}", length, max_tokens=3)
    scheduler = harness.scheduler
    num_missing = sum(prompts) + 7 + len(holes) * CHUNK
    for _ in range(num_missing // CHUNK + 100):
        oldest = (*scheduler.running, *scheduler.waiting)[:1]
        decoding = [r for r in scheduler.running if r.is_decoding and not r.exhausted]
        output = harness.step()
        served = {grant.request for grant in output.grants}
        assert all(r in served or r.exhausted for r in oldest) and served.issuperset(decoding)
        assert output.num_tokens <= buckets[-1]
        if not any(r.conversation.conversation_id != "decodes" for r in scheduler.running) and not (
            scheduler.waiting
        ):
            return
    raise AssertionError("a request was not served")
