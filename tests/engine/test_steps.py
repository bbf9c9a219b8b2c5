"""Single steps: which tokens enter the model, in which order, and what happens to a token in flight."""

from __future__ import annotations

import pytest

from pensieve_jax.cache import Role
from pensieve_jax.core.conversation import PENDING_TOKEN
from pensieve_jax.core.outputs import Usage
from pensieve_jax.scheduler import RequestStatus
from tests.engine.harness import Harness, small_config


def rows_since(harness, num_steps):
    """Return the token intervals of all rows launched after the first `num_steps` steps."""
    return [row for rows in harness.runner.rows[num_steps:] for row in rows]


def test_exactly_the_dropped_tokens_enter_the_model():
    """Chunks 0-3 and 7 of 12, the last token of the previous turn, and the prompt: nothing else."""
    harness = Harness(small_config(chunk_tokens=32, gpu_pages=20, max_num_batched_tokens=512))
    harness.turn("a", 370, max_tokens=14)  # 384 tokens: 12 chunks, the last one's last token without KV
    harness.drop("a", 0, 1, 2, 3, 7)
    num_steps = len(harness.runner.rows)
    facts = harness.facts(harness.prompt(9, seed=1), "a", max_tokens=1)
    (output,) = harness.run(harness.submit(facts, "a"))
    assert rows_since(harness, num_steps) == [(0, 128), (224, 256), (383, 393)]
    assert sum(end - start for start, end in rows_since(harness, num_steps)) == 5 * 32 + 1 + 9
    assert output.token_ids == harness.expected(facts)
    usage = output.usage
    assert (usage.reused_gpu_tokens, usage.recomputed_tokens, usage.prefilled_tokens) == (223, 160, 10)


def test_recomputation_is_cut_on_chunk_boundaries_and_samples_at_its_end():
    """With a budget of 50 tokens, a step computes 48 of a hole; the tail goes with the last hole."""
    harness = Harness(small_config(gpu_pages=20, max_num_running=1, max_num_batched_tokens=50))
    harness.turn("a", 190, max_tokens=3)  # 193 tokens: 13 chunks
    harness.drop("a", 0, 1, 2, 3, 4, 8, 9)
    num_steps = len(harness.runner.rows)
    facts = harness.facts(harness.prompt(5, seed=1), "a", max_tokens=1)
    (output,) = harness.run(harness.submit(facts, "a"))
    steps = harness.runner.rows[num_steps:]
    assert steps == [[(0, 48)], [(48, 80), (128, 144)], [(144, 160), (192, 198)]]
    plans = harness.runner.plans[num_steps:]
    assert [int(plan.num_samples[0]) for plan in plans] == [0, 0, 1]
    assert output.token_ids == harness.expected(facts)


