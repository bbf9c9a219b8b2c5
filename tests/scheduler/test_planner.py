"""The planner against a slow and obviously correct one: a Python loop over tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve_jax.cache import CachedSequence
from pensieve_jax.cache.sequence import Chunk
from pensieve_jax.core.conversation import PENDING_TOKEN, Conversation
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.scheduler import Grant, PlanLayout, Planner, Request, SchedulerOutput
from tests.scheduler.helpers import page_table

CHUNK = 16
NUM_PAGES = 30  # the dummy included
PAGES_PER_ROW = 6
MAX_DRAFT = 3
LAYOUTS = {size: PlanLayout(size, 8, PAGES_PER_ROW, 16, 3, (2,)) for size in (16, 64, 600)}


def reference_plan(output, bucket, sample_rows):
    """Return every field as nested lists; `sample_rows` are those of the previous step."""
    layout = LAYOUTS[bucket]
    fields = {name: [] for name in ("token_ids", "prev_samples", "positions", "write_slots")}
    cu_q_lens, kv_lens, page_indices, samples = [0], [], [], []
    for request, start, end, is_sampled, draft in output.grants:
        first_drafted = end - len(draft)
        for position in range(start, end):
            is_drafted = position >= first_drafted
            token_id = draft[position - first_drafted] if is_drafted else request.token_ids[position]
            pending = token_id == PENDING_TOKEN
            page = request.sequence.chunks[position // CHUNK].page
            fields["token_ids"].append(0 if pending else token_id)
            fields["prev_samples"].append(sample_rows[request] if pending else -1)
            fields["positions"].append(position)
            fields["write_slots"].append(page * CHUNK + position % CHUNK)
        cu_q_lens.append(cu_q_lens[-1] + end - start)
        kv_lens.append(end)
        pages = [request.sequence.chunks[i].page for i in range((end + CHUNK - 1) // CHUNK)]
        page_indices.append(pages + [0] * (PAGES_PER_ROW - len(pages)))
        if is_sampled:
            for before in range(len(draft), -1, -1):
                samples.append((request, cu_q_lens[-1] - 1 - before, end - before))
    num_rows, num_tokens = len(kv_lens), cu_q_lens[-1]
    for name, padding in (
        ("token_ids", 0),
        ("prev_samples", -1),
        ("positions", 0),
        ("write_slots", NUM_PAGES * CHUNK),
    ):
        fields[name] += [padding] * (bucket - num_tokens)
    num_pad = layout.max_num_samples - len(samples)
    params = [request.params for request, _, _ in samples]
    live = [p for p in params if p.temperature > 0]
    return fields | {
        "cu_q_lens": cu_q_lens + [num_tokens] * (layout.max_num_rows - num_rows),
        "kv_lens": kv_lens + [0] * (layout.max_num_rows - num_rows),
        "page_indices": page_indices + [[0] * PAGES_PER_ROW] * (layout.max_num_rows - num_rows),
        "num_rows": [num_rows],
        "num_samples": [len(samples)],
        "sample_tokens": [index for _, index, _ in samples] + [0] * num_pad,
        "sample_positions": [position for _, _, position in samples] + [0] * num_pad,
        "temperature": [p.temperature for p in params] + [0] * num_pad,
        "top_k": [p.top_k for p in params] + [0] * num_pad,
        "top_p": [p.top_p for p in params] + [1] * num_pad,
        "min_p": [p.min_p for p in params] + [0] * num_pad,
        "seed": [[r.seed % 2**32, r.seed // 2**32] for r, _, _ in samples] + [[0, 0]] * num_pad,
        "banned_ids": [_banned(request, position) for request, _, position in samples] + [[-1] * 3] * num_pad,
        "flags": [
            int(bool(live)),
            int(any(p.top_k > 0 or p.top_p < 1 for p in live)),
            int(any(p.logprobs for p in params)),
            0,
        ],
        "tiles_0": [num_rows, num_tokens],
    }


def _banned(request, position):
    number = position + 1 - request.num_prompt_end  # of the sampled token
    banned = list(request.ending_ids) if number <= request.params.min_tokens else []
    return banned + [-1] * (3 - len(banned))


def fill_tiles(plan):
    """Stand in for the kernel's function; it must see complete rows."""
    plan.tiles[0][:] = [plan.num_rows[0], plan.cu_q_lens[-1]]


