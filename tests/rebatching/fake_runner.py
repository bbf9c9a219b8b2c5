"""A runner without a model, whose next token depends on every column that a row sees.

Layer l stores for each token a hash of (position, token, sum of layer l-1's entries over all positions up to
it), read through the columns that a step's words make visible. One wrong, stale, missing or doubled column in
any layer therefore changes the next token. Places that were never written hold poison, and tests poison free
ones. `tests.engine.fake_runner.dense_continuation` computes the same from a plain list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pensieve_jax.core.errors import StepFailedError
from pensieve_jax.decoding.sampling_rows import SAMPLING_WORDS, StepResult
from pensieve_jax.rebatching.launches import (
    COUNTS,
    HEADER,
    Decode,
    FreeRow,
    Insert,
    Launch,
    Park,
    Prefill,
    Resize,
    Return,
    Shape,
    Suspend,
    WordsLayout,
)
from pensieve_jax.rebatching.ring_shapes import RingShape
from tests.engine.fake_runner import (
    NUM_LAYERS,
    Choice,
    choose,
    finish_mix,
    logprob_of,
    mix,
    parts_of_mix,
    top_of,
)
from tests.engine.fake_transfers import POISON_64

_WORD = (1 << 64) - 1


@dataclass
class FakeRow:
    """A row with its own storage: u64[NUM_LAYERS, length], and the token that it continues with."""

    entries: np.ndarray
    last_id: int
    where: str = "device"


@dataclass
class Words:
    """Fields of a step, decoded from its words."""

    place: int
    num_new: int
    row: int
    fields: dict[str, np.ndarray] = field(default_factory=dict)
    banned: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))

    def choice(self, row: int) -> Choice:
        one = {name: words[row : row + 1] for name, words in self.fields.items()}
        seed = int(one["seed_low"].view(np.uint32)[0]) | int(one["seed_high"].view(np.uint32)[0]) << 32
        return Choice(
            float(one["temperature"].view(np.float32)[0]),
            int(one["top_k"][0]),
            float(one["top_p"].view(np.float32)[0]),
            seed,
            int(one["sample_position"][0]),
            frozenset(self.banned[:, row].tolist()) - {-1},
            float(one["min_p"].view(np.float32)[0]),
        )


class FakeRunner:
    """Executes a launch when it is started, as program order on a device would.

    Attributes:
        shape, ring: the ring, u64[NUM_LAYERS, batch, length].
        rows: rows beside it.
        fails: the next failure: "launch" or "fetch", or "" for none.
        offender: serial of a query whose prompt cannot be computed; -1 for none.
        offends: where that shows, "launch" or "fetch".
        failures: by serial, failed launches that a query was in since it last got a token of a step.
        num_failed_resizes: failed launches that every query was in.
        leaves: whether copies to host memory are complete when asked for.
    """

    def __init__(self, layout: WordsLayout, num_top: int = 8) -> None:
        self._layout, self._num_top = layout, num_top
        self.fails = ""
        self.offender, self.offends = -1, "launch"
        self.failures: Counter[int] = Counter()
        self.num_failed_resizes = 0
        self.leaves = True
        self.reset(())
        self.rows: dict[int, FakeRow] = {}

    def reset(self, kept_serials: Collection[int]) -> None:
        if kept_serials:
            assert all(self.rows[serial].where == "host" for serial in kept_serials)
        self.rows = {
            serial: row for serial, row in getattr(self, "rows", {}).items() if serial in kept_serials
        }
        self.shape: RingShape | None = None
        self.ring = np.zeros((NUM_LAYERS, 0, 0), np.uint64)
        self.valid = np.zeros((0, 0), bool)
        self.ids = [0] * self._layout.width
        self.fails = ""

    def has_left(self, serial: int) -> bool:
        row = self.rows.get(serial)
        if row is not None and row.where == "leaving" and self.leaves:
            row.where = "host"
        return row is not None and row.where == "host"

    def launch(self, launch: Launch) -> Any:
        if not isinstance(launch, FreeRow):  # which does not run on a device
            self._fail_if(launch, "launch")
        result = getattr(self, f"_{type(launch).__name__.lower()}")(launch)
        return None if result is None else (launch, result)

    def fetch(self, handle: tuple[Prefill | Shape | Decode, StepResult]) -> StepResult:
        launch, result = handle
        self._fail_if(launch, "fetch")
        if not isinstance(launch, Prefill):
            for query, _ in launch.samples:
                self.failures.pop(query.serial, None)
        return result

    def _fail_if(self, launch: Launch, where: str) -> None:
        """Raise if this call is to fail, and record its queries."""
        is_bad = self.offends == where and (
            (isinstance(launch, Prefill) and self.offender in launch.serials)
            or (isinstance(launch, Shape) and self.offender == launch.serial)
        )
        if self.fails != where and not is_bad:
            return
        if isinstance(launch, Resize):
            self.num_failed_resizes += 1
        elif isinstance(launch, Prefill | Shape | Decode):
            self.failures.update(query.serial for query, _ in launch.samples)
        else:
            self.failures[launch.serial] += 1
        raise StepFailedError(f"a {where} failed")

    def poison(self, held: dict[int, np.ndarray]) -> None:
        """Poison every place except those of held rows."""
        if self.shape is None:
            return
        kept = np.zeros(self.shape, bool)
        for row, places in held.items():
            kept[row, places] = True
        self.ring[:, ~kept] = POISON_64

    # Launches.

    def _prefill(self, launch: Prefill) -> StepResult:
        words = self._read(launch.words)
        ids = launch.token_ids.reshape(launch.num_rows, launch.length)
        assert len(launch.serials) <= launch.num_rows
        totals = [0] * self._layout.width
        for row, serial in enumerate(launch.serials):
            assert serial not in self.rows
            num_tokens = int(words.fields["position"][row]) + 1
            entries = np.full((NUM_LAYERS, launch.length), POISON_64)
            # All at once, with the result of `_extend` token by token: each sees those before it, and itself.
            parts = parts_of_mix(np.arange(num_tokens), ids[row, :num_tokens])
            below = np.zeros(num_tokens, np.uint64)
            for layer in entries:
                layer[:num_tokens] = finish_mix(*parts, below)
                below = layer[:num_tokens].cumsum()
            totals[row] = int(below[-1])
            self.rows[serial] = FakeRow(entries, 0)
        result = self._sample(words, totals, range(len(launch.serials)))
        for row, serial in enumerate(launch.serials):
            self.rows[serial].last_id = int(result.token_ids[row])
        return result

    def _insert(self, launch: Insert) -> None:
        assert self.shape is not None
        row = self.rows.pop(launch.serial)
        assert row.where != "host"  # one that is leaving is still there
        length = row.entries.shape[1]
        whole = np.full((NUM_LAYERS, self.shape.length), POISON_64)
        whole[:, :length] = row.entries
        self.ring[:, launch.row] = np.roll(whole, launch.place, axis=1)
        age = (np.arange(self.shape.length) - launch.place) % self.shape.length
        self.valid[launch.row] = age < launch.num_tokens
        assert launch.last_id in (-1, row.last_id)
        self.ids[launch.row] = row.last_id

    def _suspend(self, launch: Suspend) -> None:
        assert launch.serial not in self.rows
        entries = self.ring[:, launch.row, launch.places].copy()
        entries[:, launch.num_tokens :] = POISON_64
        self.rows[launch.serial] = FakeRow(entries, self.ids[launch.row])

    def _park(self, launch: Park) -> None:
        self.rows[launch.serial].where = "host" if launch.waits else "leaving"

    def _return(self, launch: Return) -> None:
        assert self.rows[launch.serial].where == "host"
        self.rows[launch.serial].where = "device"

    def _freerow(self, launch: FreeRow) -> None:
        del self.rows[launch.serial]

    def _resize(self, launch: Resize) -> None:
        old, old_valid, shape = self.ring, self.valid, launch.shape
        self.shape = shape
        self.ring = np.full((NUM_LAYERS, *shape), POISON_64)
        self.valid = np.zeros(shape, bool)
        if launch.relayout is not None:
            rows, columns = launch.relayout
            there = columns >= 0
            self.ring[:, :, there] = old[:, rows][:, :, columns[there]]
            self.valid[:, there] = old_valid[rows][:, columns[there]]
            ids = self.ids
            self.ids = [0] * self._layout.width
            for new, row in enumerate(rows):
                self.ids[new] = ids[row]

    def _decode(self, launch: Decode) -> StepResult:
        return self._step(self._read(launch.words), None)

    def _shape(self, launch: Shape) -> StepResult:
        words = self._read(launch.words)
        assert words.num_new == launch.num_tokens <= len(launch.token_ids)
        return self._step(words, launch.token_ids)

    def _step(self, words: Words, token_ids: np.ndarray | None) -> StepResult:
        assert self.shape is not None
        batch, length = self.shape
        last = words.place + words.num_new - 1
        age = (last - np.arange(length)) % length
        totals = [0] * self._layout.width
        live = [row for row in range(batch) if words.fields["sample_position"][row]]
        for row in range(batch):
            fills = token_ids is not None and row == words.row
            num_new = words.num_new if fills else 1
            new = [(words.place + i) % length for i in range(words.num_new)]
            self.valid[row, new] = False
            num_columns = int(words.fields["num_columns"][row])
            for i in range(num_new):
                if row not in live:
                    continue
                token_id = int(token_ids[i]) if fills and token_ids is not None else self.ids[row]
                seen = self.valid[row] & (age < num_columns)
                position = int(words.fields["position"][row]) + i
                entries = self.ring[:, row]
                totals[row] = _extend(entries, new[i], position, token_id, np.flatnonzero(seen))
                self.valid[row, new[i]] = True
        result = self._sample(words, totals, live)
        self.ids = result.token_ids.tolist()
        return result

    def _sample(self, words: Words, totals: list[int], live: Any) -> StepResult:
        width, num_top = self._layout.width, self._num_top
        result = StepResult(
            np.zeros(width, np.int32),
            np.zeros(width, np.float32),
            np.zeros((width, num_top), np.int32),
            np.zeros((width, num_top), np.float32),
        )
        for row in live:
            result.token_ids[row] = choose(totals[row], words.choice(row))
            result.logprobs[row] = logprob_of(totals[row])
            top = top_of(totals[row], num_top)
            result.top_ids[row], result.top_logprobs[row] = list(top), list(top.values())
        return result

    def _read(self, packed: np.ndarray) -> Words:
        assert packed.shape == (self._layout.size,) and packed.dtype == np.int32
        place, num_new, row, _ = packed[: len(HEADER)].tolist()
        fields = packed[len(HEADER) :].reshape(self._layout.num_fields, self._layout.width)
        names = (*COUNTS, *SAMPLING_WORDS)
        named = dict(zip(names, fields, strict=False))
        return Words(place, num_new, row, named, fields[len(names) :])


def _extend(entries: np.ndarray, place: int, position: int, token_id: int, seen: np.ndarray) -> int:
    """Write a token's entries at `place` after those at the places `seen`; return the last layer's total."""
    before = entries[:, seen]
    assert not (before == POISON_64).any(), "a step reads columns that no step wrote"
    below, own = 0, []
    for total in before.sum(1, dtype=np.uint64).tolist():
        own.append(mix(position, token_id, below))
        below = (total + own[-1]) & _WORD
    entries[:, place] = np.array(own, np.uint64)
    return below