def test_the_next_step_is_launched_before_ids_are_fetched():
    """Step N+1 and its choice are launched before the engine waits for step N."""
    harness = Harness()
    harness.turn("a", 5, max_tokens=6)
    events = harness.runner.events
    for step_id in range(5):
        assert events.index(("choose", step_id + 1)) < events.index(("fetch", step_id))
    assert events[-1] == ("fetch", 5)
    assert [plan.prev_samples[0] for plan in harness.runner.plans] == [-1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("part", ["cache", "scheduler"])
def test_the_check_of_a_loop_checks_each_of_its_parts(part, monkeypatch):
    loop = Harness().engine._loop
    loop.check_integrity()

    def refuse():
        raise AssertionError(f"planted in the {part}")

    monkeypatch.setattr(getattr(loop, part), "check_integrity", refuse)
    with pytest.raises(AssertionError, match=f"planted in the {part}"):
        loop.check_integrity()


def test_an_end_by_length_launches_no_extra_step():
    """Six tokens take six steps, and the last step is fetched without another one behind it."""
    harness = Harness()
    harness.turn("a", 5, max_tokens=6)
    assert len(harness.runner.rows) == 6
    assert harness.engine.stats()["num_steps"] == 6


def test_an_ending_id_is_noticed_one_step_late():
    """The token of the look-ahead step is discarded, and its KV does not count."""
    harness = Harness()
    facts = harness.facts(harness.prompt(5), "a", max_tokens=20)
    expected = harness.expected(facts)
    facts = harness.facts(harness.prompt(5), "a", max_tokens=20, stop_token_ids=(expected[7],))
    assert expected[7] not in expected[:7]
    (output,) = harness.run(harness.submit(facts, "a"))
    assert output.finish_reason == "stop" and output.token_ids == expected[:8]
    assert len(harness.runner.rows) == 9  # one more than the tokens
    assert harness.history("a") == (*facts.prompt, *expected[:8])
    assert harness.engine.conversations.get("a").sequence.num_kv_tokens == 12
    harness.turn("a", 3, seed=1)


def test_an_ending_id_is_not_sampled_before_min_tokens():
    """The tokens after it differ from those of a turn that may end."""
    harness = Harness()
    first = harness.expected(harness.facts(harness.prompt(5), "a", max_tokens=1))[0]
    output = harness.turn("a", 5, max_tokens=6, min_tokens=3, stop_token_ids=(first,))
    assert first not in output.token_ids[:3]
    assert len(output.token_ids) > 3


def test_the_context_limit_ends_a_turn_by_length():
    """One token past the prompt fits, and the conversation can be cut and continued."""
    harness = Harness(small_config(max_context_tokens=48))
    output = harness.turn("a", 47, max_tokens=30)
    assert output.finish_reason == "length" and len(output.token_ids) == 1
    harness.engine.truncate("a", 20)
    output = harness.turn("a", 10, seed=1, max_tokens=30)
    assert len(output.token_ids) == 18 and output.usage.reused_gpu_tokens == 20


def suspended_with_token_in_flight():
    """Run two requests in three pages: the later one is suspended while its token is on the device."""
    harness = Harness(small_config(gpu_pages=3, reserve_fraction=0.0))
    early = harness.facts(harness.prompt(14, seed=1), "early", seed=1, max_tokens=20)
    late = harness.facts(harness.prompt(10, seed=2), "late", seed=2, max_tokens=12)
    turns = [harness.submit(early, "early"), harness.submit(late, "late")]
    for _ in range(60):
        harness.step()
        if harness.scheduled[-1].suspended:
            return harness, turns, (early, late)
    raise AssertionError("nothing was suspended")


def test_a_suspended_request_keeps_the_token_in_flight():
    """The token of the step in flight is kept, and is an input from the host when the turn resumes."""
    harness, (early, late), facts = suspended_with_token_in_flight()
    assert harness.scheduled[-1].suspended == (late.request,)
    assert late.request.status is RequestStatus.WAITING
    assert PENDING_TOKEN not in late.request.token_ids, "the step in flight was fetched"
    assert late.token_ids == list(harness.expected(facts[1]))[: len(late.token_ids)]
    num_tokens = len(late.token_ids)
    outputs = harness.run(early, late)
    assert [output.token_ids for output in outputs] == [harness.expected(one) for one in facts]
    assert num_tokens and outputs[1].usage.num_suspensions >= 1
    assert outputs[0].usage.num_suspensions == 0, "the earlier arrival never gives way"
    harness.check_empty()


def test_a_suspended_request_can_be_cancelled():
    harness, (early, late), facts = suspended_with_token_in_flight()
    harness.engine.cancel(late)
    assert late.output.finish_reason == "cancelled"
    (output,) = harness.run(early)
    assert output.token_ids == harness.expected(facts[0])
    harness.turn("late", 10, seed=2, max_tokens=12)
    harness.check_empty()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_cancelling_leaves_no_trace(num_steps):
    """With or without a step in flight, history, KV and other turns are as if it had never been sent."""
    harness = Harness()
    harness.turn("a", 20, max_tokens=5)
    neighbour = harness.facts(harness.prompt(8, seed=5), "b", max_tokens=12)
    running = harness.submit(neighbour, "b")
    turn = harness.submit(harness.facts(harness.prompt(30, seed=6), "a", max_tokens=9), "a")
    harness.step(num_steps)
    history = harness.history("a")
    harness.engine.cancel(turn)
    harness.engine.check_integrity()
    assert turn.output.finish_reason == "cancelled" and turn.output.usage.output_tokens == len(turn.token_ids)
    assert harness.history("a") == history
    # at once, with the cancelled turn's step still in flight
    output = harness.turn("a", 7, seed=7, max_tokens=9)
    assert output.usage.reused_gpu_tokens >= 24
    assert harness.run(running)[0].token_ids == harness.expected(neighbour)
    harness.check_empty()


def test_a_turn_that_is_cancelled_before_admission_counts_nothing():
    harness = Harness()
    harness.turn("a", 100, max_tokens=5)
    turn = harness.submit(harness.facts(harness.prompt(9, seed=2), "a", max_tokens=5), "a")
    harness.engine.cancel(turn)
    assert turn.output.usage == Usage(9, 0, 0, 0, 0, 0)
    harness.check_empty()


def test_cancelling_a_first_turn_forgets_the_conversation():
    harness = Harness()
    turn = harness.submit(harness.facts(harness.prompt(30), "a"), "a")
    harness.step(3)
    harness.engine.cancel(turn)
    harness.engine.cancel(turn)  # cancelling a finished turn has no effect
    assert harness.engine.conversations.listing() == []
    assert harness.engine.stats()["num_turns_cancelled"] == 1
    harness.check_empty()


def test_a_finishing_request_can_be_cancelled():
    """Its last token was granted, its pages are already unpinned, and the id is in flight."""
    harness = Harness()
    turn = harness.submit(harness.facts(harness.prompt(30), "a", max_tokens=2), "a")
    harness.step(2)
    harness.engine._loop.scheduler._retire_exhausted()
    assert turn.request.status is RequestStatus.FINISHING and turn.request.sequence.role is Role.IDLE
    harness.engine.cancel(turn)
    harness.drain()
    harness.turn("a", 30, max_tokens=2)
    harness.check_empty()


def test_one_off_requests_leave_nothing():
    harness = Harness()
    output = harness.turn(None, 40, max_tokens=5)
    assert output.conversation_id is None and harness.store.commits == []
    assert harness.engine.conversations.listing() == []
    harness.check_empty()


def test_an_unset_seed_is_drawn_and_stored():
    """The seed in the output and in the history is the one with which the tokens were drawn."""
    harness = Harness()
    facts = harness.facts(harness.prompt(4), "a", seed=None, temperature=1.0, max_tokens=6)
    (output,) = harness.run(harness.submit(facts, "a"))
    assert output.seed == harness.store.load("a").turns[0].seed
    known = harness.facts(harness.prompt(4), None, seed=output.seed, temperature=1.0, max_tokens=6)
    assert output.token_ids == harness.expected(known)
    assert harness.turn(None, 4).seed == 0
    again = harness.facts(harness.prompt(4), "a", seed=None, max_tokens=2)
    assert harness.run(harness.submit(again, "a"))[0].seed != output.seed
