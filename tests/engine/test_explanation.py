"""`Engine.explain`: where chunks are and why others were dropped; and the journal of drops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pensieve_jax.cache import ChunkDrop, DropReason
from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.core.errors import (
    InvalidRequestError,
    PensieveError,
    StepFailedError,
    UnknownConversationError,
)
from pensieve_jax.engine import explanation as explanation_module
from pensieve_jax.engine.explanation import DropJournal, DropRecord
from pensieve_jax.engine.loop import unobserved
from tests.engine.harness import Harness, small_config

CHUNK = 16


def crowded(**config: object) -> Harness:
    """Return a conversation of five chunks that lost leading ones to two others, half a minute apart."""
    harness = Harness(small_config(gpu_pages=12, reserve_fraction=0.0, swap_out_fraction=0.0, **config))
    harness.turn("a", 70, max_tokens=4)
    for number, name in enumerate("bc"):
        harness.clock.advance(30.0)
        harness.turn(name, 60, seed=number, max_tokens=4)
    return harness


def test_explain_gives_the_tier_of_every_chunk():
    harness = Harness(small_config(cpu_pages=20))
    harness.turn("a", 70, max_tokens=4)
    harness.clock.advance(12.0)
    explanation = harness.engine.explain("a")
    assert (explanation.num_tokens, explanation.policy, explanation.idle_s) == (74, "retention", 12.0)
    assert [(chunk.start, chunk.end) for chunk in explanation.chunks] == [
        *((start, start + CHUNK) for start in range(0, 64, CHUNK)),
        (64, 73),
    ]
    assert {chunk.tier for chunk in explanation.chunks} == {"gpu"}
    worths = [chunk.worth for chunk in explanation.chunks]
    assert worths == sorted(worths) and worths[0] > 0
    assert "reuse 73 tokens in device memory, copy 0 in, and recompute 0" in str(explanation)
    assert explanation.lines[1].startswith("  tokens 0-72 (chunks 0-4): in device memory; ")
    harness.engine.push_out("a")
    harness.step(3)
    harness.finish_copies()
    explanation = harness.engine.explain("a")
    assert {(chunk.tier, chunk.place) for chunk in explanation.chunks} == {("cpu", "in host memory")}
    assert "copy 73 in" in explanation.lines[-1]


@pytest.mark.parametrize("num_tokens", [1, 2 * CHUNK, 2 * CHUNK + 5, 74])
@pytest.mark.parametrize("change", ["truncate", "fork"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_explain_predicts_what_the_next_turn_reuses_even_after_a_cut(
    change: str, num_tokens: int, is_lost: bool
):
    """The last token left by a cut was computed, that of a reply was not."""
    harness = Harness(small_config())
    harness.turn("a", 70, max_tokens=4)
    if change == "truncate":
        harness.engine.truncate("a", num_tokens)
    else:
        harness.engine.fork("a", "b", num_tokens)
    name = "a" if change == "truncate" else "b"
    if is_lost:
        harness.engine.forget_state(name)
    outlook = harness.engine.explain(name).lines[-1]
    usage = harness.turn(name, 5, seed=1, max_tokens=2).usage
    found, again = usage.reused_gpu_tokens, usage.recomputed_tokens
    assert f"reuse {found} tokens in device memory, copy 0 in, and recompute {again} of" in outlook
    assert found + again == (73 if num_tokens == 74 else num_tokens)


def test_explain_gives_reason_time_and_value_of_drops():
    harness = crowded()
    now_s = harness.clock.now()
    harness.clock.advance(5.0)
    explanation = harness.engine.explain("a")
    dropped = [chunk for chunk in explanation.chunks if chunk.tier is None]
    kept = [chunk for chunk in explanation.chunks if chunk.tier is not None]
    assert dropped and kept and dropped[-1].end == kept[0].start, "leading chunks went first"
    for chunk in dropped:
        assert chunk.drop is not None and chunk.worth is None
        assert (chunk.drop.at_s, chunk.drop.reason) == (now_s, DropReason.NO_HOST_MEMORY)
        assert 0 < chunk.drop.worth < kept[0].worth * 100
    text = str(explanation)
    assert "dropped 5.0 s ago: its page was needed, and there is no host memory to copy it to" in text
    assert "s of recomputation per second idle" in text
    assert f"recompute {dropped[-1].end} of its history" in explanation.lines[-1]


def test_under_lru_the_value_is_the_idle_time():
    explanation = crowded(policy="lru").engine.explain("a")
    assert "no host memory to copy it to; idle for 60.0 s" in str(explanation)


def test_recomputed_chunks_and_chunks_that_the_owner_changed_are_not_explained_by_old_drops():
    harness = crowded()
    harness.turn("a", 3, max_tokens=2)
    assert all(chunk.tier == "gpu" and chunk.drop is None for chunk in harness.engine.explain("a").chunks)
    harness.engine.forget_state("a")
    explanation = harness.engine.explain("a")
    assert all(chunk.tier is None and chunk.drop is None for chunk in explanation.chunks)
    assert "for no recorded reason" in str(explanation)


def test_explain_of_a_conversation_without_anything_in_memory(tmp_path):
    path = tmp_path / "history.sqlite"
    harness = Harness(path=path)
    harness.turn("a", 40, max_tokens=4)
    harness.engine.close()
    explanation = Harness(path=path).engine.explain("a")
    assert explanation.idle_s is None and "not in memory" in explanation.lines[0]
    assert "recompute 43 of its history" in explanation.lines[-1]


def test_a_turn_in_progress():
    harness = Harness()
    turn = harness.submit(harness.facts(harness.prompt(30), "a", max_tokens=20), "a")
    harness.step(3)
    explanation = harness.engine.explain("a")
    assert explanation.idle_s is None and "a turn of it is in progress" in explanation.lines[0]
    assert all(chunk.tier == "gpu" and chunk.worth is None for chunk in explanation.chunks)
    harness.run(turn)


def test_a_shared_prefix_is_named():
    harness = Harness(small_config(gpu_pages=20))
    facts = replace(harness.facts(harness.prompt(50), None, max_tokens=4), num_prefix_tokens=40)
    harness.run(harness.submit(facts, "a"))
    explanation = harness.engine.explain("a")
    assert [chunk.is_shared for chunk in explanation.chunks][:3] == [True, True, False]
    assert "shared with others" in str(explanation)


def test_a_drop_of_forked_chunks_is_shown_to_all_conversations_that_share_them():
    """This holds before the fork, while the chunks are shared, and when they have one owner again."""
    harness = Harness()
    harness.turn("a", 90, max_tokens=4)
    harness.drop("a", 0)
    harness.engine.fork("a", "b", 70)
    for name in "ab":
        chunks = harness.engine.explain(name).chunks
        assert chunks[0].drop is not None and chunks[0].drop.reason is DropReason.NO_HOST_MEMORY
        assert [chunk.is_shared for chunk in chunks] == [True] * 4 + [False] * (len(chunks) - 4)
    store, trunk = harness.engine.cache._store, harness.engine.conversations.get("a").sequence.trunk
    store.drop(trunk, 1, DropReason.SLOT_NEEDED, 0.5)
    assert harness.engine.explain("b").chunks[1].drop.reason is DropReason.SLOT_NEEDED
    harness.engine.end("b")
    chunks = harness.engine.explain("a").chunks
    assert [chunk.drop and chunk.drop.reason for chunk in chunks[:3]] == [
        DropReason.NO_HOST_MEMORY,
        DropReason.SLOT_NEEDED,
        None,
    ]
    assert not any(chunk.is_shared for chunk in chunks)


def test_a_failed_step_and_an_interrupt_are_given_as_reasons():
    harness = Harness()
    harness.turn("a", 40, max_tokens=4)
    turn = harness.submit(harness.facts(harness.prompt(5), "b", max_tokens=9), "b")
    harness.step(2)
    harness.runner.faults["fetch"] = lambda: StepFailedError("the device failed")
    harness.step()
    assert turn.error is not None, "no step has been scheduled since"
    assert {c.drop.reason for c in harness.engine.explain("a").chunks} == {DropReason.DEVICE_LOST}
    harness.turn("a", 4, max_tokens=2)
    turn = harness.submit(harness.facts(harness.prompt(5), "c", max_tokens=9), "c")
    harness.runner.faults["launch"] = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        harness.step()
    explanation = harness.engine.explain("a")
    assert {c.drop.reason for c in explanation.chunks} == {DropReason.INTERRUPTED} and turn.error is not None
    harness.turn("a", 4, max_tokens=2)
    assert "interrupted" not in str(harness.engine.explain("a"))


def test_a_stateless_engine_is_given_as_the_reason():
    """Chunks that were dropped and recomputed within one turn are not a reason."""
    harness = Harness(small_config(gpu_pages=3, reserve_fraction=0.0, stateful=False))
    early = harness.facts(harness.prompt(14, seed=1), "early", max_tokens=20)
    late = harness.facts(harness.prompt(10, seed=2), "late", max_tokens=12)
    harness.run(harness.submit(early, "early"), harness.submit(late, "late"))
    assert any(output.drops for output in harness.scheduled)
    for name in ("early", "late"):
        explanation = harness.engine.explain(name)
        assert "keeps no KV cache between turns" in str(explanation) and len(explanation.lines) == 3
        assert all(chunk.tier is None and chunk.drop is None for chunk in explanation.chunks)


def test_explain_refuses_unknown_conversations():
    harness = Harness()
    with pytest.raises(UnknownConversationError):
        harness.engine.explain("nobody")
    with pytest.raises(InvalidRequestError):
        harness.engine.explain("")


def test_a_waiting_turn_shows_what_its_conversation_has_lost():
    harness = Harness(small_config(gpu_pages=6, reserve_fraction=0.0))
    harness.turn("a", 60, max_tokens=4)
    runs = harness.submit(harness.facts(harness.prompt(80), "b", max_tokens=10), "b")
    harness.step()
    waits = harness.submit(harness.facts(harness.prompt(3), "a", max_tokens=3), "a")
    harness.step()
    explanation = harness.engine.explain("a")
    assert explanation.idle_s is None and explanation.chunks[-1].end == 63
    assert any(chunk.drop is not None for chunk in explanation.chunks)
    harness.run(runs, waits)


def test_explain_finds_a_prefix_for_a_conversation_that_left_memory():
    """The conversation's next turn would find it too."""
    harness = Harness(small_config(gpu_pages=20))
    facts = replace(harness.facts(harness.prompt(50), None, max_tokens=4), num_prefix_tokens=40)
    harness.run(harness.submit(facts, "a"))
    live = harness.engine.conversations.get("a")
    harness.engine.conversations.forget(live)
    explanation = harness.engine.explain("a")
    assert "not in memory" in explanation.lines[0]
    assert "reuse 32 tokens in device memory" in explanation.lines[-1]
    output = harness.turn("a", 3, max_tokens=2)
    assert output.usage.reused_gpu_tokens == 32


