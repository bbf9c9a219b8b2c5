"""Where new conversations go, given what a front end already sent; `tests/balance` tests the rule."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from pensieve_jax.balance.ring import HashRing, hash_of
from pensieve_jax.core.outputs import FinishReason, Output, Usage
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.turn_node import TurnNode, turn_id_under
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.server.replicas.placement import RootPlacer, speeds_of
from pensieve_jax.server.replicas.stream import RoutedReply
from tests.server.fakes import LIMITS, FakeEngine

NAMES = ("r0", "r1", "r2")
RING = HashRing(NAMES)
INFO = FakeEngine(lambda turn: None).info


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def names_of(clock: Clock | None = None, ready=NAMES) -> RootPlacer:
    names = RootPlacer(hash_of, clock or Clock())
    names.update({name: name in ready for name in NAMES}, INFO)
    return names


def send(names: RootPlacer, root: str, num_tokens: int) -> RoutedReply:
    node = TurnNode(turn_id=turn_id_under(root))
    reply = RoutedReply(TurnSpec([1] * num_tokens, SamplingParams(max_tokens=8), node=node))
    names.sent(root, [reply])
    return reply


def begin(names: RootPlacer, num_tokens: int = 100) -> tuple[str, RoutedReply]:
    """Return a new conversation's root and the reply of its first turn, which does not end."""
    root = names.new_root(num_tokens)
    return RING.owner(root), send(names, root, num_tokens)


def end(
    names: RootPlacer, reply: RoutedReply, num_history_tokens: int, reason: FinishReason = "stop"
) -> None:
    usage = Usage(
        prompt_tokens=1,
        reused_gpu_tokens=num_history_tokens,
        swapped_in_tokens=0,
        recomputed_tokens=0,
        prefilled_tokens=1,
        output_tokens=1,
    )
    reply.end(Output(None, (1,), "a", reason, usage, 0))
    names.ended([reply])


def test_new_conversations_are_spread_evenly():
    names = names_of()
    assert Counter(begin(names)[0] for _ in range(300)) == dict.fromkeys(NAMES, 100)


def test_named_roots_that_are_not_used_yet_count_and_expire():
    clock = Clock()
    names = names_of(clock)
    given = [names.new_root(100) for _ in range(300)]
    assert Counter(map(RING.owner, given)) == dict.fromkeys(NAMES, 100)
    send(names, given[0], 100)
    clock.now_s += 60
    found = {RING.owner(names.new_root(100)) for _ in range(2)}
    assert found == {*NAMES} - {RING.owner(given[0])}, "that one was used, and still runs"


def num_elsewhere(*, has_begun: bool) -> int:
    """Return how many short conversations go elsewhere before one joins the replica of a long prompt."""
    names = names_of()
    busy, reply = begin(names, 5000)
    if has_begun:
        reply.add("a", [1], None)
    return next(number for number in range(10_000) if begin(names, 10)[0] == busy)


def test_a_replica_with_a_long_prompt_gets_fewer_conversations_until_it_is_computed():
    computing, computed = num_elsewhere(has_begun=False), num_elsewhere(has_begun=True)
    assert 4 * computed < computing and computed > 10, "it is a long context all the same"


def test_long_conversations_weigh_more_once_their_length_is_known():
    names = names_of()
    name, first = begin(names)
    root = first.spec.node.turn_id[:16]
    end(names, first, 40_000)
    again = send(names, root, 1)
    again.add("a", [1], None)
    assert name not in {begin(names, 1)[0] for _ in range(20)}
    end(names, again, 40_000)
    assert begin(names, 1)[0] == name


def test_a_cancelled_turn_leaves_the_length_of_its_conversation_unchanged():
    names = names_of()
    name, first = begin(names)
    root = first.spec.node.turn_id[:16]
    end(names, first, 40_000)
    end(names, send(names, root, 1), 0, "cancelled")  # before the location of its history was known
    send(names, root, 1).add("a", [1], None)
    assert name not in {begin(names, 1)[0] for _ in range(20)}


