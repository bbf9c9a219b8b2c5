"""Rings to measure attention of steps on: their shapes, their rows' windows, values, and the expected answer.

Owns: the cases, how many layers one is measured over, what a free column holds, and how far an answer is from
two references that share no code. Does not know: which kernels there are, or how they are timed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention.shapes import Heads
from pallas_kernels.ring_decode import ring_decode_attention
from pensieve_lab.kernels.cases import TOLERANCE, MismatchError
from pensieve_lab.steps.bounds import Operation

# Live bytes that are read before the same ones are read again: several times what any cache holds.
_MIN_ROUND_BYTES = 256 << 20
# Of the ring, in the order of rows: a quarter long, a quarter half as long, the others short, about as in
# Table 1 of Baton. Each row has a few columns less than the one before, so that no end is that of a block.
_MIXED = (1, 1 / 16, 1 / 2, 1 / 16)
_FEWER = 5


class RingCase(NamedTuple):
    """A ring, and which part of it its rows have.

    Attributes:
      name: in tables.
      batch, length: of the ring.
      heads: of a device.
      windows: "full": all rows have all columns; "mixed".
    """

    name: str
    batch: int
    length: int
    heads: Heads
    windows: str

    @property
    def num_columns(self) -> np.ndarray:
        """i32[batch]."""
        if self.windows == "full":
            return np.full(self.batch, self.length, np.int32)
        shares = [_MIXED[row % len(_MIXED)] for row in range(self.batch)]
        found = [int(share * self.length) - _FEWER * row for row, share in enumerate(shares)]
        return np.maximum(found, 1).astype(np.int32)

    @property
    def place(self) -> int:
        """Of the newest column: most windows go round the end."""
        return self.length // 3

    def num_bytes(self, num_columns: int, itemsize: int) -> int:
        """Of keys and values of so many columns."""
        return 2 * num_columns * self.heads.num_kv_heads * self.heads.head_dim * itemsize

    def live_bytes(self, itemsize: int) -> int:
        """Of keys and values that a row sees."""
        return self.num_bytes(int(self.num_columns.sum()), itemsize)

    def ring_bytes(self, itemsize: int) -> int:
        """Of all keys and values."""
        return self.num_bytes(self.batch * self.length, itemsize)

    def work(self, itemsize: int, *, whole_ring: bool) -> Operation:
        """What must at least be read, written and multiplied of a layer: its live columns, or all of them."""
        heads = self.heads
        num_columns = self.batch * self.length if whole_ring else int(self.num_columns.sum())
        queries = 2 * self.batch * heads.num_q_heads * heads.head_dim * itemsize
        flop = 4 * num_columns * heads.num_q_heads * heads.head_dim
        return Operation(self.name, self.num_bytes(num_columns, itemsize) + queries, flop)


def _both(batch: int, length: int, heads: Heads, name: str) -> list[RingCase]:
    stem = f"{batch}x{length}_{name}"
    return [RingCase(f"{stem}_{windows}", batch, length, heads, windows) for windows in ("full", "mixed")]


_MHA32, _GQA8 = Heads(32, 32, 128), Heads(32, 8, 128)
CASES: dict[str, RingCase] = {
    case.name: case
    for case in (
        *_both(8, 8192, _MHA32, "mha32"),
        *_both(8, 8192, _GQA8, "gqa8"),
        *_both(8, 1024, _MHA32, "mha32"),
        *_both(16, 2048, _MHA32, "mha32"),
        *_both(4, 256, Heads(4, 2, 32), "tiny"),
    )
}
TINY = tuple(name for name in CASES if "tiny" in name)
LARGE = tuple(name for name in CASES if "tiny" not in name)


class RingInputs(NamedTuple):
    """One case on the device: queries, and as many layers of keys and of values as one round reads."""

    case: RingCase
    q: jax.Array  # [batch, num_q_heads, head_dim]
    place: jax.Array  # i32[]
    num_columns: jax.Array  # i32[batch]
    layers: list[tuple[jax.Array, jax.Array]]  # [batch, num_kv_heads, length, head_dim] each

    @property
    def sm_scale(self) -> float:
        """Factor on the scores."""
        return 1 / math.sqrt(self.case.heads.head_dim)


def make_inputs(case: RingCase, dtype: str, seed: int, *, is_small: bool) -> RingInputs:
    """Random values, also in free columns; one layer where `is_small`."""
    heads, key = case.heads, jax.random.key(seed)
    num_layers = 1 if is_small else -(-_MIN_ROUND_BYTES // case.live_bytes(jnp.dtype(dtype).itemsize))
    shape = (case.batch, heads.num_kv_heads, case.length, heads.head_dim)
    drawn = jax.jit(lambda key: jax.random.normal(key, shape, dtype))
    keys = jax.random.split(key, (num_layers, 2))
    layers = [(drawn(one[0]), drawn(one[1])) for one in keys]
    q = jax.random.normal(key, (case.batch, heads.num_q_heads, heads.head_dim), dtype)
    return RingInputs(case, q, jnp.int32(case.place), jnp.asarray(case.num_columns), layers)


def poisoned(inputs: RingInputs) -> RingInputs:
    """The first layer, with NaN in all free columns."""
    length = inputs.case.length
    age = (inputs.place - jnp.arange(length)) % length
    free = (age >= inputs.num_columns[:, None])[:, None, :, None]
    fill = jax.jit(lambda pool: jnp.where(free, jnp.nan, pool))
    keys, values = inputs.layers[0]
    return inputs._replace(layers=[(fill(keys), fill(values))])


def expected_answer(inputs: RingInputs) -> jax.Array:
    """Of the first layer, by plain XLA; raises MismatchError where numpy differs about a row."""
    found = jax.jit(lambda *args: ring_decode_attention(*args, sm_scale=inputs.sm_scale, backend="xla"))(
        inputs.q, *inputs.layers[0], inputs.place, inputs.num_columns
    )
    row = min(1, inputs.case.batch - 1)
    dense = _dense_row(inputs, row)
    if not (error := difference(found[row], dense)) < TOLERANCE[found.dtype.name]:
        raise MismatchError(f"{inputs.case.name}: xla and numpy differ by {error:.1e}")
    return found


def difference(out: jax.Array, expected: jax.Array | np.ndarray) -> float:
    """The largest, relative where values are above 1; NaN if anything is not a number."""
    a, b = (np.asarray(one, np.float32) for one in (out, expected))
    return float(np.max(np.abs(a - b) / np.maximum(1, np.abs(b))))


def _dense_row(inputs: RingInputs, row: int) -> np.ndarray:
    case = inputs.case
    count = int(case.num_columns[row])
    places = (case.place - np.arange(count)) % case.length
    keys, values = (np.asarray(pool[row], np.float32)[:, places] for pool in inputs.layers[0])
    q = np.asarray(inputs.q[row], np.float32).reshape(case.heads.num_kv_heads, -1, case.heads.head_dim)
    scores = inputs.sm_scale * q @ keys.swapaxes(1, 2)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = weights @ values / weights.sum(axis=-1, keepdims=True)
    return out.reshape(inputs.q.shape[1:])
