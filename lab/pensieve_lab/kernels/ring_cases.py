"""Ring caches on which step attention is measured: shapes, row windows, values, and the expected answer.

Owns: the cases, the number of measured layers, the contents of a free column, and the error of an answer
against two independent references.
Does not know: which kernels there are, or how they are timed.
Called by `programs.benchmark_ring_decode`.
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

# Live bytes read before the same ones are read again: several times the size of any cache.
_MIN_ROUND_BYTES = 256 << 20
# Shares of the ring by row: a quarter of the rows long, a quarter half as long, the others short, about as in
# Table 1 of Baton. Each row has a few columns less than the one before, so that no end falls on a block's
# end.
_MIXED = (1, 1 / 16, 1 / 2, 1 / 16)
_FEWER = 5


class RingCase(NamedTuple):
    """A ring, and the part of it that its rows use.

    Attributes:
      name: label in tables.
      batch, length: of the ring.
      heads: of one device.
      windows: "full" if all rows use all columns; or "mixed".
    """

    name: str
    batch: int
    length: int
    heads: Heads
    windows: str

    @property
    def num_columns(self) -> np.ndarray:
        """i32[batch], the columns of each row."""
        if self.windows == "full":
            return np.full(self.batch, self.length, np.int32)
        shares = [_MIXED[row % len(_MIXED)] for row in range(self.batch)]
        found = [int(share * self.length) - _FEWER * row for row, share in enumerate(shares)]
        return np.maximum(found, 1).astype(np.int32)

    @property
    def place(self) -> int:
        """Position of the newest column; most windows wrap around the end."""
        return self.length // 3

    def num_bytes(self, num_columns: int, itemsize: int) -> int:
        """Return the bytes of keys and values of `num_columns` columns."""
        return 2 * num_columns * self.heads.num_kv_heads * self.heads.head_dim * itemsize

    def live_bytes(self, itemsize: int) -> int:
        """Return the bytes of keys and values that a row sees, over all rows."""
        return self.num_bytes(int(self.num_columns.sum()), itemsize)

    def ring_bytes(self, itemsize: int) -> int:
        """Return the bytes of all keys and values."""
        return self.num_bytes(self.batch * self.length, itemsize)

    def work(self, itemsize: int, *, whole_ring: bool) -> Operation:
        """Return the bytes and FLOP that a layer needs at least, for its live columns or for all of them."""
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
        """Scale of the attention scores."""
        return 1 / math.sqrt(self.case.heads.head_dim)


def make_inputs(case: RingCase, dtype: str, seed: int, *, is_small: bool) -> RingInputs:
    """Return random values, also in free columns; one layer if `is_small`."""
    heads, key = case.heads, jax.random.key(seed)
    num_layers = 1 if is_small else -(-_MIN_ROUND_BYTES // case.live_bytes(jnp.dtype(dtype).itemsize))
    shape = (case.batch, heads.num_kv_heads, case.length, heads.head_dim)
    drawn = jax.jit(lambda key: jax.random.normal(key, shape, dtype))
    keys = jax.random.split(key, (num_layers, 2))
    layers = [(drawn(one[0]), drawn(one[1])) for one in keys]
    q = jax.random.normal(key, (case.batch, heads.num_q_heads, heads.head_dim), dtype)
    return RingInputs(case, q, jnp.int32(case.place), jnp.asarray(case.num_columns), layers)


def poisoned(inputs: RingInputs) -> RingInputs:
    """Return the first layer, with NaN in all free columns."""
    length = inputs.case.length
    age = (inputs.place - jnp.arange(length)) % length
    free = (age >= inputs.num_columns[:, None])[:, None, :, None]
    fill = jax.jit(lambda pool: jnp.where(free, jnp.nan, pool))
    keys, values = inputs.layers[0]
    return inputs._replace(layers=[(fill(keys), fill(values))])


def expected_answer(inputs: RingInputs) -> jax.Array:
    """Return the first layer's answer by plain XLA; raises MismatchError if numpy's row differs."""
    found = jax.jit(lambda *args: ring_decode_attention(*args, sm_scale=inputs.sm_scale, backend="xla"))(
        inputs.q, *inputs.layers[0], inputs.place, inputs.num_columns
    )
    row = min(1, inputs.case.batch - 1)
    dense = _dense_row(inputs, row)
    if not (error := difference(found[row], dense)) < TOLERANCE[found.dtype.name]:
        raise MismatchError(f"{inputs.case.name}: xla and numpy differ by {error:.1e}")
    return found


def difference(out: jax.Array, expected: jax.Array | np.ndarray) -> float:
    """Return the largest difference, relative for values above 1; NaN if any value is not finite."""
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