def test_failed_turns_no_longer_count_for_their_replica():
    names = names_of()
    for _ in range(30):
        _, reply = begin(names, 1000)
        reply.fail(ValueError("refused"))
        names.ended([reply])
    assert Counter(begin(names)[0] for _ in range(30)) == dict.fromkeys(NAMES, 10)


def test_a_replica_that_refuses_turns_gets_no_new_conversation_and_keeps_its_own():
    names = names_of()
    has_it = next(root for root in iter(lambda: names.new_root(1), None) if RING.owner(root) == "r1")
    names = names_of(ready=("r0", "r2"))
    send(names, has_it, 5000)
    assert Counter(begin(names)[0] for _ in range(20)) == {"r0": 10, "r2": 10}
    names.update(dict.fromkeys(NAMES, True), INFO)
    assert "r1" not in {begin(names, 1)[0] for _ in range(20)}, "it has a long prompt to compute"


def test_if_one_of_two_refuses_turns_the_other_gets_all():
    names = RootPlacer(hash_of)
    names.update({"r0": True, "r1": False}, INFO)
    ring = HashRing(("r0", "r1"))
    assert {ring.owner(names.new_root(10)) for _ in range(50)} == {"r0"}


def test_turns_belong_to_the_current_ring_position():
    names = RootPlacer(hash_of)
    names.update({"r0": True, "r1": True}, INFO)
    root = next(root for root in iter(lambda: names.new_root(1), None) if RING.owner(root) == "r2")
    send(names, root, 5000)
    names.update(dict.fromkeys(NAMES, True), INFO)
    assert "r2" not in {begin(names, 1)[0] for _ in range(20)}


def test_a_repeated_turn_recomputes_its_history_until_its_first_token():
    """Its history has 40,000 tokens: short conversations avoid its replica until the load is even."""
    nums = []
    for num_runs in (1, 2):
        names = names_of()
        name, first = begin(names)
        end(names, first, 40_000)
        again = send(names, first.spec.node.turn_id[:16], 1)
        again.begin_again()
        again.add("a", [1], None)
        if num_runs == 2:
            again.begin_again()
        nums.append(next(number for number in range(10_000) if begin(names, 100)[0] == name))
    assert nums[1] > 2 * nums[0] > 0


def test_a_choice_that_has_ended_waits_for_others_at_no_cost():
    names = names_of()
    root = names.new_root(100)
    replies = [send(names, root, 100) for _ in range(30)]
    for reply in replies[1:]:
        reply.fail(ValueError("ended"))
    assert Counter([RING.owner(root), *(begin(names)[0] for _ in range(299))]) == dict.fromkeys(NAMES, 100)


def test_the_load_model_expects_at_most_a_full_context():
    limits = dataclasses.replace(LIMITS, max_context_tokens=512)  # a turn for each token is soon sent
    counts = []
    for num_tokens in (limits.max_context_tokens, 10**9):
        names = names_of()
        names.update(dict.fromkeys(NAMES, True), dataclasses.replace(INFO, limits=limits))
        name = RING.owner(names.new_root(num_tokens))
        counts.append(next(number for number in range(10_000) if begin(names, 1)[0] == name))
    assert counts[0] == counts[1] > 100


@pytest.mark.parametrize("replicas", [{}, {"r0": True}, {"r0": False, "r1": False}])
def test_without_a_choice_any_name_is_used(replicas):
    names = RootPlacer(hash_of)
    assert len(names.new_root(3)) == 16, "nothing was seen yet"
    names.update(replicas, INFO)
    assert len({names.new_root(3) for _ in range(10)}) == 10


def test_a_replicas_limits_come_from_its_model_and_its_answers():
    speeds = speeds_of(INFO, {})
    assert speeds.token_s > speeds.context_token_s > 0 and speeds.step_s > 0
    stats = {"num_turns_finished": 4, "output_tokens": 40}
    assert (speeds.output_tokens, speeds_of(INFO, stats).output_tokens) == (200, 10)


def test_a_replica_without_memory_has_room_for_a_token():
    """Shares are divided by the capacity."""
    cache = INFO.description["cache"] | {"gpu_tokens": 0}
    empty = dataclasses.replace(INFO, description=INFO.description | {"cache": cache})
    assert speeds_of(empty, {}).capacity_tokens == 1
