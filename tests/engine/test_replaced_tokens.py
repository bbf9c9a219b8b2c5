"""Turns that keep a part of the earlier tokens and replace the rest, compared with the reference."""

from __future__ import annotations

import dataclasses

import pytest

from pensieve_jax.core.errors import HistoryError, InvalidRequestError, StepFailedError
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.turn_node import TurnNode, TurnOrigin, new_turn_id
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.turn import Turn
from tests.engine.harness import Harness, small_config
from tests.engine.oracles import TurnFacts
from tests.engine.trees import Forest, Sent

CHUNK = 16


def replacing(
    harness: Harness, name: str, keep: int, length: int = 20, **params: object
) -> tuple[TurnFacts, Turn]:
    """Submit a turn that keeps the first `keep` tokens of a conversation."""
    facts = harness.facts(harness.prompt(length, 9), name, **params)
    facts = dataclasses.replace(facts, history=facts.history[:keep], replaced=facts.history[keep:])
    return facts, harness.submit(facts, name)


@pytest.mark.parametrize("keep", [0, 1, 15, 16, 17, 40, 44])
@pytest.mark.parametrize("gpu_pages", [40, 7])
def test_a_turn_replaces_the_end_of_the_history(keep: int, gpu_pages: int) -> None:
    """The context is what stays and the prompt; the KV cache of what stays is reused."""
    harness = Harness(small_config(gpu_pages=gpu_pages, cpu_pages=4 if gpu_pages == 7 else 0))
    harness.turn("a", 30, max_tokens=5)
    harness.turn("a", 5, seed=1, max_tokens=5)
    if gpu_pages == 7:
        harness.turn("b", 90, max_tokens=2)  # evicts some of it
    facts, turn = replacing(harness, "a", keep, max_tokens=6)
    (output,) = harness.run(turn)
    harness.bench.check_tokens(facts, output.token_ids, whole=True)
    usage = output.usage
    assert usage.prompt_tokens == 20
    assert usage.reused_gpu_tokens + usage.swapped_in_tokens + usage.recomputed_tokens == keep
    if gpu_pages == 40:
        assert usage.reused_gpu_tokens == keep
    assert harness.history("a") == (*facts.history, *facts.prompt, *output.token_ids)
    assert harness.engine.stats()["num_turns_rewritten"] == (keep < 44)
    assert "a" in str(harness.engine.explain("a"))
    harness.turn("a", 4, seed=3, max_tokens=3)
    harness.check_empty()


def test_replacing_only_the_token_without_kv_cache_is_no_rewriting() -> None:
    harness = Harness()
    harness.turn("a", 30, max_tokens=5)
    _, turn = replacing(harness, "a", 34, max_tokens=2)
    (output,) = harness.run(turn)
    assert output.usage.reused_gpu_tokens == 34 and output.usage.recomputed_tokens == 0
    assert harness.engine.stats()["num_turns_rewritten"] == 0
    assert harness.store.load("a").turns[1].keep == 34


@pytest.mark.parametrize("ending", ["cancel", "fail", "commit"])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("keep", [0, 20, 33])
def test_a_turn_that_does_not_end_leaves_the_history_as_it_was(
    ending: str, num_steps: int, keep: int
) -> None:
    harness = Harness()
    harness.turn("a", 30, max_tokens=5)
    history = harness.history("a")
    _, turn = replacing(harness, "a", keep, 40, max_tokens=4)
    harness.step(num_steps)
    if ending == "cancel":
        harness.engine.cancel(turn)
        harness.engine.check_integrity()
    else:
        failing = harness.store if ending == "commit" else harness.runner
        error = HistoryError("the disk is full") if ending == "commit" else StepFailedError("failed")
        failing.faults["commit" if ending == "commit" else "fetch"] = lambda: error
        harness.drain()
        assert turn.error is error
    conversation = harness.engine.conversations.get("a").conversation
    assert tuple(conversation.token_ids) == history == harness.history("a")
    assert (conversation.num_history_tokens, conversation.num_computed_tokens) == (35, 34)
    assert not conversation.replaced and not conversation.num_replaced_computed
    output = harness.turn("a", 12, seed=4, max_tokens=8)
    if ending != "fail":  # the failed step lost all pages
        assert output.usage.reused_gpu_tokens == keep and output.usage.recomputed_tokens == 34 - keep
    harness.check_empty()


