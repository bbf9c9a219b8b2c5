"""When a step drafts, what its drafts are, and what an index holds."""

from __future__ import annotations

import random
import sys
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from pensieve_jax.core.conversation import PENDING_TOKEN
from pensieve_jax.engine import drafting
from pensieve_jax.engine.drafting import HistoryDrafter
from pensieve_jax.engine.suffix_automaton import SuffixAutomaton
from tests.engine.harness import Harness
from tests.engine.trees import Forest
from tests.seeds import new_seed

PHRASE = list(range(100, 140))


class _Request(SimpleNamespace):
    """What a drafter reads of a request, by identity."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def request(token_ids: list[int], *, is_decoding: bool = True, penalties: object = None) -> Any:
    """Return what a drafter reads of a request."""
    return _Request(token_ids=list(token_ids), is_decoding=is_decoding, penalties=penalties)


class _Requests:
    """The running requests of a drafter."""

    def __init__(self, drafter: HistoryDrafter) -> None:
        self.drafter = drafter
        self.running: list[Any] = []

    def add(self, token_ids: list[int], related: list[list[int]] | None = None, **fields: object) -> Any:
        made = request(token_ids, **fields)
        self.drafter.add(made, lambda: related or [])
        self.running.append(made)
        return made

    def index_all(self) -> int:
        """Return the number of steps until all is indexed."""
        for number in range(1000):
            before = [row.num_indexed for row in self.drafter._rows.values()]
            self.drafter.catch_up(self.running)
            if before == [row.num_indexed for row in self.drafter._rows.values()] and not any(
                row.related for row in self.drafter._rows.values()
            ):
                return number
        raise AssertionError("indexing does not end")

    def give(self, one: Any, token_ids: list[int]) -> None:
        position = len(one.token_ids)
        one.token_ids += token_ids
        self.drafter.accept(one, position, token_ids)


def made(max_num_tokens: int = 8) -> tuple[HistoryDrafter, _Requests]:
    drafter = HistoryDrafter(max_num_tokens)
    return drafter, _Requests(drafter)


def test_a_turn_that_repeats_its_history_makes_steps_wait() -> None:
    drafter, requests = made()
    one = requests.add([*PHRASE, 7])
    requests.index_all()
    assert not drafter.pays(requests.running, 0), "nothing was repeated yet"
    requests.give(one, PHRASE[:3])  # now the match is long enough
    requests.give(one, PHRASE[3:12])  # eight tokens hold, and the next one is sampled behind them
    assert drafter.pays(requests.running, 0)
    assert list(drafter.draft(one, 99)) == PHRASE[12:20] and list(drafter.draft(one, 2)) == PHRASE[12:14]


def test_a_turn_that_repeats_nothing_never_does() -> None:
    drafter, requests = made()
    choose = random.Random(new_seed())
    one = requests.add([choose.randrange(9) for _ in range(60)])
    requests.index_all()
    for _ in range(200):  # short repetitions, whose continuation is another one each time
        requests.give(one, [choose.randrange(9)])
        row = drafter._rows[one]
        assert row.tokens_per_step() < 8 and len(row._steps) <= 32
    assert not drafter.pays(requests.running, 0)


@pytest.mark.parametrize("case", ["a prompt", "a waiting turn", "too many turns", "nothing runs", "others"])
def test_the_load_decides_as_well(case: str) -> None:
    drafter, requests = made()
    one = requests.add([*PHRASE, 7])
    requests.index_all()
    requests.give(one, PHRASE[:39])
    assert drafter.pays([one], 0)
    others = [request([1, 2]) for _ in range(40)]
    match case:
        case "a prompt":
            assert not drafter.pays([one, request([1], is_decoding=False)], 0)
        case "a waiting turn":
            assert not drafter.pays([one], 1)
        case "too many turns":
            assert not drafter.pays([one, *others], 0)
        case "nothing runs":
            assert not drafter.pays([], 0)
        case "others":  # each has one token per step: the mean is below the limit
            assert drafter.pays([one, others[0]], 0) and not drafter.pays([one, *others[:20]], 0)


def test_a_turn_whose_drafts_fail_has_none_beside_many_others() -> None:
    drafter, requests = made()
    one = requests.add([*PHRASE, 7, *PHRASE[:3], 8, *PHRASE[:3], 9])
    requests.index_all()
    for number in range(40):  # three known tokens, then one that never came before
        requests.give(one, [*PHRASE[:3], 1000 + number])
    row = drafter._rows[one]
    assert row.held_share() < 0.05 and row._sum_drafted == sum(drafted for drafted, _ in row._steps)
    requests.give(one, PHRASE[:3])
    drafter.pays([one, *[request([1])] * 31], 0)
    assert not drafter.draft(one, 8)
    drafter.pays([one], 0)
    assert drafter.draft(one, 8)


def test_turns_with_penalties_have_no_drafts() -> None:
    drafter, requests = made()
    one = requests.add([*PHRASE, 7], penalties=object())
    requests.index_all()
    requests.give(one, PHRASE[:20])
    assert not drafter.draft(one, 8) and not drafter.pays([one], 0) and not drafter._rows
    drafter.drop(one)


def test_a_long_history_is_indexed_over_several_steps() -> None:
    drafter, requests = made()
    one = requests.add([*PHRASE, *range(1000, 1000 + 3 * drafting.INDEXED_PER_STEP), PENDING_TOKEN])
    drafter.catch_up(requests.running)
    assert drafter._rows[one].num_indexed == drafting.INDEXED_PER_STEP
    one.token_ids[-1:] = [PHRASE[0]]  # known before the index has caught up
    drafter.accept(one, len(one.token_ids) - 1, [PHRASE[0]])
    assert not drafter.draft(one, 8)
    assert requests.index_all() == 3
    requests.give(one, PHRASE[1:3])
    assert list(drafter.draft(one, 3)) == PHRASE[3:6]


def test_other_branches_are_found_and_not_across_their_ends() -> None:
    drafter, requests = made()
    one = requests.add([1, 2, 3], related=[PHRASE[:8], PHRASE[20:30]])
    requests.index_all()
    requests.give(one, PHRASE[2:6])
    assert list(drafter.draft(one, 8)) == PHRASE[6:8]
    requests.give(one, PHRASE[20:24])
    assert list(drafter.draft(one, 8)) == PHRASE[24:30]


def test_an_index_has_the_most_recent_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "MAX_INDEXED", 100)
    monkeypatch.setattr(drafting, "MAX_RELATED", 10)
    drafter, requests = made()
    one = requests.add([*PHRASE, *range(1000, 1100)])
    requests.index_all()
    requests.give(one, PHRASE[:9])
    assert not drafter.draft(one, 8), "the phrase is too long ago"
    requests.give(one, list(range(2000, 2200)))
    drafter.catch_up(requests.running)
    index = drafter._rows[one].index
    assert index is not None and len(index.token_ids) == 100, "made anew"
    requests.give(one, [2150, 2151, 2152])
    assert list(drafter.draft(one, 2)) == [2153, 2154]


def test_few_turns_have_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "MAX_NUM_ROWS", 2)
    drafter, requests = made()
    ones = [requests.add([*PHRASE, number]) for number in range(3)]
    requests.index_all()
    assert [drafter._rows[one].index is not None for one in ones] == [True, True, False]
    drafter.drop(ones[0])
    requests.running.remove(ones[0])
    requests.index_all()
    assert drafter._rows[ones[2]].index is not None


def test_the_tails_of_other_branches() -> None:
    """A turn sees what its siblings said, and nothing of other trees or owners."""
    harness = Harness()
    trees = Forest(harness)

    def answered(parent: str | None, seed: int, owner: str = "ann") -> tuple[str, list[int]]:
        turn_id = trees.turn(parent, 20, seed=seed, owner=owner, max_tokens=6)
        num_before = 0 if parent is None else len(trees.tokens[parent])
        return turn_id, list(trees.tokens[turn_id][num_before:])

    root, _ = answered(None, 1)
    _, first = answered(root, 2)
    second_id, second = answered(root, 3)
    answered(None, 4)
    answered(None, 5, owner="bob")
    branches = harness.engine.conversations.branches
    (branch,) = branches.at("ann", second_id)
    assert branches.tails_beside(branch, 1000) == [first]
    assert branches.tails_beside(branch, 9) == [first[:9]]
    (other,) = [one for one in branches.at("ann", root) if one is not branch]
    assert branches.tails_beside(other, 1000) == [second]


def test_the_most_recent_branches_are_found_at_the_same_cost_beside_many() -> None:
    """Eight siblings, by their last activity: its beginning and its end both count."""
    harness = Harness()
    trees = Forest(harness)

    def answered(parent: str | None, seed: int) -> str:
        harness.clock.advance(1.0)
        return trees.turn(parent, 3, seed=seed, owner="ann", max_tokens=2)

    root = answered(None, 1)
    tips = [answered(root, 2)]
    counts: list[int] = []
    branches = harness.engine.conversations.branches
    for num in (20, 60):
        while len(tips) < num:
            tips.append(answered(root, 10 + len(tips)))
        tips.append(answered(tips.pop(3), 1000 + num))  # an old branch goes on
        (branch,) = branches.at("ann", tips[0])
        calls = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            tails = branches.tails_beside(branch, 10_000)
        finally:
            sys.setprofile(None)
        counts.append(calls)
        expected = [branches.at("ann", tip)[0] for tip in reversed(tips[-8:])]
        num_root = branches.at("ann", root)[0].path[root].num_shared
        assert tails == [one.conversation.token_ids[num_root:] for one in expected]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("vocab_size", [2, 40, 1000, 150_000])
def test_an_index_takes_no_more_memory_than_is_set_aside(vocab_size: int) -> None:
    choose = random.Random(new_seed())
    ids = [choose.randrange(vocab_size) for _ in range(6000)]
    tracemalloc.start()
    try:
        index = SuffixAutomaton()
        for token_id in ids:
            index.append(token_id)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index.token_ids) == 6000 and num_bytes < drafting.BYTES_PER_ID * 6000


def test_the_memory_of_indexes_follows_the_batch_and_the_context() -> None:
    most = drafting.index_bytes(256, 131_072)
    assert most == drafting.index_bytes(32, 131_072) == pytest.approx(0.84e9, rel=0.01)
    assert drafting.index_bytes(16, 131_072) == most // 2
    assert drafting.index_bytes(32, 2048) == 32 * (2048 + drafting.MAX_RELATED) * drafting.BYTES_PER_ID
