"""Named conversations that begin as a fork: what they reuse, and when they leave memory."""

from __future__ import annotations

import pytest

from pensieve_jax.core.errors import InvalidRequestError, UnknownConversationError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.turn_spec import TurnSpec
from tests.engine.harness import Harness, small_config

CHUNK = 16


def sweep(harness: Harness) -> None:
    """Create enough conversations to make those without KV cache leave memory."""
    for number in range(70):
        harness.turn(f"other-{number}", 3, seed=10 + number, max_tokens=2)


@pytest.mark.parametrize("name", ["source", "fork"])
@pytest.mark.parametrize("num_behind", [1, 6])
def test_a_conversation_whose_kv_cache_is_all_shared_stays_in_memory(name: str, num_behind: int) -> None:
    """If the history ends on a chunk boundary that is the source, else the fork."""
    harness = Harness(small_config(gpu_pages=400))
    num_tokens = 10 * CHUNK + num_behind
    harness.turn("source", 150, max_tokens=num_tokens - 150)
    harness.engine.fork("source", "fork")
    sweep(harness)
    usage = harness.turn(name, 5, seed=5, max_tokens=3).usage
    assert usage.recomputed_tokens < num_behind and usage.reused_gpu_tokens >= 10 * CHUNK
    harness.check_empty()


def test_a_conversation_that_lost_its_shared_chunks_leaves_memory() -> None:
    harness = Harness(small_config(gpu_pages=60))
    harness.turn("source", 150, max_tokens=16)
    harness.engine.fork("source", "fork")
    harness.engine.forget_state("source")
    harness.engine.forget_state("fork")
    sweep(harness)
    assert not {"source", "fork"} & harness.engine.conversations._live.keys()
    harness.check_empty()


@pytest.mark.parametrize("num_tokens", [10 * CHUNK, 10 * CHUNK + 5])
def test_a_fork_within_a_prefix_in_use_finds_it_again(num_tokens: int) -> None:
    """It may leave memory, since loading it finds the prefix."""
    harness = Harness(small_config(gpu_pages=400))
    prefix = harness.engine.share_prefix(harness.prompt(10 * CHUNK, 3))
    params = SamplingParams(max_tokens=3, ignore_eos=True, seed=0)
    harness.run(*harness.submit_all([TurnSpec(harness.prompt(9, 2), params, "source", prefix=prefix)]))
    harness.engine.fork("source", "fork", num_tokens)
    sweep(harness)
    assert "fork" not in harness.engine.conversations._live
    usage = harness.turn("fork", 5, seed=5, max_tokens=3).usage
    assert usage.reused_gpu_tokens == 10 * CHUNK
    harness.check_empty()


def test_a_fork_of_a_running_conversation_without_kv_cache_keeps_nothing() -> None:
    harness = Harness(small_config(gpu_pages=60, stateful=False))
    harness.turn("source", 150, max_tokens=11)
    running = harness.submit(harness.facts(harness.prompt(5, 2), "source", max_tokens=20), "source")
    harness.step(4)
    harness.engine.fork("source", "fork")
    harness.run(running)
    assert harness.engine.census()["free pages"] == 60
    usage = harness.turn("fork", 5, seed=5, max_tokens=3).usage
    assert usage.reused_gpu_tokens == 0 and usage.recomputed_tokens == 160
    harness.check_empty()


@pytest.mark.parametrize("is_source_in_memory", [True, False])
def test_a_fork_replaces_one_that_another_replica_has_ended(is_source_in_memory: bool) -> None:
    harness = Harness(small_config(gpu_pages=60))
    harness.turn("source", 60, max_tokens=5)
    harness.turn("fork", 300, seed=2, max_tokens=5)
    conversations = harness.engine.conversations
    harness.store.inner.delete("fork")  # as the other replica does
    if not is_source_in_memory:
        conversations.forget(conversations.get("source"))
    harness.engine.fork("source", "fork")
    sequences = [sequence.sequence_id for sequence in harness.engine.cache._store]
    assert sequences.count("fork") == is_source_in_memory
    harness.turn("fork", 5, seed=3, max_tokens=3)
    harness.check_empty()


def test_a_refused_fork_leaves_the_existing_conversation_unchanged() -> None:
    harness = Harness()
    harness.turn("source", 60, max_tokens=5)
    harness.turn("taken", 60, seed=2, max_tokens=5)
    with pytest.raises(InvalidRequestError, match="taken"):
        harness.engine.fork("source", "taken")
    assert harness.turn("taken", 5, seed=3, max_tokens=3).usage.recomputed_tokens == 0
    harness.check_empty()


