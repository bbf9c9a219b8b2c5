"""Log-probabilities of prompts: complete and correct whatever was cached, evicted, shared, or lost."""

from __future__ import annotations

import numpy as np
import pytest

from pensieve_jax.core.errors import LogitsError, StepFailedError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.turn_node import TurnNode, new_turn_id
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.scheduler import RequestStatus
from tests.engine.harness import Harness, small_config

SCORED = SamplingParams(max_tokens=0, prompt_logprobs=2, ignore_eos=True, seed=0)


def root(prompt, *, durable=False, params=SCORED, parent_id=None) -> TurnSpec:
    node = TurnNode(
        turn_id=new_turn_id(parent_id), parent_id=parent_id, owner="ann", durable=durable, chain=b""
    )
    return TurnSpec(prompt, params, node=node)


def check(harness, prompt, output, history=()) -> None:
    facts = harness.facts(prompt, prompt_logprobs=SCORED.prompt_logprobs)
    facts = type(facts)(tuple(history), tuple(prompt), facts.params, 0, facts.max_total_tokens)
    harness.bench.check_prompt(facts, output.prompt_logprobs)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_prompts_with_a_common_beginning_are_scored_alike_in_any_order(order):
    """The turns of the first round leave their state; that of the second must not be read."""
    harness = Harness()
    start = harness.prompt(50, 1)
    prompts = [(*start, *harness.prompt(size, seed)) for seed, size in enumerate((1, 20, 70), 2)]
    for i in order:
        params = SamplingParams(max_tokens=3, ignore_eos=True, seed=0)
        harness.run(*harness.submit_all([root(prompts[i], params=params, durable=True)]))
    for i in order:
        (turn,) = harness.submit_all([root(prompts[i])])
        (output,) = harness.run(turn)
        check(harness, prompts[i], output)
        usage = output.usage
        assert usage.reused_gpu_tokens == usage.swapped_in_tokens == 0
        assert usage.prefilled_tokens == len(prompts[i])
    harness.check_empty()


def test_a_turn_without_a_reply_becomes_history():
    harness = Harness()
    prompt, more = harness.prompt(40, 1), harness.prompt(7, 2)
    (output,) = harness.run(harness.submit(harness.facts(prompt, "a", max_tokens=0), "a"))
    assert (output.token_ids, output.text, output.finish_reason) == ((), "", "length")
    assert output.usage.output_tokens == 0 and output.prompt_logprobs is None
    assert harness.history("a") == prompt
    facts = harness.facts(more, "a", max_tokens=5)
    (output,) = harness.run(harness.submit(facts, "a"))
    assert output.token_ids == harness.expected(facts)
    assert output.usage.reused_gpu_tokens == len(prompt) - 1
    harness.check_empty()


@pytest.mark.parametrize("num_kept", [31, 32, 33, 48])
def test_a_later_turn_scores_its_own_prompt_after_a_cached_history(num_kept):
    """A truncated history has state up to its end, and its last token predicts the prompt's first."""
    harness = Harness()
    harness.turn("a", 40, seed=1, max_tokens=10)
    harness.engine.truncate("a", num_kept)
    prompt = harness.prompt(30, 2)
    facts = harness.facts(prompt, "a", prompt_logprobs=1, max_tokens=2)
    (output,) = harness.run(harness.submit(facts, "a"))
    harness.bench.check_prompt(facts, output.prompt_logprobs)
    assert output.token_ids == harness.expected(facts)
    assert output.usage.reused_gpu_tokens == num_kept - 1
    harness.check_empty()


def test_a_scored_prompt_that_is_not_stored_leaves_no_state():
    harness = Harness()
    prompt = harness.prompt(60, 1)
    for durable, num_left in ((False, 0), (True, 1)):
        turns = harness.submit_all([root(prompt, durable=durable)])
        assert harness.engine.stats()["num_live_conversations"] == 1
        harness.run(*turns)
        stats = harness.engine.stats()
        assert stats["num_live_conversations"] == num_left
        assert (stats["num_free_gpu_pages"] == stats["num_gpu_pages"]) == (not num_left)
    harness.check_empty()


def test_choices_of_one_prompt_beside_the_one_that_scores_it():
    harness = Harness()
    prompt = harness.prompt(70, 1)
    plain = SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0, seed=5)
    scored = SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0, seed=4, prompt_logprobs=2)
    specs = [root(prompt, params=params, durable=True) for params in (scored, plain, plain)]
    outputs = harness.run(*harness.submit_all(specs))
    check(harness, prompt, outputs[0])
    for output, params in zip(outputs, (scored, plain, plain), strict=True):
        facts = harness.facts(prompt, seed=output.seed, max_tokens=4, temperature=params.temperature)
        assert output.token_ids == harness.expected(facts)
    harness.check_empty()


def test_a_prompt_behind_a_turn_in_the_tree():
    harness = Harness()
    first, prompt = harness.prompt(48, 1), harness.prompt(40, 2)
    params = SamplingParams(max_tokens=0, ignore_eos=True, seed=0)
    (parent,) = specs = [root(first, params=params, durable=True)]
    harness.run(*harness.submit_all(specs))
    for _ in range(2):  # extends the branch, then forks it
        (output,) = harness.run(*harness.submit_all([root(prompt, parent_id=parent.node.turn_id)]))
        check(harness, prompt, output, first)
    harness.check_empty()


def test_logits_that_are_not_finite_end_the_turn_that_scores_them():
    harness = Harness()
    prompt = harness.prompt(200, 1)
    turn = harness.submit(harness.facts(prompt, "a", prompt_logprobs=0, max_tokens=3), "a")
    other = harness.submit(facts := harness.facts(harness.prompt(20, 2), "b", max_tokens=3), "b")
    fetch = harness.runner.inner.fetch

    def spoiled(handle):
        result = fetch(handle)
        if result.prompt is not None:
            result.prompt.logprobs[len(result.prompt.logprobs) // 2] = np.nan
        return result

    harness.runner.inner.fetch = spoiled
    harness.drain()
    assert isinstance(turn.error, LogitsError)
    assert harness.run(other)[0].token_ids == harness.expected(facts)
    harness.check_empty()


def test_a_turn_whose_scores_are_lost_with_a_step_fails_even_if_it_was_suspended():
    """The next step suspends it before the scores of the failed one have arrived."""
    config = small_config(gpu_pages=9, max_num_batched_tokens=32, cpu_pages=20, reserve_fraction=0.0)
    harness = Harness(config)
    early = harness.submit(harness.facts(harness.prompt(46, 1), "a", max_tokens=60), "a")
    while not early.token_ids:
        harness.step()
    facts = harness.facts(harness.prompt(90, 2), "b", prompt_logprobs=1, max_tokens=2)
    late = harness.submit(facts, "b")
    seen = []

    def see(output):
        if any(request is late.request for request in output.suspended):
            seen.append(late.request.scored_end)
            harness.runner.faults["fetch"] = lambda: StepFailedError("the device failed")

    harness.on_step = see
    while not seen:
        harness.step()
    assert 1 < seen[0] < len(facts.prompt), "it was not suspended in the middle of its prompt"
    assert isinstance(late.error, StepFailedError) and late.request.status is RequestStatus.FINISHED
    harness.on_step = lambda output: None
    (output,) = harness.run(harness.submit(facts, "b"))
    harness.bench.check_prompt(facts, output.prompt_logprobs)
    harness.check_empty()
