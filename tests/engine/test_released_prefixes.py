"""A released prefix: its KV cache stays until the last conversation that began with it ends."""

from __future__ import annotations

import pytest

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.turn import Turn
from tests.engine.harness import Harness, small_config
from tests.engine.oracles import prompt_ids

PREFIX_LEN = 50  # three full chunks, and two tokens
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, seed=0)


def shared(harness: Harness) -> SharedPrefix:
    return harness.engine.share_prefix(prompt_ids(9, PREFIX_LEN, harness.bench.vocab_size))


def submit(harness: Harness, prefix: SharedPrefix, name: str | None, seed: int = 1) -> Turn:
    spec = TurnSpec(harness.prompt(10, seed), PARAMS, name, prefix=prefix)
    return harness.submit_all([spec])[0]


def check(harness: Harness, turn: Turn, seed: int = 1) -> None:
    """Run a turn, and compare its tokens with those of a model without a cache."""
    prompt = (*prompt_ids(9, PREFIX_LEN, harness.bench.vocab_size), *harness.prompt(10, seed))
    (output,) = harness.run(turn)
    assert output.token_ids == harness.expected(harness.facts(prompt, None, max_tokens=4))


def num_free(harness: Harness) -> int:
    return harness.engine.census()["free pages"]


def test_an_unused_prefix_is_freed_at_once() -> None:
    harness = Harness()
    prefix = shared(harness)
    check(harness, submit(harness, prefix, None))
    assert num_free(harness) == 40 - 3, "the one-off turn left the prefix behind"
    harness.engine.release_prefix(prefix)
    harness.engine.check_integrity()
    assert num_free(harness) == 40 and harness.engine.stats()["num_shared_prefixes"] == 0
    harness.engine.release_prefix(prefix)


def test_conversations_that_began_with_it_continue_and_the_last_one_frees_it() -> None:
    harness = Harness()
    prefix = shared(harness)
    for name in "ab":
        check(harness, submit(harness, prefix, name))
    harness.engine.release_prefix(prefix)
    harness.engine.check_integrity()
    for name in "ab":
        assert harness.turn(name, 6, seed=3, max_tokens=3).usage.reused_gpu_tokens == PREFIX_LEN + 13
    harness.engine.end("a")
    assert harness.turn("b", 6, seed=4, max_tokens=3).usage.recomputed_tokens == 0
    harness.engine.end("b")
    harness.engine.check_integrity()
    assert num_free(harness) == 40


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_turn_that_was_accepted_with_it_runs_to_its_end(num_steps: int) -> None:
    harness = Harness()
    prefix = shared(harness)
    turn = submit(harness, prefix, None)
    harness.step(num_steps)
    harness.engine.release_prefix(prefix)
    check(harness, turn)
    assert num_free(harness) == 40


@pytest.mark.parametrize("stateful", [True, False])
def test_no_new_turn_uses_a_released_prefix(stateful: bool) -> None:
    harness = Harness(small_config(stateful=stateful))
    prefix = shared(harness)
    harness.engine.release_prefix(prefix)
    with pytest.raises(InvalidRequestError, match=r"prefix is SharedPrefix.*share it again"):
        submit(harness, prefix, "a")
    check(harness, submit(harness, shared(harness), "a"))
    harness.check_empty()


def test_an_equal_prefix_is_a_separate_one() -> None:
    """Its next turn recomputes the KV cache, beside that of the users of the released one."""
    harness = Harness()
    one, two = shared(harness), shared(harness)
    check(harness, submit(harness, one, "a"))
    harness.engine.release_prefix(one)
    turn = submit(harness, two, "b", seed=2)
    check(harness, turn, seed=2)
    assert turn.result().usage.reused_gpu_tokens == 0
    again = submit(harness, two, "c", seed=3)
    check(harness, again, seed=3)
    assert again.result().usage.reused_gpu_tokens == 48
    harness.check_empty()


def test_a_history_that_left_memory_does_not_return_to_it() -> None:
    harness = Harness()
    prefix = shared(harness)
    check(harness, submit(harness, prefix, "a"))
    harness.engine.release_prefix(prefix)
    harness.engine.conversations.forget(harness.engine.conversations.get("a"))
    assert num_free(harness) == 40
    assert harness.turn("a", 5, seed=7).usage.recomputed_tokens == PREFIX_LEN + 13
    harness.check_empty()


def test_an_invalid_prefix_is_named() -> None:
    harness = Harness()
    with pytest.raises(InvalidRequestError, match="share_prefix"):
        harness.engine.release_prefix((1, 2, 3))  # type: ignore[arg-type]
    harness.turn("a", 5)