def test_a_fork_of_a_running_conversation_has_what_is_being_replaced() -> None:
    harness = Harness()
    harness.turn("a", 60, max_tokens=5)
    history = harness.history("a")
    facts, turn = replacing(harness, "a", 20, 50, max_tokens=20)
    harness.step(3)
    assert harness.engine.conversations.num_tokens("a") == 65
    harness.engine.fork("a", "b")
    harness.engine.fork("a", "c", 40)
    assert harness.history("b") == history and harness.history("c") == history[:40]
    for name, length in (("b", 65), ("c", 40)):
        live = harness.engine.conversations.get(name).conversation
        assert tuple(live.token_ids) == history[:length]
        assert live.num_history_tokens == length and live.num_computed_tokens == min(length, 64)
        assert harness.turn(name, 10, max_tokens=4).usage.reused_gpu_tokens == CHUNK
    (output,) = harness.run(turn)
    harness.bench.check_tokens(facts, output.token_ids, whole=True)
    harness.check_empty()


def test_a_replacing_turn_shares_a_prefix_up_to_the_cut() -> None:
    harness = Harness()
    prefix = SharedPrefix(harness.prompt(50, 5))
    for name in "ab":
        facts = TurnFacts((), (*prefix.token_ids, *harness.prompt(8)), SamplingParams(seed=0), 0, 2000, 50)
        harness.run(harness.submit(facts, name))
    facts, turn = replacing(harness, "a", 40, max_tokens=6)
    (output,) = harness.run(turn)
    harness.bench.check_tokens(facts, output.token_ids, whole=True)
    assert output.usage.reused_gpu_tokens == 2 * CHUNK and output.usage.recomputed_tokens == 8
    harness.turn("b", 5)
    harness.check_empty()


def test_a_history_with_replaced_tokens_is_loaded_after_a_restart(tmp_path) -> None:
    harness = Harness(path=tmp_path / "history.sqlite")
    harness.turn("a", 30, max_tokens=5)
    _, turn = replacing(harness, "a", 12, max_tokens=4)
    harness.run(turn)
    history = harness.history("a")
    assert [turn.keep for turn in harness.store.load("a").turns] == [None, 12]
    harness.engine.close()
    harness = Harness(path=tmp_path / "history.sqlite")
    assert harness.history("a") == history
    harness.turn("a", 10, max_tokens=5)
    assert harness.history("a")[: len(history)] == history
    harness.engine.close()


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3])
def test_turns_can_be_taken_back_even_if_later_ones_replaced_them(num_turns: int) -> None:
    harness = Harness()
    harness.turn("a", 30, max_tokens=5)
    contexts = [(), harness.history("a")]
    for keep in (12, 20):
        _, turn = replacing(harness, "a", keep, max_tokens=4)
        harness.run(turn)
        contexts.append(harness.history("a"))
    harness.engine.truncate("a", num_turns=num_turns)
    harness.engine.check_integrity()
    assert harness.history("a") == contexts[num_turns]
    conversation = harness.engine.conversations.get("a").conversation
    assert tuple(conversation.token_ids) == contexts[num_turns] and conversation.num_turns == num_turns
    same = {0: 0, 1: 12, 2: 20, 3: len(contexts[3]) - 1}[num_turns]
    assert harness.turn("a", 7, seed=2, max_tokens=3).usage.reused_gpu_tokens == same
    harness.check_empty()