def test_pushed_out_chunks_are_explained_before_the_next_step():
    harness = Harness(small_config(gpu_pages=12, cpu_pages=2))
    harness.turn("a", 70, max_tokens=4)
    harness.engine.push_out("a")
    explanation = harness.engine.explain("a")
    assert {c.drop.reason for c in explanation.chunks if c.drop} <= {
        DropReason.NO_SLOT,
        DropReason.SLOT_NEEDED,
    }
    assert any(chunk.drop is not None for chunk in explanation.chunks)


def test_one_off_requests_leave_nothing_in_the_journal():
    harness = Harness(small_config(gpu_pages=3, reserve_fraction=0.0))
    turns = [
        harness.submit(harness.facts(harness.prompt(14, seed=n), None, seed=n, max_tokens=20))
        for n in range(4)
    ]
    harness.run(*turns)
    assert any(output.drops for output in harness.scheduled)
    assert not harness.engine._drops._drops and not harness.engine._drops._num_records


def test_the_journal_is_bounded(monkeypatch):
    monkeypatch.setattr(explanation_module, "_MAX_NUM_RECORDS", 5)
    journal = DropJournal(VirtualClock())
    for name in "abcd":
        for index in (0, 1, 1):
            journal.note(ChunkDrop(name, index, DropReason.SLOT_NEEDED, 1.0))
    assert [len(journal.of(name)) for name in "abcd"] == [0, 0, 2, 2]
    journal.forget("c")
    assert journal._num_records == 2