@st.composite
def requests(draw, number, pages):
    """Draw a request whose pages are all reserved, with some known tokens and perhaps a pending one."""
    history_len, prompt_len = draw(st.integers(0, 40)), draw(st.integers(1, 30))
    conversation = Conversation(f"c{number}", draw(_ids(history_len + prompt_len)))
    conversation.num_history_tokens = history_len
    sequence = CachedSequence(f"c{number}")
    params = SamplingParams(
        max_tokens=9,
        min_tokens=draw(st.integers(0, 3)),
        temperature=draw(st.sampled_from((0.0, 0.5))),
        top_k=draw(st.sampled_from((0, 7))),
        top_p=draw(st.sampled_from((1.0, 0.5))),
        min_p=draw(st.sampled_from((0.0, 0.25))),
        logprobs=draw(st.sampled_from((None, 0, 2))),
    )
    ending_ids = tuple(draw(st.lists(st.integers(0, 99), unique=True, max_size=3)))
    seed = draw(st.integers(0, 2**63 - 1))
    request = Request(
        number, conversation, sequence, params, seed=seed, ending_ids=ending_ids, max_context_tokens=96
    )
    request.token_ids += draw(st.integers(0, 3).flatmap(_ids))
    if draw(st.booleans()):
        request.token_ids.append(PENDING_TOKEN)
        request.sample_row = draw(st.integers(0, 5))
    for index in range(-(-len(request.token_ids) // CHUNK)):
        sequence.chunks.append(Chunk())
        sequence.chunks[index].page = pages.pop()
    return request


def _ids(count):
    return st.lists(st.integers(0, 99), min_size=count, max_size=count)


@st.composite
def outputs(draw):
    """Draw a step of up to four requests, each with one or two rows; its last row may sample."""
    pages, grants = draw(st.permutations(range(1, NUM_PAGES))), []
    for number in range(draw(st.integers(1, 4))):
        request = draw(requests(number, pages))
        length = len(request.token_ids)
        end = draw(st.sampled_from((length, draw(st.integers(1, length)))))
        start = draw(st.integers(0, end - 1))
        if start > 1 and draw(st.booleans()):
            first_end = draw(st.integers(1, start - 1))
            grants.append(Grant(request, draw(st.integers(0, first_end - 1)), first_end, False))
        # The pages of a draft are reserved; a request with one has no id in flight.
        num_free = min(len(request.sequence.chunks) * CHUNK - end, MAX_DRAFT)
        drafts = end == length and PENDING_TOKEN not in request.token_ids
        draft = tuple(draw(_ids(draw(st.integers(0, num_free))))) if drafts else ()
        grants.append(Grant(request, start, end + len(draft), end == length, draft))
    num_tokens = sum(grant.end - grant.start for grant in grants)
    return SchedulerOutput(tuple(grants), num_tokens, (), (), (), (), (), ())


@settings(max_examples=200, deadline=None)
@given(output=outputs())
def test_plans_equal_the_slow_reference(output):
    """Compares every field of the buffer; `sample_row` is set for the next step."""
    table = page_table(grant.request for grant in output.grants)
    planner = Planner(
        LAYOUTS,
        fill_tiles,
        table,
        chunk_tokens=CHUNK,
        num_device_pages=NUM_PAGES,
        scoring_bucket=max(LAYOUTS),
    )
    sample_rows = {grant.request: grant.request.sample_row for grant in output.grants}
    for grant in output.grants:
        if grant.samples:
            grant.request.token_ids.append(PENDING_TOKEN)  # as the scheduler does
    plan = planner.plan(output)
    bucket = next(size for size in sorted(LAYOUTS) if size >= output.num_tokens)
    assert plan.layout is LAYOUTS[bucket] and plan.step_id == 0
    for name, expected in reference_plan(output, bucket, sample_rows).items():
        assert getattr(plan, name).tolist() == expected, name
    sampling = [grant.request for grant in output.grants if grant.samples]
    last_rows = np.cumsum([grant.num_outputs for grant in output.grants if grant.samples]) - 1
    assert [request.sample_row for request in sampling] == last_rows.tolist()
    assert planner.plan(output).step_id == 1