@pytest.mark.parametrize("numbers", [{}, {"num_tokens": 1, "num_turns": 1}])
def test_tokens_or_turns_are_taken_back(numbers: dict[str, int]) -> None:
    harness = Harness()
    harness.turn("a", 30)
    with pytest.raises(InvalidRequestError, match=r"num_tokens.*num_turns"):
        harness.engine.truncate("a", **numbers)


@pytest.mark.parametrize("keep", [-1, 36, 2.0, True, "2"])
def test_only_a_part_of_the_history_can_be_kept(keep: object) -> None:
    harness = Harness()
    harness.turn("a", 30, max_tokens=5)
    history = harness.history("a")
    for name in ("a", None):
        with pytest.raises(InvalidRequestError, match="keep is"):
            harness.engine.submit([TurnSpec([1, 2], SamplingParams(), name, keep=keep)])  # type: ignore[arg-type]
    assert harness.history("a") == history and not harness.engine.has_unfinished
    output = harness.run(
        harness.submit_all([TurnSpec([1, 2], SamplingParams(max_tokens=2), "a", keep=35)])[0]
    )
    assert output[0].usage.reused_gpu_tokens == 34, "all of it is kept"


def test_a_context_is_as_long_as_what_stays_of_it() -> None:
    harness = Harness(small_config(max_context_tokens=100))
    harness.turn("a", 80, max_tokens=5)
    facts, turn = replacing(harness, "a", 40, 50, max_tokens=4)
    (output,) = harness.run(turn)
    harness.bench.check_tokens(facts, output.token_ids, whole=True)


# Turns of trees.


def forest() -> Forest:
    return Forest(Harness(small_config()))


def test_the_latest_turn_of_a_branch_is_extended_from_what_stays() -> None:
    trees = forest()
    first = trees.turn(prompt=40)
    (second,) = trees.send(first, 10, keep=30)
    assert second.turn.origin == TurnOrigin("extended", 30)
    trees.settle(second)
    assert second.turn.output is not None and second.turn.output.usage.reused_gpu_tokens == 30
    assert trees.engine.stats()["num_live_conversations"] == 1
    assert trees.engine.stats()["num_turns_rewritten"] == 1
    record = trees.harness.store.load_turn("ann", second.node.turn_id)
    assert tuple(record.token_ids.tolist()) == trees.tokens[second.node.turn_id]


@pytest.mark.parametrize("is_running", [False, True])
def test_a_turn_after_a_replaced_one_has_all_its_tokens(is_running: bool) -> None:
    """It forks where the branch was cut, whether the turn that cut it still runs or has ended."""
    trees = forest()
    first = trees.turn(prompt=40)
    (second,) = trees.send(first, 50, keep=20, max_tokens=30)
    trees.harness.step(4)
    if not is_running:
        trees.settle(second)
    (other,) = trees.send(first, 10, seed=5)
    assert other.turn.origin == TurnOrigin("forked", 20)
    trees.settle(*([second] if is_running else []), other)
    assert other.turn.output is not None and other.turn.output.usage.reused_gpu_tokens == CHUNK
    trees.turn(second.node.turn_id, 5)
    explained = trees.engine.explain_turn("ann", first)
    assert explained.num_tokens == 48


def test_a_cancelled_replacement_leaves_the_branch_to_its_turns() -> None:
    trees = forest()
    first = trees.turn(prompt=60)
    (second,) = trees.send(first, 50, keep=20)
    trees.harness.step(2)
    trees.engine.cancel(second.turn)
    (third,) = trees.send(first, 5)
    assert third.turn.origin == TurnOrigin("extended", 68)
    trees.settle(third)
    trees.turn(prompt=trees.tokens[first][:64], seed=3)  # finds its chunks again


def test_choices_of_a_replacing_turn_share_its_prompt() -> None:
    trees = forest()
    first = trees.turn(prompt=40)
    choices = trees.send(first, 50, keep=21, number=3)
    assert [choice.turn.origin for choice in choices] == [
        TurnOrigin("extended", 21),
        *[TurnOrigin("forked", 70)] * 2,
    ]
    trees.settle(*choices)
    assert all(choice.turn.output.usage.reused_gpu_tokens == 64 for choice in choices[1:])  # type: ignore[union-attr]
    trees.turn(first, 7)
    trees.harness.forget_branches()
    trees.harness.check_empty()


