"""Errors that `check_integrity` finds: old host copies, and states, places and counts that disagree."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve_jax.cache import CachedSequence, Role
from pensieve_jax.cache.chunk_store import ChunkStore
from tests.cache.helpers import CHUNK, Cache, states

TAIL = CHUNK // 2


def suspended_and_back(cache: Cache) -> CachedSequence:
    """Return a running sequence whose tail chunk was copied out and in again."""
    other = cache.running("other", CHUNK)
    sequence = cache.running("a", CHUNK + TAIL)
    cache.manager.suspend(sequence)
    cache.manager.begin_step()
    assert cache.manager.grow(other, 4 * CHUNK)
    cache.complete()
    assert states(sequence) == ["on cpu", "on cpu"]
    cache.manager.truncate(other, 0)
    cache.manager.release(other)
    cache.manager.begin_step()
    assert cache.manager.try_admit(sequence, CHUNK + TAIL + 1, waive_reserve=True)
    cache.complete()
    assert states(sequence) == ["on both", "on both"]
    return sequence


def copying_out(cache: Cache) -> CachedSequence:
    """Return a running sequence whose chunks are being copied out."""
    sequence = cache.idle("a", CHUNK + TAIL)
    cache.end_step()
    cache.queued("a", sequence)
    assert cache.manager.try_admit(sequence, CHUNK + TAIL + 1, waive_reserve=True)
    assert states(sequence) == ["copying out", "copying out"]
    return sequence


PATHS = {
    "fill": lambda cache, sequence: cache.manager.fill(sequence, CHUNK + TAIL, CHUNK + TAIL + 1),
    "fill_next": lambda cache, sequence: cache.manager.fill_next([sequence]),
}


@pytest.mark.parametrize("write", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("prepare", [suspended_and_back, copying_out])
def test_a_written_tail_drops_its_host_copy(prepare, write):
    cache = Cache(4, 8, clean_pages=4)
    sequence = prepare(cache)
    write(cache, sequence)
    assert states(sequence)[1] == "on gpu" and not sequence.chunks[1].slot
    assert sequence.num_kv_tokens == CHUNK + TAIL + 1
    cache.complete()
    assert cache.slots.num_free == 7, "the copy of the first chunk is still true"
    cache.check()


@pytest.mark.parametrize("prepare", [suspended_and_back, copying_out])
def test_a_copy_older_than_its_page_is_found_in_the_same_step(prepare, monkeypatch):
    cache = Cache(4, 8, clean_pages=4)
    sequence = prepare(cache)
    monkeypatch.setattr(ChunkStore, "give_slot", lambda store, sequence, index: None)
    cache.manager.fill_next([sequence])
    with pytest.raises(AssertionError, match=r"a\[1\] has 9 tokens, its slot \d holds 8"):
        cache.manager.check_integrity()


def test_a_copy_of_different_tokens_with_the_same_length_is_found(monkeypatch):
    """A truncated tail that grows again has its old length, and different content."""
    cache = Cache(4, 8)
    sequence = suspended_and_back(cache)
    cache.manager.truncate(sequence, CHUNK + 3)
    cache.check()
    assert states(sequence) == ["on both", "on both"], "what is left of the copy is true"
    monkeypatch.setattr(ChunkStore, "give_slot", lambda store, sequence, index: None)
    cache.manager.fill(sequence, CHUNK + 3, CHUNK + TAIL)
    with pytest.raises(AssertionError, match=r"a\[1\] has 8 tokens, its slot \d holds 3"):
        cache.manager.check_integrity()


def test_a_new_copy_has_the_tokens_that_its_chunk_has_then():
    """Truncations between whole chunks do not change the copies before them."""
    cache = Cache(8, 8)
    sequence = cache.on_both("a", 2 * CHUNK + TAIL)
    assert [chunk.slot_tokens for chunk in sequence.chunks] == [CHUNK, CHUNK, TAIL]
    cache.manager.truncate(sequence, 2 * CHUNK)
    cache.manager.truncate(sequence, 2 * CHUNK)
    assert [chunk.slot_tokens for chunk in sequence.chunks] == [CHUNK, CHUNK]
    cache.manager.truncate(sequence, CHUNK + 1)
    cache.manager.truncate(sequence, CHUNK + 5)
    assert [chunk.slot_tokens for chunk in sequence.chunks] == [CHUNK, 1]
    cache.check()


def test_the_copies_of_a_fork_stay_valid_when_it_is_cut():
    """A cut through a shared chunk does not change it: the fork drops all of it."""
    cache = Cache(8, 8)
    sequence = cache.on_both("a", 2 * CHUNK + TAIL)
    fork = cache.manager.fork(sequence, 2 * CHUNK, "fork")
    cache.manager.truncate(fork, CHUNK + 1)
    assert fork.num_kv_tokens == CHUNK and len(fork.chunks) == 1
    assert [chunk.slot_tokens for chunk in sequence.chunks] == [CHUNK, CHUNK, TAIL]
    cache.check()


class Damaged:
    """A cache with an idle and a running user of one trunk, and a queued sequence that is copied out."""

    def __init__(self) -> None:
        self.cache = Cache(16, 8)
        self.idle = self.cache.idle("idle", 2 * CHUNK + TAIL)
        self.running = self.cache.manager.fork(self.idle, CHUNK, "running")
        self.cache.running("running", 2 * CHUNK, self.running)
        self.queued = self.cache.queued("queued", self.cache.idle("queued", CHUNK))
        self.store: Any = self.cache.manager._store
        self.trunk: Any = self.idle.trunk
        self.store.swap_out(self.queued, 0, self.cache.slots.allocate())
        self.cache.check()


DAMAGES: dict[str, tuple[Any, str]] = {
    "page": (lambda d: setattr(d.idle.chunks[1], "page", 0), r"idle\[1\] on gpu, page 0"),
    "slot": (lambda d: setattr(d.idle.chunks[1], "slot", 3), r"idle\[1\] on gpu, slot 3"),
    "copy": (lambda d: setattr(d.idle.chunks[1], "copy_id", 3), r"idle\[1\] on gpu, copy 3"),
    "fit": (lambda d: setattr(d.queued.chunks[0], "fits_host", False), "has a slot but does not fit it"),
    "shared": (lambda d: d.idle.chunks.__setitem__(0, d.idle.chunks[1]), ""),
    "class": (lambda d: d.idle.num_by_class.__setitem__(0, 9), "idle: .* by class, counted"),
    "all classes": (
        lambda d: d.store.num_by_class[Role.IDLE].__setitem__(0, 9),
        "by eviction class, counted",
    ),
    "tokens": (lambda d: setattr(d.running, "num_kv_tokens", 99), "computed tokens without a chunk"),
    "chunk": (lambda d: setattr(d.idle, "num_kv_tokens", 2 * CHUNK), "a chunk past the computed tokens"),
    "owner": (lambda d: d.idle.chunks.__setitem__(2, d.idle.chunks[1]), "has two owners"),
    "row": (lambda d: setattr(d.idle, "row", 1), "exactly the running conversations have a row"),
    "no row": (lambda d: setattr(d.running, "row", -1), "exactly the running conversations have a row"),
    "table": (lambda d: setattr(d.running.chunks[1], "page", 15), "the row of pages and a chunk disagree"),
    "role": (lambda d: setattr(d.idle, "role", Role.QUEUED), ""),
    "flight": (
        lambda d: d.store.flights.clear(),
        "the chunks with a copy id and the copies in flight differ",
    ),
    "copies in": (lambda d: setattr(d.store, "num_copies_in", 1), ""),
    "copies out": (lambda d: setattr(d.store, "num_copies_out", 2), ""),
    "users": (lambda d: d.trunk.users.pop(d.idle), "trunk-1$"),
    "running users": (lambda d: setattr(d.trunk, "num_running_users", 2), "trunk-1$"),
    "trunk": (lambda d: setattr(d.idle, "trunk", None), ""),
    "partial trunk": (lambda d: setattr(d.trunk, "num_kv_tokens", CHUNK - 1), "has a partial chunk"),
    "free page": (lambda d: d.cache.pool.free(d.idle.chunks[1].page), "both free and owned"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_found(damage, message):
    damaged = Damaged()
    damage(damaged)
    with pytest.raises(AssertionError, match=message or None):
        damaged.cache.manager.check_integrity()
