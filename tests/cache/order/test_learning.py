"""How the learning order processes turns: buckets, sizes, and its description."""

from __future__ import annotations

import pytest

from pensieve_jax.cache.order.policies import make_policy
from pensieve_jax.cache.order.policy_selector import BLOCK_TOKENS
from pensieve_jax.cache.order.returns import bucket_of
from tests.cache.helpers import CHUNK, Cache, learned_state_of


def answered(cache: Cache, sequence, num_history_tokens, prompt_tokens, output_tokens=CHUNK) -> int:
    cache.manager.turns.answered(
        sequence, num_history_tokens, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )
    return sequence.bucket


@pytest.mark.parametrize(("num_history_tokens", "is_first"), [(316, True), (317, False)])
def test_a_turn_whose_tokens_are_the_whole_history_is_the_first(num_history_tokens, is_first):
    cache = Cache(200, policy="learned")
    sequence = cache.running("a", 320)
    bucket = answered(cache, sequence, num_history_tokens, 300)
    assert bucket == bucket_of(is_first=is_first, prompt_tokens=300, output_tokens=CHUNK)


@pytest.mark.parametrize(("num_history_tokens", "own_tokens"), [(496, 480 - 400), (500, 480)])
def test_a_shared_prefix_is_subtracted_from_the_first_prompt_only(num_history_tokens, own_tokens):
    cache = Cache(200, policy="learned")
    sequence = cache.manager.open("a")
    cache.manager.share(sequence, cache.manager.open_prefix("prefix", 25 * CHUNK))
    cache.running("a", 31 * CHUNK, sequence)
    bucket = answered(cache, sequence, num_history_tokens, 480)
    is_first = num_history_tokens == 496
    assert bucket == bucket_of(is_first=is_first, prompt_tokens=own_tokens, output_tokens=CHUNK)


def test_a_prompt_size_is_never_negative():
    cache = Cache(200, policy="learned")
    sequence = cache.manager.open("a")
    cache.manager.share(sequence, cache.manager.open_prefix("prefix", 25 * CHUNK))
    cache.running("a", 26 * CHUNK, sequence)
    assert answered(cache, sequence, 316, 300) == bucket_of(is_first=True, prompt_tokens=0, output_tokens=1)


def test_a_turn_without_a_history_is_not_a_return():
    cache = Cache(200, policy="learned")
    sequence = cache.running("a", 3 * CHUNK)
    cache.manager.turns.sent(sequence, 0)
    assert cache.manager.turns.stats()["num_returns_seen"] == 0
    answered(cache, sequence, 3 * CHUNK, 2 * CHUNK)
    cache.clock.advance(3.0)
    cache.manager.turns.sent(sequence, 1)
    assert cache.manager.turns.stats()["num_returns_seen"] == 1


def test_an_ended_conversation_does_not_return():
    cache = Cache(200, policy="learned")
    sequence = cache.running("a", 3 * CHUNK)
    answered(cache, sequence, 3 * CHUNK, 2 * CHUNK)
    cache.clock.advance(3.0)
    cache.manager.turns.ended("a")
    cache.manager.turns.sent(sequence, 3 * CHUNK)
    learned_state = cache.manager.turns.learned_state()
    assert learned_state.num_returns == 0 and learned_state.exposure_s.sum() == pytest.approx(3.0)


def test_an_ended_conversation_frees_its_place_in_the_ghost_caches():
    """A later conversation of the same name has lost nothing in any order."""
    cache = Cache(200, policy="learned")
    turns, sequence = cache.manager.turns, cache.running("a", 64 * CHUNK)
    answered(cache, sequence, 64 * CHUNK, 63 * CHUNK)
    ghosts = turns._selector._ghosts
    assert [ghost.num_held for ghost in ghosts] == [64 * CHUNK // BLOCK_TOKENS] * 3
    turns.ended("a")
    assert [ghost.num_held for ghost in ghosts] == [0] * 3


def test_idle_conversations_count_as_not_returned_so_far():
    cache = Cache(200, policy="learned")
    sequence = cache.running("a", 3 * CHUNK)
    answered(cache, sequence, 3 * CHUNK, 2 * CHUNK)
    cache.clock.advance(4.0)
    assert cache.manager.turns.learned_state().exposure_s[sequence.bucket].sum() == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("cpu_pages", "clean_pages", "num_chunks"), [(0, 10, 200), (50, 10, 200 + 40), (5, 10, 200)]
)
def test_chunks_that_are_on_both_tiers_ahead_of_need_count_once(cpu_pages, clean_pages, num_chunks):
    cache = Cache(200, cpu_pages, policy="learned", clean_pages=clean_pages)
    assert cache.manager.turns.learned_state().losses.counted_for[0] == num_chunks * CHUNK


def test_shared_chunks_are_not_own_blocks_in_the_ghost_caches():
    cache = Cache(200, policy="learned")
    sequence = cache.running("a", 64 * CHUNK)
    cache.manager.release(sequence)
    answered(cache, sequence, 64 * CHUNK, 63 * CHUNK)
    ghosts = cache.manager.turns._selector._ghosts
    assert [ghost.num_held for ghost in ghosts] == [64 * CHUNK // BLOCK_TOKENS] * 3
    cache.manager.fork(sequence, 32 * CHUNK, "fork")
    assert [ghost.num_held for ghost in ghosts] == [32 * CHUNK // BLOCK_TOKENS] * 3


def test_the_description_names_the_order_and_the_reason():
    cache = Cache(200, policy="learned")
    turns = cache.manager.turns
    assert turns.describe() == "following 'retention': no order has lost anything yet"
    assert turns.stats() == {
        **{f"shadow_{name}_recompute_s": 0.0 for name in ("retention", "lru", "returns")},
        **{"num_order_changes": 0, "num_returns_seen": 0},
    }
    turns._selector._add([1.0, 0.5, 2.0])
    assert turns.describe() == (
        "following 'retention': estimated recomputation: retention 1 s, lru 0.5 s, returns 2 s"
    )


def test_a_better_order_is_followed_after_a_turn():
    cache = Cache(200, policy="learned")
    turns, sequence = cache.manager.turns, cache.running("a", 3 * CHUNK)
    for _ in range(3):
        turns._selector._add([1.0, 0.5, 2.0])
    assert cache.manager._policy.selected == "retention"
    turns.sent(sequence, 3 * CHUNK)
    assert cache.manager._policy.selected == "lru" and turns.stats()["num_order_changes"] == 1


def test_it_continues_from_a_learned_state_and_forgets_it():
    cache = Cache(200, policy="learned")
    learned_state = learned_state_of(3)
    cache.manager.turns.begin(learned_state)
    assert cache.manager._policy.selected == "returns"
    found = cache.manager.turns.learned_state()
    assert found.num_returns == learned_state.num_returns and found.selected == "returns"
    cache.manager.turns.begin(None)
    assert cache.manager._policy.selected == "retention"


def test_orders_that_do_not_learn_ignore_turns():
    cache = Cache(8)
    sequence, turns = cache.running("a", CHUNK), cache.manager.turns
    turns.sent(sequence, 5)
    answered(cache, sequence, CHUNK, 5)
    turns.left(sequence, 5)
    turns.ended("a")
    assert turns.stats() == {} and sequence.bucket == 0 and cache.policy.name == "retention"
    assert make_policy("learned", None, CHUNK).name == "learned"