def test_a_turn_of_the_history_is_replaced_too() -> None:
    trees = forest()
    first = trees.turn(prompt=40)
    second = trees.turn(first, 10, keep=33)
    trees.harness.forget_branches()
    (third,) = trees.send(second, 10, keep=35)
    trees.settle(third)
    (fourth,) = trees.send(first, 10, keep=9)
    trees.settle(fourth)
    ids = [third.node.turn_id, fourth.node.turn_id]
    for turn_id in ids:
        record = trees.harness.store.load_turn("ann", turn_id)
        assert tuple(record.token_ids.tolist()) == trees.tokens[turn_id]
    assert [turn.keep for turn in record.turns] == [None, 9]


def test_a_replacing_turn_names_what_the_path_has() -> None:
    trees = forest()
    first = trees.turn(prompt=40)
    node = TurnNode(turn_id=new_turn_id(first), parent_id=first, owner="ann")
    with pytest.raises(InvalidRequestError, match="keep is 49"):
        trees.engine.submit([TurnSpec([1], SamplingParams(), node=node, keep=49)])
    root = TurnNode(turn_id=new_turn_id(), owner="ann")
    with pytest.raises(InvalidRequestError, match="keep is 1"):
        trees.engine.submit([TurnSpec([1], SamplingParams(), node=root, keep=1)])


def test_turns_of_one_call_replace_different_parts_of_one_path() -> None:
    """The later ones share what the first one has left, and not the prompt that its choices share."""
    trees = forest()
    first = trees.turn(prompt=40)
    sent = []
    for keep, prompt, seed in ((20, 50, 1), (20, 50, 1), (None, 30, 2), (40, 30, 2)):
        facts = trees.facts(first, trees.harness.prompt(prompt, seed), seed, keep=keep)
        sent.append((TurnNode(turn_id=new_turn_id(first), parent_id=first, owner="ann"), facts, keep))
    turns = trees.harness.submit_all(
        [TurnSpec(facts.prompt, facts.params, node=node, keep=keep) for node, facts, keep in sent]
    )
    trees.settle(*(Sent(turn, node, facts) for turn, (node, facts, _) in zip(turns, sent, strict=True)))
    assert [turn.origin for turn in turns] == [
        TurnOrigin("extended", 20),
        TurnOrigin("forked", 69),
        TurnOrigin("forked", 20),
        TurnOrigin("forked", 32),  # the third turn's branch has the tokens of these chunks
    ]
    trees.harness.forget_branches()
    trees.harness.check_empty()


@pytest.mark.parametrize("keep", [0, 9, 16, 20, 33, 47])
@pytest.mark.parametrize("keep_again", [5, 20, 40])
def test_a_deleted_turn_gives_back_what_it_had_replaced(keep: int, keep_again: int) -> None:
    trees = forest()
    first = trees.turn(prompt=40, is_response=True)
    second = trees.turn(first, 30, keep=keep, is_response=True)
    third = trees.turn(second, 20, keep=min(keep_again, len(trees.tokens[second]) - 1), is_response=True)
    trees.delete(third)
    (other,) = trees.send(second, 10, seed=4)
    assert other.turn.origin is not None and other.turn.origin.kind == "extended"
    trees.engine.cancel(other.turn)
    trees.delete(second)
    (again,) = trees.send(first, 10, seed=5)
    assert again.turn.origin == TurnOrigin("extended", 48)
    trees.settle(again)
    (replacing_again,) = trees.send(first, 10, seed=6, keep=30)
    trees.settle(replacing_again)
    trees.turn(again.node.turn_id, 5)
    trees.harness.forget_branches()
    trees.harness.check_empty()