@pytest.mark.parametrize("limits", [{"max_idle_conversations": 2}, {"idle_ttl_s": 10.0}])
def test_a_fork_of_a_conversation_about_to_expire_has_its_own_time_to_live(limits: dict[str, float]) -> None:
    """It once expired before its first turn, which then began another conversation of that name."""
    harness = Harness(small_config(**limits))
    harness.turn("source", 40, max_tokens=5)
    harness.clock.advance(6)
    harness.turn("other", 40, seed=1, max_tokens=5)
    history = harness.history("source")
    harness.engine.expire_idle()
    harness.engine.fork("source", "the fork")
    harness.clock.advance(6)
    harness.engine.expire_idle()
    assert harness.turn("the fork", 5, seed=2, max_tokens=3).usage.prefilled_tokens == 6
    assert harness.history("the fork")[: len(history)] == history
    with pytest.raises(UnknownConversationError):
        harness.history("source")
    harness.check_empty()


def test_of_many_forks_that_wait_for_a_turn_the_latest_stay_in_memory() -> None:
    """They once had the template's age, and the ones created first stayed."""
    harness = Harness(small_config(gpu_pages=400))
    harness.turn("template", 10 * CHUNK, max_tokens=4)
    for number in range(100):
        harness.clock.advance(1.0)
        harness.engine.fork("template", f"fork-{number}", 10 * CHUNK)
    assert harness.engine.explain("fork-99").idle_s == 0.0
    sweep(harness)
    assert harness.turn("fork-99", 5, seed=5, max_tokens=2).usage.reused_gpu_tokens == 10 * CHUNK
    assert harness.turn("fork-0", 5, seed=5, max_tokens=2).usage.reused_gpu_tokens == 0
    harness.check_empty()


def test_a_template_whose_kv_cache_is_all_shared_stays_in_memory_longer_than_its_forks() -> None:
    """Older than 64 waiting forks, it once left memory, and the next fork had no KV cache to begin with."""
    harness = Harness(small_config(gpu_pages=400))
    harness.turn("template", 10 * CHUNK - 3, max_tokens=4)
    for number in range(100):
        harness.clock.advance(1.0)
        harness.engine.fork("template", f"fork-{number}")
    sweep(harness)
    harness.engine.fork("template", "next")
    for name in ("fork-99", "next"):
        assert harness.turn(name, 5, seed=5, max_tokens=2).usage.reused_gpu_tokens == 10 * CHUNK
    harness.check_empty()


def test_the_shared_chunks_are_as_recent_as_the_fork() -> None:
    """They once had the template's age, and were evicted before chunks unused for longer than the fork's."""
    harness = Harness(small_config(gpu_pages=400, policy="lru"))
    for name in ("template", "other"):
        harness.turn(name, 5 * CHUNK, max_tokens=4)
        harness.clock.advance(10.0)
    harness.engine.fork("template", "fork")
    fork, other = (harness.engine.explain(name) for name in ("fork", "other"))
    assert (fork.idle_s, other.idle_s) == (0.0, 10.0)
    worths = [[chunk.worth for chunk in found.chunks if chunk.worth is not None] for found in (fork, other)]
    assert len(worths[0]) == 5 and min(worths[0]) > max(worths[1])
    harness.check_empty()


@pytest.mark.long
def test_only_the_latest_forks_of_a_template_stay_in_memory() -> None:
    """Each new fork uses the template's KV cache, so no other conversation's end frees the forks."""
    harness = Harness(small_config(gpu_pages=60))
    harness.turn("template", 10 * CHUNK, max_tokens=4)
    for number in range(300):
        harness.engine.fork("template", f"fork-{number}", 10 * CHUNK)
        harness.turn(f"fork-{number}", 20, seed=number, max_tokens=2)
        harness.clock.advance(1.0)
    assert len(harness.engine._conversations._live) < 300
    assert harness.turn("fork-298", 5, seed=5, max_tokens=2).usage.reused_gpu_tokens >= 10 * CHUNK
    usage = harness.turn("fork-0", 5, seed=5, max_tokens=2).usage
    assert usage.reused_gpu_tokens == 0 and usage.recomputed_tokens > 10 * CHUNK
    harness.check_empty()
