"""Random scenarios of a tree of sequences in one cache, with a model of the content of every page and slot.

A page holds the tokens that were computed into it, or that a copy brought, so a sequence that reads another
one's tokens is detected. Copies end in any order, arbitrarily late.
"""

from __future__ import annotations

import random
from collections import Counter

from pensieve_jax.cache import CachedSequence, Role
from tests.cache.helpers import CHUNK, Cache

MAX_LEAVES = 10
NUM_OPS = 150


class ForkScenario:
    """One cache, its sequences, and the tokens of each.

    Attributes:
        tokens: of every sequence; those past `history` are of the turn in progress.
        totals: counts of what happened.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        self.cache = Cache(
            pick((6, 12, 20)),
            pick((0, 6, 20, 60)),
            policy=pick(("retention", "lru", "conversation", "trailing", "learned")),
            clean_pages=pick((0, 4, 8)),
            retrieval_priority=pick((True, False)),
            max_num_copies=pick((3, 64)),
        )
        self.tokens: dict[CachedSequence, list[int]] = {}
        self.history: dict[CachedSequence, int] = {}
        self.pages: dict[int, tuple[int, ...]] = {}
        self.slots: dict[int, tuple[int, ...]] = {}
        self.leaving: dict[int, tuple[int, ...]] = {}
        self.num_tokens = self.num_names = 0
        self.totals: Counter[str] = Counter()

    def run(self) -> None:
        ops = (
            *(self.open, self.fork, self.fork, self.fork, *[self.send] * 4, *[self.admit] * 4),
            *(*[self.advance] * 8, self.end, self.end, self.cancel, self.cut),
            *(self.suspend, self.push_out, self.close, self.think, self.pass_by, *[self.land] * 4),
            *((self.choices, self.lose_device) if self.random.random() < 0.5 else (self.choices,)),
        )
        self.open()
        for _ in range(NUM_OPS):
            self.random.choice(ops)()
            self.begin_copies()
            self.cache.check()
            depth = max((sum(1 for _ in leaf.lineage()) for leaf in self.tokens), default=0)
            self.totals[f"depth {min(depth, 4)}"] += 1
        for sequence in list(self.tokens):
            self.leave(sequence)
            self.cache.manager.close(sequence)
            self.cache.check()
        self.cache.complete()
        assert self.cache.pool.num_free == self.cache.pool.num_places, "a page was lost"
        assert self.cache.slots.num_free == self.cache.slots.num_places, "a slot was lost"

    # Operations.

    def open(self) -> None:
        if len(self.tokens) < MAX_LEAVES:
            self._enter(self.cache.manager.open(self._name()), [])

    def fork(self) -> None:
        source = self._one()
        if source is not None and len(self.tokens) < MAX_LEAVES:
            num_tokens = self.random.randint(0, self.history[source])
            made = self.cache.manager.fork(source, num_tokens, self._name())
            self._enter(made, self.tokens[source][:num_tokens])
            self.totals["forks"] += 1

    def choices(self) -> None:
        """Submit two turns with one prompt."""
        source = self._one(Role.IDLE)
        if source is not None and len(self.tokens) < MAX_LEAVES:
            self._append(source, self.random.randint(1, 4 * CHUNK))
            self.cache.manager.prepare_fork(source, len(self.tokens[source]))
            made = self.cache.manager.fork(source, len(self.tokens[source]), self._name())
            self._enter(made, self.tokens[source])
            self.history[made] = self.history[source]
            for sequence in (source, made):
                self.cache.queued("", sequence)

    def send(self) -> None:
        sequence = self._one(Role.IDLE)
        if sequence is not None:
            self._append(sequence, self.random.randint(1, 3 * CHUNK))
            self.cache.manager.touch(sequence)
            self.cache.queued("", sequence)

    def admit(self) -> None:
        """Try to admit a turn, whatever waits longer."""
        sequence = self._one(Role.QUEUED)
        if sequence is not None:
            manager = self.cache.manager
            manager.begin_step()
            manager.try_admit(sequence, len(self.tokens[sequence]), waive_reserve=True)
            manager.end_step()

    def advance(self) -> None:
        """Run a step in which one sequence computes all missing tokens, and may get a new token."""
        sequence = self._one(Role.RUNNING)
        if sequence is None:
            return
        manager, tokens = self.cache.manager, self.tokens[sequence]
        manager.begin_step()
        if sequence.first_arriving is not None:
            manager.end_step()
            for copy_id in manager.expedite(sequence) if self.random.random() < 0.3 else ():
                self._finish(copy_id)
            return
        for index, chunk in enumerate(sequence.chunks):
            start, end = index * CHUNK, min((index + 1) * CHUNK, len(tokens))
            if chunk.readable:
                start = max(start, sequence.num_kv_tokens)
            if start < end:
                manager.fill(sequence, start, end)
                self.pages[chunk.page] = (
                    *self.pages.get(chunk.page, ())[: start % CHUNK],
                    *tokens[start:end],
                )
        self.read(sequence)
        if self.random.random() < 0.7 and manager.grow(sequence, len(tokens) + 1):
            self._append(sequence, 1)
        manager.end_step()

    def read(self, sequence: CachedSequence) -> None:
        """Check that the sequence reads its own tokens."""
        tokens = self.tokens[sequence]
        assert sequence.num_kv_tokens == len(tokens)
        for index in range(-(-len(tokens) // CHUNK)):
            expected = tuple(tokens[index * CHUNK : (index + 1) * CHUNK])
            assert self.pages[sequence.chunks[index].page][: len(expected)] == expected, (
                sequence.sequence_id,
                index,
            )
        self.totals["read"] += 1

    def end(self) -> None:
        """End a running turn with its reply."""
        sequence = self._one(Role.RUNNING)
        if sequence is not None and sequence.num_kv_tokens >= self.history[sequence]:
            del self.tokens[sequence][sequence.num_kv_tokens :]
            self.history[sequence] = len(self.tokens[sequence])
            self.cache.manager.truncate(sequence, max(self.history[sequence] - self.random.randint(0, 1), 0))
            self.cache.manager.release(sequence)

    def cancel(self) -> None:
        sequence = self._one(Role.RUNNING) or self._one(Role.QUEUED)
        if sequence is not None:
            self.leave(sequence)

    def leave(self, sequence: CachedSequence) -> None:
        """Restore the sequence as if its turn, if any, had never been sent."""
        if sequence.role is not Role.IDLE:
            del self.tokens[sequence][self.history[sequence] :]
            self.cache.manager.truncate(sequence, self.history[sequence])
            self.cache.manager.release(sequence)

    def cut(self) -> None:
        sequence = self._one(Role.IDLE)
        if sequence is not None:
            num_tokens = self.random.randint(0, self.history[sequence])
            del self.tokens[sequence][num_tokens:]
            self.history[sequence] = num_tokens
            self.cache.manager.truncate(sequence, num_tokens)
            self.totals["cuts"] += 1

    def suspend(self) -> None:
        sequence = self._one(Role.RUNNING)
        if sequence is not None:
            self.cache.manager.suspend(sequence)

    def push_out(self) -> None:
        sequence = self._one(Role.IDLE)
        if sequence is not None:
            self.cache.manager.push_out(sequence, self.random.choice((None, 1, 3)))

    def close(self) -> None:
        sequence = self._one(Role.IDLE)
        if sequence is not None:
            self.cache.manager.close(sequence)
            del self.tokens[sequence], self.history[sequence]

    def think(self) -> None:
        self.cache.clock.advance(self.random.random() * 20)

    def pass_by(self) -> None:
        self.cache.manager.begin_step()
        self.cache.manager.end_step()

    def land(self) -> None:
        """Complete some of the copies in flight."""
        for copy_id in (*self.cache.copies_out, *self.cache.copies_in):
            if self.random.random() < 0.5:
                self._finish(copy_id)

    def lose_device(self) -> None:
        """Fail a step: every running turn is lost, and everything in flight."""
        self.cache.manager.take_copies()
        self.cache.manager.lose_device()
        self.cache.copies_out, self.cache.copies_in, self.leaving = {}, {}, {}
        for sequence in list(self.tokens):
            if sequence.role is Role.RUNNING:
                self.leave(sequence)
        self.pages.clear()
        self.totals["lost devices"] += 1

    # Copies.

    def begin_copies(self) -> None:
        """Read the pages of copies out in program order, so that later writes do not matter."""
        outs, _ = self.cache.begin()
        self.leaving.update((copy.copy_id, self.pages[copy.page]) for copy in outs)

    def _finish(self, copy_id: int) -> None:
        """Perform a copy; an expedited one has already counted as done."""
        self.begin_copies()
        if copy_id in self.leaving:
            self.slots[self.cache.copies_out.pop(copy_id).slot] = self.leaving.pop(copy_id)
        else:
            copy = self.cache.copies_in.pop(copy_id)
            self.pages[copy.page] = self.slots[copy.slot]
        store = self.cache.manager._store
        if copy_id in store.flights or copy_id in store.detached_copies:
            self.cache.manager.complete([copy_id])

    # Internals.

    def _one(self, role: Role | None = None) -> CachedSequence | None:
        found = [sequence for sequence in self.tokens if role in (None, sequence.role)]
        return self.random.choice(found) if found else None

    def _name(self) -> str:
        self.num_names += 1
        return f"s{self.num_names}"

    def _enter(self, sequence: CachedSequence, tokens: list[int]) -> None:
        self.tokens[sequence] = list(tokens)
        self.history[sequence] = len(tokens)

    def _append(self, sequence: CachedSequence, count: int) -> None:
        self.tokens[sequence] += range(self.num_tokens, self.num_tokens + count)
        self.num_tokens += count


def run_fork_scenario(seed: int) -> Counter[str]:
    """Run one scenario from start to end; raise AssertionError on a failure."""
    scenario = ForkScenario(seed)
    try:
        scenario.run()
    except BaseException:
        print(f"failed: run_fork_scenario({seed})")
        raise
    return scenario.totals
