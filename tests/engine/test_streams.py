"""Turns as text and as streams, over the engine on the fake runner: stop strings, deltas, closing."""

from __future__ import annotations

import gc

import pytest

from pensieve_jax import Stream
from pensieve_jax.core.errors import StepFailedError
from pensieve_jax.stream import run_all
from pensieve_jax.text import byte_tokenizer
from tests.engine.harness import Harness
from tests.engine.oracles import spec_of

TOKENIZER = byte_tokenizer()


def text_harness():
    return Harness(tokenizer=TOKENIZER)


def stream(harness, name, prompt_len=6, *, seed=0, **params):
    facts = harness.facts(harness.prompt(prompt_len, seed), name, seed, **params)
    return Stream(harness.engine, spec_of(facts, name)), harness.expected(facts)


def test_text_is_the_decoded_ids():
    harness = text_harness()
    output = harness.turn("a", 5, max_tokens=40)
    assert output.text == TOKENIZER.decode(list(output.token_ids)) and output.text
    assert harness.store.load("a").turns[0].output_text == output.text


def test_a_stop_string_ends_the_turn_before_it():
    """The history has the ids up to the one that completes it; the text ends before it."""
    harness = text_harness()
    facts = harness.facts(harness.prompt(5), "a", max_tokens=60)
    expected = harness.expected(facts)
    text = TOKENIZER.decode(list(expected))
    stop = next(text[i : i + 2] for i in range(4, len(text)) if text.find(text[i : i + 2]) == i)
    assert "\N{REPLACEMENT CHARACTER}" not in stop
    facts = harness.facts(harness.prompt(5), "a", max_tokens=60, stop=(stop,))
    (output,) = harness.run(harness.submit(facts, "a"))
    num_ids = next(n for n in range(61) if stop in TOKENIZER.decode(list(expected[:n])))
    assert output.finish_reason == "stop" and output.token_ids == expected[:num_ids]
    assert output.text == text[: text.find(stop)] and output.stop_string == stop
    assert harness.history("a") == (*facts.prompt, *expected[:num_ids])
    harness.turn("a", 4, seed=1, max_tokens=5)
    harness.check_empty()


def test_a_stream_equals_its_turn():
    harness = text_harness()
    deltas, expected = stream(harness, "a", max_tokens=30)
    seen = list(deltas)
    assert tuple(token_id for delta in seen for token_id in delta.token_ids) == expected
    assert "".join(delta.text for delta in seen) == deltas.output.text
    assert len(seen) == 30, "one for each token, as it comes"


def test_two_streams_interleave():
    """Each drives the engine, and the other's deltas wait for it."""
    harness = text_harness()
    (one, expected_one), (two, expected_two) = (
        stream(harness, name, seed=seed, max_tokens=12) for seed, name in enumerate("ab")
    )
    ids = {one: [], two: []}
    for _ in range(6):
        for deltas in (one, two):
            ids[deltas] += next(deltas).token_ids
    assert len(harness.runner.rows) < 12, "a step serves both"
    for deltas in (two, one):
        for delta in deltas:
            ids[deltas] += delta.token_ids
    assert (tuple(ids[one]), tuple(ids[two])) == (expected_one, expected_two)
    harness.drain()
    harness.check_empty()


@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_closing_a_stream_cancels_its_turn(how):
    harness = text_harness()
    harness.turn("a", 20, max_tokens=4)
    history = harness.history("a")
    deltas, _ = stream(harness, "a", seed=1, max_tokens=30)
    next(deltas)
    assert harness.engine.conversations.is_busy("a")
    if how == "close":
        deltas.close()
    elif how == "with":
        with deltas:
            next(deltas)
    else:
        del deltas
        gc.collect()
    assert not harness.engine.conversations.is_busy("a") and harness.history("a") == history
    harness.turn("a", 5, seed=2, max_tokens=4)
    harness.check_empty()


def test_closing_a_stream_that_ended_keeps_its_turn():
    harness = text_harness()
    with stream(harness, "a", max_tokens=3)[0] as deltas:
        list(deltas)
    assert len(harness.history("a")) == 9 and deltas.output.finish_reason == "length"


def test_a_failed_stream_raises_its_turns_error():
    harness = text_harness()
    deltas, _ = stream(harness, "a", max_tokens=9)
    next(deltas)
    harness.runner.faults["fetch"] = lambda: StepFailedError("the device failed")
    with pytest.raises(StepFailedError, match="the device failed"):
        list(deltas)
    deltas.close()
    assert harness.engine.conversations.listing() == []


def test_an_error_of_one_turn_carries_the_turns_that_ended():
    harness = text_harness()
    facts = [harness.facts(harness.prompt(6, num), str(num), max_tokens=num) for num in (9, 2)]
    step, num_steps = harness.engine.step, 0

    def fail_later():
        nonlocal num_steps
        num_steps += 1
        if num_steps == 6:
            harness.runner.faults["fetch"] = lambda: StepFailedError("the device failed")
        return step()

    harness.engine.step = fail_later
    with pytest.raises(StepFailedError, match="the device failed") as caught:
        run_all(harness.engine, [spec_of(one, str(one.params.max_tokens)) for one in facts], progress=False)
    lost, kept = caught.value.outputs
    assert lost is None and kept.token_ids == harness.expected(facts[1])


def test_logprobs_come_with_the_tokens():
    """Covers none, the chosen ids', and the most likely too; other turns' settings do not matter."""
    harness = text_harness()
    wanted = (None, 0, 3)
    facts = [
        harness.facts(harness.prompt(5, i), None, logprobs=k, max_tokens=6) for i, k in enumerate(wanted)
    ]
    outputs = harness.run(*(harness.submit(one) for one in facts))
    assert outputs[0].logprobs is None
    for one, output, k in zip(facts[1:], outputs[1:], wanted[1:], strict=True):
        harness.bench.check_logprobs(one, output.logprobs)
        assert all(len(entry.top) == k for entry in output.logprobs)


def test_deltas_of_all_turns_are_returned_in_columns():
    harness = text_harness()
    asked = [harness.facts([number + 1], max_tokens=9, logprobs=number or None) for number in range(2)]
    turns = one, other = harness.submit_all([spec_of(facts, None) for facts in asked])
    texts, ids, logprobs = {one: "", other: ""}, {one: [], other: []}, []
    for num_steps in (1, 1, 1, 3, 1, 1):
        harness.step(num_steps)
        deltas = harness.engine.take_deltas()
        for turn, text, new in zip(deltas.turns, deltas.texts, deltas.token_ids, strict=True):
            assert new if num_steps == 1 else len(new) == 3  # unread deltas are one delta
            ids[turn] += [new] if isinstance(new, int) else new
            texts[turn] += text
        logprobs += deltas.logprobs.get(other, [])
        assert one not in deltas.logprobs
    assert len(ids[one]) == 7 and harness.engine.take_deltas().turns == []
    harness.drain()
    assert harness.engine.take_deltas().turns == [], "turns that ended are those that `step` returned"
    for turn in turns:
        rest = turn.take_delta()
        assert (*ids[turn], *rest.token_ids) == turn.output.token_ids
        assert texts[turn] + rest.text == turn.output.text
    assert tuple(logprobs) == other.output.logprobs[:7]
