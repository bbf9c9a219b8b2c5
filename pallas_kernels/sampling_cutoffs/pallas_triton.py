"""Cutoffs through Pallas' Triton back end, for NVIDIA GPUs from Ampere on.

Owns: the kernel and its launch. Does not know: what keys and masses stand for. Called by: `api`.
Upstream has deprecated this back end, so nothing outside this file imports from it.

One program finds both cutoffs of one row. It keeps a range of keys that contains the cutoff. Each pass sums
what several candidates in this range would keep, and narrows the range. From the second pass on, ids that no
longer matter are dropped: the others move to the front of the row in place, so the next pass reads fewer.
When few ids are left, each is a candidate, and one comparison of all pairs ends the search, since a cutoff
is always the key of some id. The choice of candidates changes only the speed of the search, not its result.

A vector has one element for each thread, and a program reads `UNROLL` vectors at once. So each thread keeps
its own sums, ranks and moves. Threads synchronize once a pass for the sums, and once a read for the moves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.sampling_cutoffs.rule import halves, total_mass, wanted_mass

NUM_WARPS = 16  # a power of two
UNROLL = 4  # vectors read at once; at most 15
WAYS = 8  # candidates of a pass; a power of two, 4 at least
FEW = 128  # ids that are compared pair by pair; a power of two
# The first pass tries the scores this far below the best one, half as far, and so on. Most cutoffs of
# language models are in this range, and keys take equal steps there.
FIRST_DISTANCE = 16.0

_WORD = np.uint32
_FIRST_KEY = _WORD(~np.float32(-FIRST_DISTANCE).view(_WORD))
_LAST_KEY = _WORD(2**32 - 1)
_HALVING = _WORD(1 << 23)  # step from a key to the key of half the distance
# A mass is packed as high half << 16 | low half. 15 of these, with halves up to 2**12, add without a carry.
_PACKED_BITS = 16
_MAX_PACKED = 15


def triton_cutoffs(
    keys: jax.Array, masses: jax.Array, top_k: jax.Array, top_p: jax.Array, *, interpret: bool
) -> jax.Array:
    """See `api.cutoffs`; arguments are already checked."""
    assert UNROLL <= _MAX_PACKED
    high, low = halves(masses)
    packed = (high << _WORD(_PACKED_BITS)) | low
    manual = jax.typeof(keys).manual_axis_type
    row = jax.ShapeDtypeStruct(keys.shape[:1], jnp.uint32, manual_axis_type=manual)
    matrix = jax.ShapeDtypeStruct(keys.shape, jnp.uint32, manual_axis_type=manual)
    cutoff, _, _ = pl.pallas_call(
        functools.partial(_cutoff_kernel, interpret=interpret),
        out_shape=[row, matrix, matrix],
        grid=keys.shape[:1],
        input_output_aliases={2: 1, 3: 2},
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="sampling_cutoffs",
    )(top_k, top_p, keys, packed)
    return cutoff


class _Ids(NamedTuple):
    """Ids of one row. Those that still matter are at its front; their number is passed separately."""

    keys_ref: Any
    packed_ref: Any
    row: Any
    interpret: bool

    def load_key(self, place: Any) -> Any:
        """Return one key, for all threads."""
        return plgpu.load(self.keys_ref.at[self.row, place])

    def load_keys(self, place: Any, mask: Any) -> Any:
        """Return keys, with zeros where `mask` is false."""
        return plgpu.load(self.keys_ref.at[self.row, place], mask=mask, other=_WORD(0))

    def load_packed(self, place: Any, mask: Any) -> Any:
        """Return packed masses, with zeros where `mask` is false."""
        return plgpu.load(self.packed_ref.at[self.row, place], mask=mask, other=_WORD(0))

    def store(self, place: Any, keys: Any, packed: Any, mask: Any) -> None:
        """Store keys and packed masses where `mask` is True."""
        # The interpreter stores the old value in masked places, but it stores nothing past the end.
        if self.interpret:
            place = jnp.where(mask, place, self.keys_ref.shape[1])
        plgpu.store(self.keys_ref.at[self.row, place], keys, mask=mask)
        plgpu.store(self.packed_ref.at[self.row, place], packed, mask=mask)

    def barrier(self) -> None:
        """Wait until all threads have finished their earlier loads and stores."""
        if not self.interpret:
            plgpu.debug_barrier()


class _Criterion(NamedTuple):
    """What a search sums: ones, so that a sum counts ids (top-k), or masses (top-p).

    A one is packed like the smallest mass, so both searches share their code.
    """

    is_mass: Any

    def weights(self, packed: Any, mask: Any) -> Any:
        """Return the packed weights, with zeros where `mask` is False."""
        return jnp.where(mask, jnp.where(self.is_mass, packed, _WORD(1)), _WORD(0))

    def matters(self, keys: Any, within: _Range) -> Any:
        """Return the mask of needed ids. Ids above a range of top-k stay for the search by mass."""
        return (keys >= within.least) & ((keys <= within.most) | ~self.is_mass)

    def narrow(self, within: _Range, candidates: Any, sums: _Sums, wanted: Any) -> _Range:
        """Return the part of the range, between two neighbouring candidates u32[WAYS], with the cutoff."""
        if_dropped = jnp.where(self.is_mass, _LAST_KEY, _WORD(0))
        sums = within.above.plus(sums)
        enough = total_mass(*sums) >= wanted
        # A smaller candidate keeps more. So the largest candidate that keeps enough, the smallest that does
        # not, and the sums of the latter are maxima and minima, whatever the order of the candidates.
        above = (
            jnp.where(enough, known, part).max() & if_dropped
            for known, part in zip(within.above, sums, strict=True)
        )
        return _Range(
            jnp.where(enough, candidates, within.least).max(),
            jnp.where(enough, within.most, candidates - _WORD(1)).min(),
            _Sums(*above),
        )


class _Sums(NamedTuple):
    """Exact sums of masses, by their halves; see `rule`."""

    high: Any
    low: Any

    def plus(self, other: _Sums) -> _Sums:
        """Return the sums over two disjoint sets of ids."""
        return _Sums(self.high + other.high, self.low + other.low)


class _Range(NamedTuple):
    """Range that holds the cutoff, and the sums of what is above `most`; zeros if that is not dropped."""

    least: Any
    most: Any
    above: _Sums


def _cutoff_kernel(
    top_k_ref: Any,
    top_p_ref: Any,
    _keys: Any,
    _packed: Any,
    cutoff_ref: Any,
    keys_ref: Any,
    packed_ref: Any,
    *,
    interpret: bool,
) -> None:
    """Find the cutoff of one row; `_keys` and `_packed` are aliased and unused."""
    row, vocab_size = pl.program_id(0), keys_ref.shape[1]
    ids = _Ids(keys_ref, packed_ref, row, interpret)
    top_k, top_p = top_k_ref[row], top_p_ref[row]
    # One loop of two rounds, by number and then by mass, without a round that is disabled.
    first = 1 - ((top_k > 0) & (top_k <= vocab_size)).astype(jnp.int32)
    last = 1 + (top_p < 1).astype(jnp.int32)
    search = functools.partial(_search, ids, top_k, top_p)
    _, cutoff_ref[row] = lax.fori_loop(first, last, search, (np.int32(vocab_size), _WORD(0)))


def _search(ids: _Ids, top_k: Any, top_p: Any, round_: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return how many ids still matter, and the largest cutoff that keeps enough; `state` has both so far.

    The cutoff never decreases. `round_` is 0 for top-k and 1 for top-p.
    """
    num_ids, floor = state
    criterion = _Criterion(round_ > 0)
    step = jnp.arange(WAYS, dtype=jnp.uint32)
    # The first candidate is the floor itself; its sums are the totals.
    candidates = jnp.maximum(_FIRST_KEY + (step - _WORD(1)) * _HALVING, floor)
    candidates = jnp.where(step > 0, candidates, floor)
    _, sums = _look(ids, num_ids, candidates, criterion)
    top_mass = wanted_mass(top_p, total_mass(sums.high.max(), sums.low.max()))
    wanted = jnp.where(criterion.is_mass, top_mass, top_k.astype(jnp.float32))
    whole = _Range(floor, _LAST_KEY, _Sums(_WORD(0), _WORD(0)))

    def goes_on(state: tuple[Any, _Range]) -> Any:
        num_ids, within = state
        return (within.least < within.most) & (num_ids > FEW)

    def next_pass(state: tuple[Any, _Range]) -> tuple[Any, _Range]:
        num_ids, within = state
        width = within.most - within.least
        stride = lax.div(width, _WORD(WAYS - 1)) + _WORD(1)
        # Equal steps, and also some id's key and its successor, so that a key that many ids share is found at
        # once.
        shared = jnp.clip(ids.load_key(lax.div(num_ids, 2)), within.least, within.most)
        strides = within.least + jnp.minimum((step - _WORD(1)) * stride, width)
        candidates = jnp.where(step < 2, shared + step, strides)
        num_ids, sums = _look(ids, num_ids, candidates, criterion, drop_outside=within)
        return num_ids, criterion.narrow(within, candidates, sums, wanted)

    within = criterion.narrow(whole, candidates, sums, wanted)
    num_ids, within = lax.while_loop(goes_on, next_pass, (num_ids, within))
    cutoff_of_few = functools.partial(_cutoff_of_few, ids, num_ids, within, criterion, wanted)
    return num_ids, _change_if(within.least < within.most, cutoff_of_few, within.least)


