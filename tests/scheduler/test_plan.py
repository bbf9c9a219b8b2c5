"""The packed plan's layout, and the sizes of buckets."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_defs.config import MAX_WINDOWS
from pensieve_jax.config import EngineConfig, SchedulerConfig
from pensieve_jax.scheduler import PlanLayout, StepPlan, bucket_for, bucket_layout, token_buckets
from pensieve_jax.scheduler.buckets import step_limit
from pensieve_jax.scheduler.plan import FIELDS, MAX_TILE_LISTS

LAYOUT = PlanLayout(
    num_tokens=64, max_num_rows=8, pages_per_row=5, max_num_samples=4, max_num_banned=3, tiles_lens=(11,)
)


def test_fields_fill_the_buffer_in_order_at_aligned_offsets():
    """Offsets are multiples of 256 bytes: a Mosaic GPU kernel refused an unaligned slice of the buffer."""
    end = 0
    for field in LAYOUT.fields.values():
        assert field.dtype.itemsize == 4 and field.size == np.prod(field.shape)
        assert end <= field.offset < end + 64 and field.offset * field.dtype.itemsize % 256 == 0
        end = field.offset + field.size
    assert LAYOUT.size == end
    assert hash(LAYOUT) == hash(again := PlanLayout(64, 8, 5, 4, 3, (11,))) and again == LAYOUT


def test_a_plan_has_a_tile_list_for_each_window():
    """A layout without a second window leaves no room for it, so its plans are as small as before."""
    both = dataclasses.replace(LAYOUT, tiles_lens=(11, 70))
    plan = StepPlan(both, 0, 99)
    assert [len(tiles) for tiles in plan.tiles] == [11, 70]
    one = StepPlan(LAYOUT, 0, 99)
    assert [len(tiles) for tiles in one.tiles] == [11]
    assert not hasattr(one, "tiles_1"), "an empty view in every step takes time"
    plan.tiles[0][:], plan.tiles[1][:] = 1, 2
    assert plan.tiles_0.sum() == 11 and plan.tiles_1.sum() == 140 and plan.buffer[plan.buffer != 0].size
    assert both.fields["tiles_1"].offset % 64 == 0 and both.size - LAYOUT.size == 128
    assert MAX_TILE_LISTS == MAX_WINDOWS


def test_every_field_is_a_view_of_its_own_words():
    layout = dataclasses.replace(LAYOUT, tiles_lens=(11, 70))
    plan = StepPlan(layout, 3, 99)
    assert plan.step_id == 3 and plan.buffer.dtype == np.int32
    for number, (name, field) in enumerate(layout.fields.items(), start=1):
        view = getattr(plan, name)
        assert view.shape == field.shape and view.dtype == field.dtype and view.base is not None
        view[...] = number
        words = plan.buffer[field.offset : field.offset + field.size]
        assert (words.view(field.dtype) == number).all()
    for number, name in enumerate(layout.fields, start=1):
        assert (getattr(plan, name) == number).all(), f"{name} was overwritten"


def test_a_new_plan_contains_only_padding():
    plan = StepPlan(LAYOUT, 0, 99)
    padding = {"prev_samples": -1, "write_slots": 99, "top_p": 1.0, "banned_ids": -1}
    expected = np.zeros(LAYOUT.size, np.int32)
    for name, field in LAYOUT.fields.items():
        words = expected[field.offset : field.offset + field.size]
        words.view(field.dtype)[:] = padding.get(name, 0)
    assert plan.buffer.tobytes() == expected.tobytes()
    assert padding.keys() == {name for name, field in FIELDS.items() if field.padding != 0}


def test_the_table_names_every_field_in_order():
    """These are the order, shapes and dtypes that compiled steps read."""
    shapes = {name: (*field.shape, field.dtype.name) for name, field in LAYOUT.fields.items()}
    tokens, rows, samples = (64, "int32"), (8, "int32"), (4, "int32")
    assert list(shapes.items()) == [
        *((name, tokens) for name in ("token_ids", "prev_samples", "positions", "write_slots")),
        *(("cu_q_lens", (9, "int32")), ("kv_lens", rows), ("page_indices", (8, 5, "int32"))),
        *(("num_rows", (1, "int32")), ("tiles_0", (11, "int32")), ("tiles_1", (0, "int32"))),
        ("num_samples", (1, "int32")),
        *(("sample_tokens", samples), ("sample_positions", samples), ("temperature", (4, "float32"))),
        *(
            ("top_k", samples),
            ("top_p", (4, "float32")),
            ("min_p", (4, "float32")),
            ("seed", (4, 2, "uint32")),
        ),
        *(("banned_ids", (4, 3, "int32")), ("flags", (4, "int32"))),
    ]


def test_plans_share_no_buffer():
    one, two = StepPlan(LAYOUT, 0, 99), StepPlan(LAYOUT, 1, 99)
    one.token_ids[:] = 5
    assert not two.token_ids.any()


def test_layouts_follow_from_the_configuration():
    scheduler = SchedulerConfig(max_num_running=20, max_num_batched_tokens=64, token_buckets=(16, 64))
    config = EngineConfig(scheduler=scheduler)
    assert bucket_layout(config, 16, context_tokens=33) == PlanLayout(16, 16, 2, 16, 8, ())
    found = bucket_layout(config, 64, context_tokens=64, tiles_lens=(7, 9))
    assert found == PlanLayout(64, 40, 2, 20, 8, (7, 9))


@given(
    largest=st.integers(2, 20_000), max_num_running=st.integers(1, 2_000), max_num_buckets=st.integers(1, 16)
)
def test_buckets_are_few_and_cover_every_step_size(largest, max_num_running, max_num_buckets):
    """They are bounded by the configuration, ascending, up to the largest step; any size finds its bucket."""
    config = SchedulerConfig(
        max_num_running=max_num_running, max_num_batched_tokens=largest, max_num_buckets=max_num_buckets
    )
    buckets = token_buckets(config)
    assert 1 <= len(buckets) <= max_num_buckets
    assert list(buckets) == sorted(set(buckets)) and buckets[-1] == largest
    for num_tokens in {1, largest // 3 or 1, largest - 1, largest, *buckets}:
        bucket = bucket_for(buckets, num_tokens)
        assert bucket >= num_tokens
        assert all(smaller < num_tokens for smaller in buckets if smaller < bucket), "not the smallest"
    with pytest.raises(IndexError):
        bucket_for(buckets, largest + 1)


def test_given_buckets_are_kept():
    config = SchedulerConfig(max_num_batched_tokens=512, max_num_running=4, token_buckets=(8, 100, 512))
    assert token_buckets(config) == (8, 100, 512)


@pytest.mark.parametrize(
    ("num_running", "largest", "count", "buckets"),
    [
        (64, 1024, None, (16, 32, 48, 64, 128, 256, 512, 1024)),
        (256, 1024, None, (16, 48, 64, 80, 112, 128, 160, 192, 224, 256, 512, 1024)),
        (192, 2048, None, (16, 48, 64, 80, 112, 144, 176, 192, 352, 640, 1136, 2048)),
        (512, 1024, None, (16, 48, 80, 112, 160, 208, 256, 304, 368, 432, 512, 1024)),
        (256, 2048, 8, (16, 64, 128, 192, 256, 512, 1024, 2048)),
        (128, 8192, 8, (16, 64, 96, 128, 368, 1024, 2912, 8192)),  # half of them are larger than decodes
        # all running requests may decode without padding
        (200, 512, 8, (16, 48, 80, 128, 160, 208, 336, 512)),
        (1, 2048, 8, (16, 32, 64, 128, 256, 512, 1024, 2048)),
        (64, 1024, 4, (16, 64, 256, 1024)),  # few: spaced evenly
        (256, 2048, 5, (16, 64, 192, 624, 2048)),
        (1, 1000, 3, (16, 128, 1000)),
    ],
)
def test_derived_buckets_are_dense_at_decode_sizes_and_double_above(num_running, largest, count, buckets):
    config = SchedulerConfig(
        max_num_running=num_running, max_num_batched_tokens=largest, max_num_buckets=count
    )
    assert token_buckets(config) == buckets


@pytest.mark.parametrize(("smaller", "limit"), [(255, 512), (256, 256), (257, 257)])
def test_a_bucket_below_256_tokens_leaves_nothing_over(smaller, limit):
    assert step_limit((smaller, 512), 0, 300, chunk_tokens=32, prompt_steps=0) == limit


SIZES = (64, 256, 512, 1024)


@pytest.mark.parametrize(
    ("num_missing", "limit"),
    [
        (0, 64),
        (64, 64),
        (65, 256),  # small steps are padded
        (255, 256),
        (256, 256),
        (447, 256),  # large ones are cut
        (448, 512),  # unless at most an eighth of the bucket is empty
        (512, 512),
        (895, 512),
        (896, 1024),
        (1024, 1024),
        (5000, 1024),
    ],
)
@pytest.mark.parametrize("prompt_steps", [0, 1, 8])
def test_a_step_without_decodes_fills_a_bucket_if_padding_would_take_time(num_missing, limit, prompt_steps):
    assert step_limit(SIZES, 0, num_missing, chunk_tokens=32, prompt_steps=prompt_steps) == limit


@pytest.mark.parametrize(
    ("num_decodes", "num_others", "prompt_steps", "limit"),
    [
        (36, 0, 8, 64),  # decodes alone
        (300, 0, 8, 512),
        (36, 20, 8, 64),  # the missing tokens fit
        (36, 29, 8, 256),
        (36, 1000, 8, 256),  # at most what fills a small one
        (36, 1760, 8, 256),
        (36, 1761, 8, 512),  # unless an eighth is more
        (36, 3808, 8, 512),
        (36, 3809, 8, 1024),
        (36, 90_000, 8, 1024),
        (225, 33, 8, 512),  # at least a chunk beside the decodes
        (36, 90_000, 10_000, 256),
        (36, 221, 1, 512),  # as much as fits
        (36, 477, 1, 1024),
        (36, 411, 0, 256),  # the largest that is filled
        (36, 476, 0, 512),
        (200, 447, 0, 512),
        (224, 280, 0, 512),  # too little would be computed beside the decodes
    ],
)
def test_beside_decodes_a_step_takes_a_part_of_the_missing_tokens(
    num_decodes, num_others, prompt_steps, limit
):
    found = step_limit(SIZES, num_decodes, num_others, chunk_tokens=32, prompt_steps=prompt_steps)
    assert found == limit


@given(
    max_num_running=st.integers(1, 600),
    extra_tokens=st.integers(0, 4_000),
    max_num_buckets=st.integers(1, 12),
    prompt_steps=st.integers(0, 40),
    chunk_tokens=st.sampled_from((16, 32, 64)),
    data=st.data(),
)
def test_a_step_has_room_for_the_decodes_and_their_share(
    max_num_running, extra_tokens, max_num_buckets, prompt_steps, chunk_tokens, data
):
    """The step is a bucket. It holds all, or a chunk beside the decodes and the share, or is the largest.

    The share is a quarter of the missing tokens, but beside decodes `prompt_steps` sets it, if given.
    """
    config = SchedulerConfig(
        max_num_running=max_num_running,
        max_num_batched_tokens=max_num_running + chunk_tokens + extra_tokens,
        max_num_buckets=max_num_buckets,
    )
    buckets = token_buckets(config)
    num_decodes = data.draw(st.integers(0, max_num_running))
    num_others = data.draw(st.integers(0, 20_000)) if num_decodes < max_num_running else 0
    limit = step_limit(buckets, num_decodes, num_others, chunk_tokens=chunk_tokens, prompt_steps=prompt_steps)
    assert limit in buckets
    share = -(-num_others // ((num_decodes and prompt_steps) or 4))
    assert limit >= min(num_decodes + num_others, num_decodes + max(chunk_tokens, share), buckets[-1])
    assert num_decodes + min(num_others, chunk_tokens) <= limit
    if num_decodes and prompt_steps:
        more = step_limit(
            buckets, num_decodes, num_others + 1, chunk_tokens=chunk_tokens, prompt_steps=prompt_steps
        )
        assert more >= limit, "more that is missing, and a smaller step"
