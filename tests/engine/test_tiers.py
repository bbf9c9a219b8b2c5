"""Two tiers under the engine: what a returning turn copies, computes, waits for and reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pensieve_jax.core.errors import InvalidRequestError, StepFailedError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.turn_spec import TurnSpec
from tests.engine.fake_transfers import IMMEDIATE, Delays
from tests.engine.harness import Harness, small_config
from tests.engine.oracles import spec_of

NEVER = Delays(laziness=1.0)  # copies complete only when waited for, or long after the test


def two_tiers(*, delays=IMMEDIATE, **options):
    """Return a harness with 12 pages and 24 slots; it copies ahead of time only if asked to."""
    config = {"gpu_pages": 12, "cpu_pages": 24, "reserve_fraction": 0.0, "swap_out_fraction": 0.0} | options
    return Harness(small_config(**config), delays=delays)


def push_out(harness):
    """Run and end a conversation that takes every page: the others move to the CPU."""
    harness.turn("other", 16 * harness.config.cache.num_gpu_pages - 5, seed=77, max_tokens=5)
    harness.engine.end("other")
    harness.finish_copies()


def on_cpu(harness, conversation_id="a", prompt_len=60):
    """Return a conversation with all of its history on the CPU, except the last token."""
    harness.turn(conversation_id, prompt_len, max_tokens=4)
    push_out(harness)


def submit(harness, conversation_id, prompt_len=7, seed=1, **params):
    facts = harness.facts(harness.prompt(prompt_len, seed), conversation_id, seed, **params)
    return harness.submit(facts, conversation_id), facts


def test_a_history_on_the_cpu_is_copied_in_and_not_recomputed():
    harness = two_tiers()
    on_cpu(harness)
    assert harness.engine.census()["on cpu"] == 4
    num_steps = len(harness.runner.rows)
    usage = harness.turn("a", 7, seed=1, max_tokens=1).usage
    assert [row for rows in harness.runner.rows[num_steps:] for row in rows] == [(63, 71)]
    assert (usage.swapped_in_tokens, usage.recomputed_tokens, usage.prefilled_tokens) == (63, 0, 8)
    stats = harness.engine.stats()
    assert stats["num_swapped_in_chunks"] == 4 and stats["num_swapped_out_chunks"] == 4
    assert stats["swapped_in_bytes"] == stats["swapped_out_bytes"] > 0
    assert stats["cpu_hit_rate"] == 1.0 and stats["gpu_hit_rate"] == 0.0
    harness.check_empty()


def test_a_history_in_all_three_states_is_restored():
    """Of seven chunks 0 and 3 are dropped, 1 and 2 on the CPU, and 4 to 6 on the GPU."""
    harness = two_tiers(policy="lru")
    harness.turn("a", 108, max_tokens=4)
    harness.turn("b", 120, seed=2, max_tokens=2)  # takes 8 pages; 5 are free
    harness.engine.end("b")
    harness.finish_copies()
    harness.drop("a", 0, 3)
    states = [chunk.state.value for chunk in harness.engine.conversations.get("a").sequence.chunks]
    assert states == ["dropped", "on cpu", "on cpu", "dropped", *["on gpu"] * 3]
    num_steps = len(harness.runner.rows)
    usage = harness.turn("a", 9, seed=1, max_tokens=1).usage
    assert [row for rows in harness.runner.rows[num_steps:] for row in rows] == [
        (0, 16),
        (48, 64),
        (111, 121),
    ]
    assert (usage.reused_gpu_tokens, usage.swapped_in_tokens, usage.recomputed_tokens) == (47, 32, 32)
    assert usage.prefilled_tokens == 10
    harness.check_empty()


def test_on_an_idle_engine_the_step_waits_for_copies_and_not_the_host():
    """The copies begin, are expedited, and are read by the step, all in one step."""
    harness = two_tiers()
    on_cpu(harness)
    transfers = harness.runner.transfers
    transfers.events.clear()
    num_waits, num_steps = transfers.num_calls["wait"], len(harness.runner.rows)
    turn, facts = submit(harness, "a", max_tokens=1)
    harness.step()
    assert [name for name, _ in transfers.events] == ["swap_in", "expedite"]
    assert len(harness.runner.rows) == num_steps + 1 and len(harness.scheduled[-1].expedited) == 4
    assert harness.run(turn)[0].token_ids == harness.expected(facts)
    assert transfers.num_calls["wait"] == num_waits


def test_other_turns_continue_while_a_history_is_copied_in():
    """Each step has a token for running turns; the returning one computes up to its first missing chunk."""
    harness = two_tiers(delays=NEVER, gpu_pages=20)
    on_cpu(harness, prompt_len=60)
    runs, _ = submit(harness, None, 5, max_tokens=40)
    harness.step(2)
    turn, facts = submit(harness, "a", max_tokens=3)
    for _ in range(10):
        harness.step()
        assert [grant.request for grant in harness.scheduled[-1].grants] == [runs.request]
        assert not harness.scheduled[-1].expedited
    harness.engine.cancel(runs)
    harness.step()
    assert len(harness.scheduled[-1].expedited) == 4, "no other request is left to compute"
    assert harness.run(turn)[0].token_ids == harness.expected(facts)
    harness.check_empty()


def test_the_oldest_turn_waits_for_chunks_that_are_being_copied_out():
    """Its pages were given away before the copies out were complete: the engine waits for one, by id."""
    harness = two_tiers(delays=NEVER)
    harness.turn("a", 60, max_tokens=4)
    harness.turn("b", 187, seed=2, max_tokens=5)
    turn, facts = submit(harness, "a", max_tokens=2)
    num_waits = harness.runner.transfers.num_calls["wait"]
    assert harness.run(turn)[0].token_ids == harness.expected(facts)
    assert harness.runner.transfers.num_calls["wait"] > num_waits
    assert turn.output.usage.swapped_in_tokens == 63
    harness.check_empty()


@pytest.mark.parametrize("prefetch", [True, False])
def test_queued_turns_are_prefetched(prefetch):
    """When a turn is admitted all its chunks are there, without further copies."""
    harness = two_tiers(gpu_pages=20, max_num_running=1, prefetch=prefetch)
    on_cpu(harness)
    first, _ = submit(harness, None, 5, max_tokens=8)
    turn, facts = submit(harness, "a", max_tokens=2)
    harness.step(5)
    assert (harness.engine.census()["on both"] == 4) is prefetch and not first.done
    assert harness.engine.stats()["num_prefetched_chunks"] == (4 if prefetch else 0)
    num_copies = harness.engine.stats()["num_swapped_in_chunks"]
    harness.drain()
    assert turn.output.token_ids == harness.expected(facts) and turn.output.usage.swapped_in_tokens == 63
    assert harness.engine.stats()["num_swapped_in_chunks"] - num_copies == (0 if prefetch else 4)
    harness.check_empty()


def test_a_suspended_turn_resumes_from_the_cpu_tier():
    harness = two_tiers(gpu_pages=6)
    early, first = submit(harness, "early", 30, seed=1, max_tokens=50)
    late, second = submit(harness, "late", 40, seed=2, max_tokens=30)
    outputs = harness.run(early, late)
    assert [output.token_ids for output in outputs] == [harness.expected(first), harness.expected(second)]
    usage = outputs[1].usage
    assert usage.num_suspensions >= 1 and usage.resume_swapped_in_tokens > 0
    assert usage.resume_recomputed_tokens == 0, "its work was kept"
    assert harness.engine.stats()["num_dropped_chunks"] == 0
    harness.check_empty()


def test_the_cpu_tier_survives_a_failed_step():
    harness = two_tiers()
    on_cpu(harness)
    turn, facts = submit(harness, "a")
    harness.runner.faults["launch"] = lambda: StepFailedError("the device failed")
    assert harness.step() == [turn] and turn.error is not None
    (output,) = harness.run(harness.submit(facts, "a"))
    assert output.token_ids == harness.expected(facts)
    usage = output.usage  # the tail was to be appended to, which had made its copy stale
    assert (usage.swapped_in_tokens, usage.recomputed_tokens) == (48, 15)
    harness.check_empty()


def test_an_interrupt_drops_both_tiers():
    harness = two_tiers()
    on_cpu(harness)
    harness.runner.faults["completed"] = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        harness.step()
    output = harness.turn("a", 7, seed=1, max_tokens=2)
    assert output.usage.recomputed_tokens == 63 and output.usage.swapped_in_tokens == 0
    harness.check_empty()


# Shared prefixes


def prefix_facts(harness, prompt_len, seed):
    """Return the facts of a turn that begins with 50 shared tokens."""
    prompt = (*harness.prompt(50, 9), *harness.prompt(prompt_len, seed))
    return replace(harness.facts(prompt, None, seed, max_tokens=4), num_prefix_tokens=50)


def run_with_prefix(harness, conversation_id, prompt_len, seed):
    facts = prefix_facts(harness, prompt_len, seed)
    (output,) = harness.run(harness.submit(facts, conversation_id))
    assert output.token_ids == harness.expected(facts)
    return output


def test_full_chunks_of_a_prefix_are_computed_once():
    harness = two_tiers(gpu_pages=30)
    usages = [run_with_prefix(harness, name, 10, seed).usage for seed, name in enumerate(("a", "b", None))]
    assert [usage.reused_gpu_tokens for usage in usages] == [0, 48, 48]
    assert [usage.prefilled_tokens for usage in usages] == [60, 12, 12]
    assert harness.engine.stats()["num_shared_prefixes"] == 1
    assert harness.turn("b", 5, seed=7).usage.reused_gpu_tokens == 63
    harness.check_empty()


def test_a_prefix_is_copied_in_once_for_all():
    harness = two_tiers()
    run_with_prefix(harness, "a", 10, 1)
    push_out(harness)
    assert run_with_prefix(harness, "b", 10, 2).usage.swapped_in_tokens == 48
    assert harness.turn("a", 5, seed=7).usage.reused_gpu_tokens == 48
    harness.check_empty()


def test_turns_that_start_together_compute_a_prefix_once():
    """The second one reads what the first computes, in the same step."""
    harness = two_tiers(gpu_pages=30)
    facts = [prefix_facts(harness, 10, seed) for seed in (1, 2)]
    turns = [harness.submit(one, name) for one, name in zip(facts, "ab", strict=True)]
    harness.step()
    assert harness.runner.rows[-1] == [(0, 48), (48, 60), (48, 60)]
    assert [output.token_ids for output in harness.run(*turns)] == [harness.expected(one) for one in facts]
    harness.check_empty()


def test_a_prefix_is_for_first_turns_only():
    harness = two_tiers()
    harness.turn("a", 10)
    spec = spec_of(prefix_facts(harness, 10, 1), "a")
    with pytest.raises(InvalidRequestError, match="first turn"):
        harness.engine.submit([spec])
    harness.check_empty()


def test_a_conversation_that_left_memory_finds_its_prefix_again():
    harness = two_tiers(cpu_pages=0, gpu_pages=30)
    run_with_prefix(harness, "a", 10, 1)
    live = harness.engine.conversations.get("a")
    harness.drop("a", 3)
    assert not live.sequence.holds_state
    harness.engine.conversations.forget(live)
    again = harness.turn("a", 5, seed=7).usage
    assert (again.reused_gpu_tokens, again.recomputed_tokens) == (48, 15)
    harness.engine.end("a")
    # Cut to less than the prefix, it is a history like any other.
    run_with_prefix(harness, "b", 10, 2)
    harness.engine.truncate("b", 40)
    harness.engine.conversations.forget(harness.engine.conversations.get("b"))
    assert harness.turn("b", 5, seed=8).usage.recomputed_tokens == 39
    harness.check_empty()


@pytest.mark.parametrize("order", [(32, 50), (50, 32)])
def test_a_conversation_that_left_memory_finds_its_longest_prefix(order):
    """The prefixes have 50 and 32 tokens, one the beginning of the other; either may be used first."""
    harness = two_tiers(gpu_pages=40)
    for num_prefix_tokens in order:
        facts = replace(prefix_facts(harness, 10, 1), num_prefix_tokens=num_prefix_tokens)
        harness.run(harness.submit(facts, f"from-{num_prefix_tokens}"))
    conversations = harness.engine.conversations
    conversations.forget(conversations.get("from-50"))
    assert harness.engine.explain("from-50").chunks[2].is_shared
    assert harness.turn("from-50", 5, seed=7).usage.reused_gpu_tokens == 48
    harness.check_empty()


def test_a_conversation_without_kv_cache_leaves_memory_and_then_its_prefix():
    """An unused prefix leaves memory once its KV cache is gone."""
    harness = two_tiers(cpu_pages=0)
    for number in range(200):
        run_with_prefix(harness, f"c{number}", 10, number)
    stats = harness.engine.stats()
    assert stats["num_live_conversations"] < 150 and stats["num_shared_prefixes"] == 1
    for info in harness.store.conversations():
        harness.engine.end(info.conversation_id)
    harness._drop_prefixes()
    for number in range(200):  # until the next sweep
        harness.turn(f"d{number}", 60, seed=number, max_tokens=2)
    assert harness.engine.stats()["num_shared_prefixes"] == 0
    harness.check_empty()


def test_the_stateless_baseline_shares_nothing():
    harness = two_tiers(stateful=False, gpu_pages=30)
    usages = [run_with_prefix(harness, name, 10, seed).usage for seed, name in enumerate("ab")]
    assert all(usage.reused_gpu_tokens == 0 and usage.prefilled_tokens == 60 for usage in usages)
    assert harness.engine.stats()["num_shared_prefixes"] == 0


def test_a_refused_prefix_is_named():
    harness = two_tiers()
    with pytest.raises(InvalidRequestError, match="prefix"):
        harness.engine.share_prefix([])
    with pytest.raises(InvalidRequestError, match="share_prefix"):
        harness.engine.submit([TurnSpec((1, 2), SamplingParams(), "a", prefix=(1, 2, 3))])


@pytest.mark.parametrize("number", [-1, 1.5, "2", True])
def test_an_invalid_number_to_push_out_is_named_and_has_no_effect(number):
    harness = two_tiers()
    harness.turn("a", 20)
    turn, facts = submit(harness, "b")
    harness.step()
    with pytest.raises(InvalidRequestError, match="max_num_chunks"):
        harness.engine.push_out("a", number)
    assert harness.run(turn)[0].token_ids == harness.expected(facts)
    harness.check_empty()
