"""Named conversations that begin as another one: what they find, and when they leave memory."""

from __future__ import annotations

import pytest

from pensieve_jax.core.errors import InvalidRequestError, UnknownConversationError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.turn_spec import TurnSpec
from tests.engine.harness import Harness, small_config

CHUNK = 16


def sweep(harness: Harness) -> None:
    """So many conversations come that those without state leave memory."""
    for number in range(70):
        harness.turn(f"other-{number}", 3, seed=10 + number, max_tokens=2)


@pytest.mark.parametrize("name", ["source", "fork"])
@pytest.mark.parametrize("num_behind", [1, 6])
def test_all_of_whose_state_is_shared_stays_in_memory(name: str, num_behind: int) -> None:
    """Where the history ends on a chunk's end the source is such a one, else the fork is."""
    harness = Harness(small_config(gpu_pages=400))
    num_tokens = 10 * CHUNK + num_behind
    harness.turn("source", 150, max_tokens=num_tokens - 150)
    harness.engine.fork("source", "fork")
    sweep(harness)
    usage = harness.turn(name, 5, seed=5, max_tokens=3).usage
    assert usage.recomputed_tokens < num_behind and usage.reused_gpu_tokens >= 10 * CHUNK
    harness.check_empty()


def test_who_lost_what_is_shared_leaves_memory() -> None:
    harness = Harness(small_config(gpu_pages=60))
    harness.turn("source", 150, max_tokens=16)
    harness.engine.fork("source", "fork")
    harness.engine.forget_state("source")
    harness.engine.forget_state("fork")
    sweep(harness)
    assert not {"source", "fork"} & harness.engine.conversations._live.keys()
    harness.check_empty()


@pytest.mark.parametrize("num_tokens", [10 * CHUNK, 10 * CHUNK + 5])
def test_a_fork_within_a_prefix_that_somebody_keeps_finds_it_again(num_tokens: int) -> None:
    """It may leave memory, since it finds the prefix when it is loaded."""
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


def test_a_fork_of_a_running_conversation_keeps_nothing_without_state() -> None:
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
def test_a_fork_takes_the_place_of_one_that_another_replica_has_ended(is_source_in_memory: bool) -> None:
    harness = Harness(small_config(gpu_pages=60))
    harness.turn("source", 60, max_tokens=5)
    harness.turn("fork", 300, seed=2, max_tokens=5)
    conversations = harness.engine.conversations
    harness.store.inner.delete("fork")  # by the other one
    if not is_source_in_memory:
        conversations.forget(conversations.get("source"))
    harness.engine.fork("source", "fork")
    sequences = [sequence.sequence_id for sequence in harness.engine.cache._store]
    assert sequences.count("fork") == is_source_in_memory
    harness.turn("fork", 5, seed=3, max_tokens=3)
    harness.check_empty()


def test_a_refused_fork_leaves_who_has_the_name_as_it_is() -> None:
    harness = Harness()
    harness.turn("source", 60, max_tokens=5)
    harness.turn("taken", 60, seed=2, max_tokens=5)
    with pytest.raises(InvalidRequestError, match="taken"):
        harness.engine.fork("source", "taken")
    assert harness.turn("taken", 5, seed=3, max_tokens=3).usage.recomputed_tokens == 0
    harness.check_empty()


@pytest.mark.parametrize("limits", [{"max_idle_conversations": 2}, {"idle_ttl_s": 10.0}])
def test_a_fork_of_one_that_is_about_to_end_is_as_new_as_any(limits: dict[str, float]) -> None:
    """It once ended before its first turn, which then began another conversation of that name."""
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
    """All of them were once as old as the template, and of these the first made stayed."""
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


def test_a_template_all_of_whose_state_is_shared_outlives_its_forks_in_memory() -> None:
    """Older than 64 forks that wait for a turn, it left, and the next one had no state to begin with."""
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


def test_what_a_fork_begins_with_is_as_recent_as_the_fork() -> None:
    """It was as old as the template, and gave way before what nobody had used for longer than the fork."""
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


def test_forks_of_a_template_leave_memory_but_for_the_latest() -> None:
    """Each new one keeps the template's state in use, so that nobody else's end frees them."""
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