def _look(
    ids: _Ids, num_ids: Any, candidates: Any, criterion: _Criterion, drop_outside: _Range | None = None
) -> tuple[Any, _Sums]:
    """Run one pass: return how many ids still matter, and the sums u32[WAYS] that each candidate keeps.

    With `drop_outside`, the ids that matter to this range move to the front, and the others are dropped.
    """
    num_lanes = 32 * NUM_WARPS
    lane = jnp.arange(num_lanes, dtype=jnp.int32)

    def look_at_vectors(i: Any, state: tuple[Any, _Sums]) -> tuple[Any, _Sums]:
        num_kept, sums = state
        places = [(i * UNROLL + j) * num_lanes + lane for j in range(UNROLL)]
        matters = [place < num_ids for place in places]
        keys = [ids.load_keys(*each) for each in zip(places, matters, strict=True)]
        # The search by number reads masses only to move them.
        reads = matters if drop_outside is not None else [each & criterion.is_mass for each in matters]
        packed = [ids.load_packed(*each) for each in zip(places, reads, strict=True)]
        if drop_outside is not None:
            matters = [m & criterion.matters(k, drop_outside) for m, k in zip(matters, keys, strict=True)]
            num_kept = _move(ids, num_kept, keys, packed, matters)
        packed_sums = jnp.zeros((WAYS, num_lanes), jnp.uint32)
        for key, *each in zip(keys, packed, matters, strict=True):
            weights = criterion.weights(*each)[None, :]
            packed_sums += jnp.where(key[None, :] >= candidates[:, None], weights, _WORD(0))
        return num_kept, sums.plus(_unpack(packed_sums))

    num_reads = pl.cdiv(num_ids, UNROLL * num_lanes)
    nothing = jnp.zeros((WAYS, num_lanes), jnp.uint32)
    state = np.int32(0), _Sums(nothing, nothing)
    num_kept, sums = lax.fori_loop(0, num_reads, look_at_vectors, state)
    ids.barrier()  # from here on other threads may load ids that have moved
    return num_kept, _Sums(*(part.sum(axis=1, dtype=jnp.uint32) for part in sums))


