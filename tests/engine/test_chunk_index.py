"""The search for a context's beginning: the longest run of full chunks of one owner, compared by token."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from pensieve_jax.engine import chunk_index
from pensieve_jax.engine.chunk_index import ChunkIndex

SIZE = 4


@dataclass(eq=False)
class Known:
    """A conversation that is indexed."""

    known_tokens: list[int]
    owner: str = "ann"
    hashes: list[int] = field(default_factory=list)


def index_of(*conversations):
    index = ChunkIndex(SIZE)
    for conversation in conversations:
        index.enter(conversation)
    return index


def test_the_longest_match_of_full_chunks_is_found():
    short, long = Known(list(range(6))), Known([*range(11), 99])
    index = index_of(short, long)
    assert len(index) == 3, "the first chunk of both is one entry"
    assert index.longest("ann", list(range(20))) == (long, 8)
    assert index.longest("ann", list(range(3))) is None
    assert index.longest("ann", [*range(4), 77, *range(5, 12)])[1] == 4
    assert index.longest("ann", [77, *range(1, 12)]) is None


def test_a_conversation_that_grew_is_found_by_its_new_chunks():
    one = Known(list(range(5)))
    index = index_of(one)
    one.known_tokens = list(range(13))
    index.enter(one)
    assert index.longest("ann", list(range(14))) == (one, 12) and len(one.hashes) == 3


def test_owners_do_not_find_each_other():
    mine, theirs = Known(list(range(9))), Known(list(range(20)), "bob")
    index = index_of(mine, theirs)
    assert index.longest("ann", list(range(20))) == (mine, 8)
    assert index.longest("bob", list(range(20))) == (theirs, 20)
    assert index.longest("carol", list(range(20))) is None


def test_a_fork_is_found_by_its_shared_chunks():
    one, fork = Known(list(range(13))), Known(list(range(8)))
    index = index_of(one)
    index.share(fork, one, 2)
    index.leave(one)
    assert index.longest("ann", list(range(13))) == (fork, 8)
    index.leave(fork)
    assert len(index) == 0 and fork.hashes == []


def test_two_chunks_with_equal_hashes_and_different_tokens_do_not_match(monkeypatch):
    monkeypatch.setattr(chunk_index, "_chained", lambda before, chunk: before + 1)
    index = index_of(Known(list(range(8))))
    assert index.longest("ann", [9] * 8) is None
    assert index.longest("ann", [*range(4), 9, 9, 9, 9]) is None, "the rest of a match is not trusted either"


@pytest.mark.parametrize("seed", range(20))
def test_the_index_agrees_with_a_linear_search(seed):
    choose = random.Random(seed)
    index, known = ChunkIndex(SIZE), []

    def context():
        beginning = choose.choice(known).known_tokens if known and choose.random() < 0.8 else []
        cut = choose.randint(0, len(beginning))
        return [*beginning[:cut], *(choose.randint(0, 2) for _ in range(choose.randint(0, 10)))]

    for _ in range(200):
        if known and choose.random() < 0.3:
            index.leave(known.pop(choose.randrange(len(known))))
        else:
            known.append(Known(context(), choose.choice("ab")))
            index.enter(known[-1])
        asked, owner = context(), choose.choice("ab")
        common = [_common(one.known_tokens, asked) for one in known if one.owner == owner]
        found = index.longest(owner, asked)
        assert (0 if found is None else found[1]) == max(common, default=0)
    for one in known:
        index.leave(one)
    assert len(index) == 0


def _common(tokens, others):
    """Return the number of tokens in the full chunks that two begin with."""
    count = 0
    while count + SIZE <= min(len(tokens), len(others)) and tokens[: count + SIZE] == others[: count + SIZE]:
        count += SIZE
    return count