@pytest.mark.parametrize(
    "error", [StepFailedError("mine"), ValueError("mine"), InvalidRequestError("a", 1, "2")]
)
def test_a_failing_observer_affects_no_conversation(error):
    harness = Harness()
    harness.turn("a", 20, max_tokens=4)

    def fail(output):
        harness.on_step = unobserved
        raise error

    harness.on_step = fail
    turn = harness.submit(harness.facts(harness.prompt(5), "a", max_tokens=9), "a")
    with pytest.raises((RuntimeError, ValueError)):
        harness.step()
    harness.turn("a", 6, max_tokens=4)
    assert turn.error is not None
    harness.check_empty()


def test_an_observer_must_not_call_the_engine():
    harness = Harness()
    harness.turn("a", 20, max_tokens=4)
    refused = []

    def call(output):
        with pytest.raises(PensieveError, match="an observer must not call it"):
            harness.engine.explain("a")
        refused.append(True)

    harness.on_step = call
    harness.turn("a", 5, max_tokens=4)
    assert refused


REASON, OTHER = DropReason.NO_HOST_MEMORY, DropReason.SLOT_NEEDED


def noted(*drops):
    """Return a journal of drops (sequence, chunk), one second apart."""
    clock = VirtualClock(10.0)
    journal = DropJournal(clock)
    for name, index in drops:
        journal.note(ChunkDrop(name, index, REASON, 2.0))
        clock.advance(1.0)
    return journal