def _move(ids: _Ids, num_kept: Any, keys: list[Any], packed: list[Any], matters: list[Any]) -> Any:
    """Move the ids of one read that matter behind those kept before; return how many there are now."""
    counts = [each.astype(jnp.int32) for each in matters]
    count = functools.reduce(jnp.add, counts)
    place = num_kept + jnp.cumsum(count) - count
    ids.barrier()  # another thread must load a place before it is overwritten
    for each, one in zip(zip(keys, packed, matters, strict=True), counts, strict=True):
        ids.store(place, *each)
        place += one
    return num_kept + count.sum()


def _cutoff_of_few(
    ids: _Ids, num_ids: Any, within: _Range, criterion: _Criterion, wanted: Any, least: Any
) -> Any:
    """Return the cutoff of up to `FEW` ids: the largest of their keys that keeps enough, or `least`."""
    place = jnp.arange(FEW, dtype=jnp.int32)
    is_id = place < num_ids
    keys = ids.load_keys(place, is_id)
    matters = is_id & criterion.matters(keys, within)
    parts = _unpack(criterion.weights(ids.load_packed(place, is_id), matters))
    is_kept = keys[None, :] >= keys[:, None]  # the first axis is the candidate
    sums = (jnp.where(is_kept, part[None, :], _WORD(0)).sum(axis=1, dtype=jnp.uint32) for part in parts)
    enough = matters & (total_mass(*within.above.plus(_Sums(*sums))) >= wanted)
    return jnp.maximum(jnp.where(enough, keys, _WORD(0)).max(), least)


def _unpack(packed: Any) -> _Sums:
    """Return the halves of the sum of up to `_MAX_PACKED` packed masses."""
    return _Sums(packed >> _WORD(_PACKED_BITS), packed & _WORD(2**_PACKED_BITS - 1))


def _change_if[T](condition: Any, change: Callable[[T], T], state: T) -> T:
    """Return `change(state)` or `state`, by a loop: branches of a conditional cannot return constants."""
    return lax.fori_loop(0, condition.astype(jnp.int32), lambda _, state: change(state), state)
