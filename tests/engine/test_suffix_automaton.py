"""The suffix automaton against a search through all earlier places, and what it costs."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve_jax.engine.suffix_automaton import SEPARATORS, SuffixAutomaton
from tests.seeds import enough, new_seed


def longest_match(token_ids: Sequence[int]) -> tuple[int, int]:
    """Return the length of the longest suffix that occurs earlier, and where its first occurrence ends."""
    size = len(token_ids)
    for length in range(size - 1, 0, -1):
        suffix = token_ids[size - length :]
        for end in range(length, size):
            if token_ids[end - length : end] == suffix:
                return length, end
    return 0, 0


def check(token_ids: Sequence[int], max_num: int = 3) -> None:
    """Append ids one at a time and compare every match; an id of -1 stands for a separator."""
    automaton, known = SuffixAutomaton(), []
    for token_id in token_ids:
        if token_id < 0:
            automaton.separate()
            known.append(automaton.token_ids[-1])
        else:
            automaton.append(token_id)
            known.append(token_id)
        assert automaton.token_ids.tolist() == known
        length, begin = longest_match(known)
        following = known[begin : begin + max_num] if length else []
        cut = next((n for n, one in enumerate(following) if one >= SEPARATORS), len(following))
        assert automaton.match_len == length, known
        assert list(automaton.continuation(max_num)) == following[:cut], known


@settings(max_examples=100, deadline=None, print_blob=True)
@given(st.lists(st.integers(-1, 3), max_size=40), st.integers(1, 9))
def test_matches_equal_those_of_a_search(token_ids: list[int], max_num: int) -> None:
    """Few different ids, so that states are split often."""
    check(token_ids, max_num)


def test_matches_of_long_random_texts_equal_those_of_a_search() -> None:
    """Texts that repeat parts of themselves, as an edited file does."""
    choose = random.Random(new_seed())
    for _ in range(enough(8, 2000)):
        size = choose.choice((2, 3, 10, 500_000))
        token_ids: list[int] = []
        while len(token_ids) < 80:
            start = choose.randrange(len(token_ids) + 1)
            token_ids += token_ids[start : start + choose.randrange(30)]
            token_ids += [choose.randrange(size) for _ in range(choose.randrange(4))]
            token_ids += [-1] * (choose.random() < 0.05)
        print(f"check({token_ids})")
        check(token_ids, choose.randint(1, 8))


def test_what_followed_ends_with_the_ids() -> None:
    automaton = SuffixAutomaton()
    assert list(automaton.continuation(8)) == []
    for token_id in (5, 6, 7, 5, 6):
        automaton.append(token_id)
    assert automaton.match_len == 2 and list(automaton.continuation(8)) == [7, 5, 6]
    assert list(automaton.continuation(1)) == [7]


def test_memory_and_states_are_bounded() -> None:
    """Text takes about 100 bytes an id; random ids, which fit no model, take more."""
    choose = random.Random(3)
    token_ids = [choose.randrange(200) for _ in range(5000)]
    tracemalloc.start()
    automaton = SuffixAutomaton()
    for token_id in token_ids:
        automaton.append(token_id)
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(automaton._links) <= 2 * len(token_ids)
    print(f"{num_bytes / len(token_ids):.0f} bytes an id")
    assert num_bytes < 250 * len(token_ids)