def indices(journal, *names):
    return [sorted(journal.of(name)) for name in names]


def test_the_latest_drop_of_a_chunk_is_reported():
    journal = noted(("a", 3), ("a", 4))
    journal.note(ChunkDrop("a", 3, OTHER, None))
    assert journal.of("a") == {3: DropRecord(12.0, OTHER, None), 4: DropRecord(11.0, REASON, 2.0)}
    assert journal.of("b") == {} and journal._num_records == 2


@pytest.mark.parametrize(
    ("bound", "left"), [(5, [[0, 1], [0], [0, 1]]), (4, [[], [0], [0, 1]]), (2, [[], [], [0, 1]])]
)
def test_the_conversations_with_the_oldest_drops_are_forgotten_first(monkeypatch, bound, left):
    monkeypatch.setattr(explanation_module, "_MAX_NUM_RECORDS", bound)
    journal = noted(("a", 0), ("a", 1), ("b", 0), ("c", 0), ("c", 1))
    assert indices(journal, "a", "b", "c") == left
    assert journal._num_records == sum(map(len, left))


def test_a_new_drop_keeps_a_conversations_records_and_those_of_the_newest_stay_whole(monkeypatch):
    monkeypatch.setattr(explanation_module, "_MAX_NUM_RECORDS", 2)
    assert indices(noted(("a", 0), ("b", 0), ("a", 0), ("c", 0)), "a", "b", "c") == [[0], [], [0]]
    assert indices(noted(*[("a", index) for index in range(4)]), "a") == [[0, 1, 2, 3]]


def test_forgetting_makes_room():
    journal = noted(("a", 0), ("a", 1), ("b", 0))
    journal.forget("a")
    journal.forget("a")
    assert indices(journal, "a", "b") == [[], [0]] and journal._num_records == 1


def test_chunks_that_change_owner_take_their_records_along():
    journal = noted(("a", 0), ("a", 1), ("a", 2), ("trunk", 1))
    journal.move("a", "trunk", range(2))
    assert indices(journal, "a", "trunk") == [[2], [0, 1]]
    assert journal.of("trunk")[1].at_s == 11.0, "what was moved is told of a chunk that both had"
    assert journal._num_records == 3
    journal.move("a", "other", range(2))
    assert "other" not in journal._drops
    journal.move("a", None, range(2))
    assert indices(journal, "a") == [[]] and journal._num_records == 2


def test_a_reset_of_the_pools_records_the_loss_of_all_chunks():
    journal = noted(("a", 0))
    journal.lose([("a", 1), ("b", 5)], OTHER)
    assert journal.of("a")[1] == journal.of("b")[5] == DropRecord(11.0, OTHER, None)
