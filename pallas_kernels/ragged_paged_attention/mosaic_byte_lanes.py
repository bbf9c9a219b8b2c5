"""Program of one lane of a computing warpgroup for decode attention over pages in 8 bits.

Owns: the assignment of queries, keys, values and sums to threads, the conversion of codes to operands, the
online softmax, and the merge of the four warps' sums. Does not know: what a register is; `mosaic_threads`
turns the operations into instructions, `interpreted_threads` computes them for all lanes on any device.
Called by: `mosaic_bytes`.

The four warps divide a block's keys. Each warp has its own sums, and they do not synchronize until the item
ends. Products are m16n8k16 of float16, with keys or head elements in the long dimension: scores are
S^T[keys, queries] = K Q^T, sums are O^T[elements, queries] += V^T P^T. A query tile has 8 rows, or 16, no
more than the heads of a decoding row. Codes are operand A, from 16 contiguous bytes of a row.

With lane = 4 g + t (g < 8, t < 4), keys counted within the warp's part of a block, and p = `key_of`:

| what | where |
|---|---|
| Q^T | query g, 16 elements from 16 t and 16 from 64 + 16 t: the order of a contraction is free |
| K | keys 16 i + p(g) and + 8, the same elements: two chunks of 16 bytes, a word for each step |
| S^T, P^T | keys 16 i + 8 h + p(g), queries 2 t + e |
| P^T as operand B | keys 16 i + 8 h + p(2 t + e), query g: a transposition of 8 x 8 within the warp |
| V^T | the same keys, elements 16 g ... 16 g + 15; product j has 2 j and 2 j + 1 |
| O^T | elements 16 g + 2 j + h, queries 2 t + e |

A key and its value are adjacent, in pages and in shared memory. This is swizzled by 128 bytes, so rows four
apart have their chunks in the same order. With p, eight lanes that load together use all banks.

Codes are exact in float16. A query row is divided by the power of two of its largest magnitude and converted
to float16. This is exact except for elements of 2^-14 of that magnitude or less. Weights are computed as
exp2(score + log2(value's scale)), so the factors of codes are at most one. The denominator is the sum of the
plain weights, relative to the same maximum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HEAD_DIM = 128
NUM_WARPS = 4
TILE_ROWS = 8  # queries of one product
# Hidden scores, and an initial maximum above these and below all visible scores.
_MASKED, _NO_MAXIMUM = -1e30, -1e29
_MIN_SCALE = 2.0**-100  # smaller scales of values are raised to it: these values are negligible
_STEPS = HEAD_DIM // 16  # steps of a contraction over elements
_TILES = HEAD_DIM // 16  # tiles of sums
_QUERY_REGISTERS, _SUM_REGISTERS, _ROW_REGISTERS = 2 * _STEPS, 4 * _TILES, 4
_SCALE_BYTES = 2 * HEAD_DIM  # bytes of a page's row of scales: those of keys, then those of values

Registers = list[Any]


@dataclass(frozen=True)
class LaneShape:
    """Static parameters of the program.

    Attributes:
      kv_dtype: format of the pages.
      page_size: tokens of a page.
      group: query heads per KV head.
      block_kv: keys of a block.
      num_tiles: products side by side, of 8 query rows each.
      scale: factor on scores, for base 2.
      window: keys that a query sees; None means all up to its own.
    """

    kv_dtype: str
    page_size: int
    group: int
    block_kv: int
    num_tiles: int
    scale: float
    window: int | None = None

    @property
    def warp_keys(self) -> int:
        """Keys of a block for one warp."""
        return self.block_kv // NUM_WARPS

    @property
    def key_tiles(self) -> int:
        """Tiles of 16 keys for one warp."""
        return self.warp_keys // 16

    @property
    def num_query_registers(self) -> int:
        """Registers of queries: operands, then those of `num_bound_registers`."""
        return self.num_tiles * (_QUERY_REGISTERS + self.num_bound_registers)

    @property
    def num_bound_registers(self) -> int:
        """Registers of two queries: each one's factor as bits, last key, and with a window the key before."""
        return 4 if self.window is None else 6

    @property
    def num_sum_registers(self) -> int:
        """Registers of sums: the sums, then the maximum and the total weight of each query."""
        return self.num_tiles * (_SUM_REGISTERS + _ROW_REGISTERS)


def key_of(g: Any) -> Any:
    """Return which of eight keys is in row g of a product: 0, 6, 1, 7, 2, 4, 3, 5."""
    return (g >> 1) ^ ((g & 1) * 6)


def slot_of(key: Any, which: int, chunk: Any) -> Any:
    """Return the byte offset of a chunk of a key, or (which = 1) of its value, in a swizzled block."""
    row = key * 2 + which
    return row * HEAD_DIM + ((chunk ^ (row & 7)) << 4)


def empty_sums(shape: LaneShape) -> list[float]:
    """Return the initial sums for `add_block`."""
    sums = [0.0] * (shape.num_tiles * _SUM_REGISTERS)
    return sums + [_NO_MAXIMUM, _NO_MAXIMUM, 0.0, 0.0] * shape.num_tiles


def load_queries(threads: Any, shape: LaneShape, queries: Any, position: Any, kv_end: Any) -> Registers:
    """Load a tile's rows; return i32 registers: operands, factors, and first and last keys.

    Args:
      threads: the operations of a thread.
      shape: static parameters.
      queries: bf16[8 * num_tiles, 128] in shared memory; unused rows are arbitrary.
      position: position of the tile's first token.
      kv_end: end of the item's key range.
    """
    operands, rest = [], []
    for n in range(shape.num_tiles):
        start = (TILE_ROWS * n + threads.g) * (2 * HEAD_DIM) + threads.t * 32
        words = [word for c in (0, 16, 128, 144) for word in threads.load_words(queries, start + c)]
        pairs = [(threads.as_float(w << 16), threads.as_float(w & -(1 << 16))) for w in words]
        largest = _pairwise(threads.maximum, [threads.magnitude(x) for pair in pairs for x in pair])
        for distance in (1, 2):
            largest = threads.maximum(largest, threads.shuffle_xor(largest, distance))
        exponent = threads.as_int(largest) & 0x7F800000
        inverse = threads.as_float(exponent * -1 + 0x7F000000)
        operands += [threads.pack_halves(low * inverse, high * inverse) for low, high in pairs]
        factor = threads.as_float(exponent) * shape.scale
        for e in range(2):
            token = threads.divide(threads.t * 2 + (TILE_ROWS * n + e), shape.group)
            rest.append(threads.as_int(threads.shuffle(factor, threads.t * 8 + 4 * e)))
            rest.append(threads.minimum_int(position + token, kv_end - 1))
            if shape.window is not None:
                rest.append(position + token - shape.window)
    return operands + rest


def add_block(
    threads: Any,
    shape: LaneShape,
    codes: Any,
    scales: Any,
    first_key: Any,
    queries: Registers,
    sums: Registers,
    *,
    masked: bool,
) -> Registers:
    """Return the sums with one more block.

    Args:
      threads: the operations of a thread.
      shape: static parameters.
      codes: i8[block_kv, 256] in shared memory; each key is followed by its value.
      scales: i8[pages, 256] in shared memory.
      first_key: first key of the block.
      queries: registers from `load_queries`.
      sums: f32 registers from `empty_sums` or from this function.
      masked: some query may not see the whole block.
    """
    tiles, rows = range(shape.num_tiles), shape.num_tiles * _SUM_REGISTERS
    acc = [sums[_SUM_REGISTERS * n :][:_SUM_REGISTERS] for n in tiles]
    state = [sums[rows + _ROW_REGISTERS * n :][:_ROW_REGISTERS] for n in tiles]
    begin = threads.warp * shape.warp_keys
    key_scales, value_scales = _scales(threads, shape, scales, begin)
    products = _scores(threads, shape, codes, begin, queries)
    weights = []
    for n in tiles:
        bounds = _of_queries(shape, queries, n)
        columns = []
        for e in range(2):
            factor, last_key, *hidden = bounds[len(bounds) // 2 * e :][: len(bounds) // 2]
            factor = threads.as_float(factor)
            scores = []
            for place in range(2 * shape.key_tiles):
                score = products[n][place // 2][2 * (place % 2) + e] * key_scales[place] * factor
                pair = [score, score + value_scales[place]]
                if masked:
                    key = first_key + begin + (key_of(threads.g) + 8 * place)
                    is_hidden = key > last_key
                    pair = [threads.select(is_hidden, _MASKED, x) for x in pair]
                    for hidden_key in hidden:  # the last one before the window
                        is_seen = key > hidden_key
                        pair = [threads.select(is_seen, x, _MASKED) for x in pair]
                scores.append(pair)
            m, total = state[n][e], state[n][2 + e]
            column, state[n][e], state[n][2 + e], alpha = _weigh(threads, scores, m, total)
            columns.append(column)
            for j in range(e, _SUM_REGISTERS, 2):
                acc[n][j] = acc[n][j] * alpha
        packed = [threads.pack_halves(a, b) for a, b in zip(*columns, strict=True)]
        weights.append([threads.transpose(pair) for pair in packed])
    can_be_nan = masked and shape.kv_dtype != "int8"  # a weight of zero times such a code is NaN
    first_value = last_value = None
    if can_be_nan:
        last_value = _last_key(threads, shape, queries) - first_key
    if can_be_nan and shape.window is not None:
        # The first row is of the first token, whose window begins first.
        hidden_key = threads.shuffle(_of_queries(shape, queries, 0)[2], threads.lane & 0)
        first_value = hidden_key + 1 - first_key
    _add_values(threads, shape, codes, begin, weights, acc, first_value, last_value)
    return [x for part in (*acc, *state) for x in part]


def _last_key(threads: Any, shape: LaneShape, queries: Registers) -> Any:
    """Return the last key that any of a tile's queries may see."""
    places = (1, 1 + shape.num_bound_registers // 2)
    found = [_of_queries(shape, queries, n)[which] for n in range(shape.num_tiles) for which in places]
    last = _pairwise(threads.maximum_int, found)
    for distance in (1, 2):
        last = threads.maximum_int(last, threads.shuffle_xor(last, distance))
    return last


def _of_queries(shape: LaneShape, queries: Registers, n: int) -> Registers:
    """Return the `num_bound_registers` of the two queries of a tile in this thread."""
    count = shape.num_bound_registers
    return queries[shape.num_tiles * _QUERY_REGISTERS + count * n :][:count]


def _scales(threads: Any, shape: LaneShape, scales: Any, begin: Any) -> tuple[Registers, Registers]:
    """Return the scales of a thread's keys, and log2 of those of its values. Each lane loads one key's."""
    key = begin + (threads.lane & (shape.warp_keys - 1))
    bits = shape.page_size.bit_length() - 1
    start = (key >> bits) * _SCALE_BYTES + (key & (shape.page_size - 1))
    found = []
    for which in range(2):
        high = threads.load_byte(scales, start + which * HEAD_DIM)
        low = threads.load_byte(scales, start + (which * HEAD_DIM + shape.page_size))
        found.append(threads.as_float(threads.permute_bytes(low, high, 0x4011)))
    found[1] = threads.log2(threads.maximum(found[1], _MIN_SCALE))
    places = range(2 * shape.key_tiles)
    of_keys, of_values = [[threads.shuffle(x, key_of(threads.g) + 8 * p) for p in places] for x in found]
    return of_keys, of_values


def _scores(
    threads: Any, shape: LaneShape, codes: Any, begin: Any, queries: Registers
) -> list[list[Registers]]:
    """Return unscaled scores by query tile and tile of 16 keys: keys p(g), p(g) + 8; queries 2 t, 2 t + 1."""
    found: list[list[Registers]] = [[] for _ in range(shape.num_tiles)]
    for i in range(shape.key_tiles):
        rows = []
        for h in range(2):
            key = begin + key_of(threads.g) + (16 * i + 8 * h)
            words = [w for c in (0, 4) for w in threads.load_codes(codes, key, 0, threads.t + c)]
            rows.append([_halves(threads, shape, word) for word in words])
        # Two short dependency chains for each tile of queries.
        chains = [[[0.0] * 4 for _ in range(2)] for _ in range(shape.num_tiles)]
        for s in range(_STEPS):
            operand = [rows[0][s][0], rows[1][s][0], rows[0][s][1], rows[1][s][1]]
            for n in range(shape.num_tiles):
                query = queries[n * _QUERY_REGISTERS + 2 * s :][:2]
                chains[n][s % 2] = threads.multiply_add(operand, query, chains[n][s % 2])
        for n in range(shape.num_tiles):
            found[n].append([a + b for a, b in zip(*chains[n], strict=True)])
    return found


def _weigh(threads: Any, scores: list[Registers], m: Any, total: Any) -> tuple[Registers, Any, Any, Any]:
    """Return one query's weights times values' scales, its new maximum and total, the factor for older sums.

    scores: for each key the score, and the score plus log2 of its value's scale; maxima are of the latter.
    """
    largest = _pairwise(threads.maximum, [scaled for _, scaled in scores])
    for distance in (4, 8, 16):
        largest = threads.maximum(largest, threads.shuffle_xor(largest, distance))
    m_new = threads.maximum(m, largest)
    alpha = threads.exp2(m - m_new)
    weights = [threads.exp2(scaled - m_new) for _, scaled in scores]
    total = total * alpha + _pairwise(operator.add, [threads.exp2(score - m_new) for score, _ in scores])
    return weights, m_new, total, alpha


def _add_values(
    threads: Any,
    shape: LaneShape,
    codes: Any,
    begin: Any,
    weights: list[Registers],
    acc: list[Registers],
    first_key: Any,
    last_key: Any,
) -> None:
    """Add weighted values to `acc` in place.

    Values of keys before `first_key` or past `last_key`, if these are given, count as zeros.
    """
    for i in range(shape.key_tiles):
        rows: list[list[Registers]] = []
        for h in range(2):
            rows.append([])
            for e in range(2):
                key = begin + key_of(threads.t * 2 + e) + (16 * i + 8 * h)
                words = threads.load_codes(codes, key, 1, threads.g)
                if last_key is not None:
                    words = [threads.select(key > last_key, 0, word) for word in words]
                if first_key is not None:
                    words = [threads.select(key >= first_key, word, 0) for word in words]
                rows[-1].append(words)
        for j in range(4):  # words of 4 bytes
            parts = []
            for one, other in rows:
                for selector in (0x5140, 0x7362):  # bytes 0 and 1 of both keys interleaved, then 2 and 3
                    parts.append(_halves(threads, shape, threads.permute_bytes(one[j], other[j], selector)))
            for o in range(2):
                operand = [parts[o][0], parts[o][1], parts[2 + o][0], parts[2 + o][1]]
                for n, sums in enumerate(acc):
                    where = slice(4 * (2 * j + o), 4 * (2 * j + o) + 4)
                    sums[where] = threads.multiply_add(operand, weights[n][2 * i : 2 * i + 2], sums[where])


def _halves(threads: Any, shape: LaneShape, word: Any) -> Registers:
    """Return four codes as two pairs of float16."""
    if shape.kv_dtype != "int8":
        return [threads.halves_of_e4m3(word, which) for which in range(2)]
    # A code with its sign bit flipped is the code plus 128; as the low bits of 1024 it adds to that exactly.
    word = word ^ _signed(0x80808080)
    return [
        threads.subtract_halves(threads.permute_bytes(word, 0x64646464, selector), 0x64806480)
        for selector in (0x4140, 0x4342)
    ]


def finish(
    threads: Any,
    shape: LaneShape,
    rows: Any,
    slabs: Any,
    result: Any,
    lse: Any,
    sums: Registers,
    sinks: Registers,
) -> None:
    """Merge the warps' sums, and store the attention of a tile's rows in three places of shared memory.

    Args:
      threads: the operations of a thread.
      shape: static parameters.
      rows: f32[4, 2, 8 * num_tiles], scratch: each warp's maxima and totals.
      slabs: f32[2, 8 * num_tiles, 128], scratch; the first ends up with the result, in float32.
      result: bf16[8 * num_tiles, 128].
      lse: f32[8 * num_tiles], log-sum-exps in base 2.
      sums: registers from `add_block`.
      sinks: the heads' sinks in base 2; none if they have none.
    """
    num_rows, num_sums = TILE_ROWS * shape.num_tiles, shape.num_tiles * _SUM_REGISTERS
    is_writer, t2 = threads.g == 0, threads.t * 2
    state = [sums[num_sums + _ROW_REGISTERS * n :][:_ROW_REGISTERS] for n in range(shape.num_tiles)]
    for n, (*maxima, first, second) in enumerate(state):
        totals = [first, second]
        for distance in (4, 8, 16):
            totals = [total + threads.shuffle_xor(total, distance) for total in totals]
        for which, pair in enumerate((maxima, totals)):
            place = (threads.warp * 2 + which) * num_rows + (t2 + TILE_ROWS * n)
            threads.store_floats(rows, place, pair, is_writer)
    threads.barrier()
    scaled, logs = list(sums[:num_sums]), []
    for n in range(shape.num_tiles):
        place = t2 + TILE_ROWS * n
        of_queries = [_sink_of(threads, sinks, place + e) for e in range(2)] if sinks else []
        factors, of_tile = _factors(threads, rows, place, num_rows, state[n][:2], of_queries)
        logs.append(of_tile)
        for j in range(_SUM_REGISTERS * n, _SUM_REGISTERS * (n + 1)):
            scaled[j] = scaled[j] * factors[j % 2]
    _exchange(threads, slabs, num_rows, scaled, is_last=False)
    _exchange(threads, slabs, num_rows, scaled, is_last=True)
    is_first = threads.warp == 0
    for n in range(shape.num_tiles):
        threads.store_floats(lse, t2 + TILE_ROWS * n, logs[n], is_first & is_writer)
        for e in range(2):
            # A thread has 16 consecutive elements of a row.
            elements = [scaled[_SUM_REGISTERS * n + 2 * d + e] for d in range(16)]
            place = (t2 + (TILE_ROWS * n + e)) * HEAD_DIM + threads.g * 16
            for d in range(0, 16, 4):
                threads.store_floats(slabs, place + d, elements[d : d + 4], is_first)
            words = [threads.pack_bfloat16(a, b) for a, b in zip(elements[::2], elements[1::2], strict=True)]
            for d in range(0, 8, 4):
                threads.store_words(result, place * 2 + 4 * d, words[d : d + 4], is_first)


def _factors(
    threads: Any, rows: Any, place: Any, num_rows: int, maxima: Registers, sinks: Registers
) -> tuple[Registers, Registers]:
    """Return for two queries the factors of this warp's sums, and the log-sum-exps over all warps.

    `sinks` are theirs, if there are any; they enter the factors alone.
    """
    found = [threads.load_floats(rows, place + num_rows * i, 2) for i in range(2 * NUM_WARPS)]
    factors, logs = [], []
    for e in range(2):
        all_maxima, all_totals = ([row[e] for row in found[which::2]] for which in range(2))
        largest = _pairwise(threads.maximum, all_maxima)
        parts = [x * threads.exp2(m - largest) for m, x in zip(all_maxima, all_totals, strict=True)]
        total = _pairwise(operator.add, parts)
        total = threads.select(total == 0.0, 1.0, total)  # without keys the result is zero
        whole = total + threads.exp2(sinks[e] - largest) if sinks else total
        factors.append(threads.exp2(maxima[e] - largest) / whole)
        logs.append(largest + threads.log2(total))
    return factors, logs


def _sink_of(threads: Any, sinks: Registers, row: Any) -> Any:
    """Return the sink of a row's head; rows are token by token."""
    head = row - threads.divide(row, len(sinks)) * len(sinks)
    found = sinks[0]
    for other, sink in enumerate(sinks[1:], start=1):
        found = threads.select(head == other, sink, found)
    return found


def _exchange(threads: Any, slabs: Any, num_rows: int, sums: Registers, *, is_last: bool) -> None:
    """Add other warps' sums in place: first those of warps 2 and 3 to 0 and 1; if `is_last`, 1 to 0.

    A warp stores its sums in the slab of its own parity, which no other warp has used since the last barrier.
    Warps that have given their sums also read and add; their results are meaningless.
    """
    is_giver = threads.warp == 1 if is_last else threads.warp >= 2
    own, start = (threads.warp & 1) * (num_rows * HEAD_DIM), threads.lane * 4
    for j in range(0, len(sums), 4):
        threads.store_floats(slabs, own + start + 32 * j, sums[j : j + 4], is_giver)
    threads.barrier()
    found = num_rows * HEAD_DIM if is_last else own
    for j in range(0, len(sums), 4):
        given = threads.load_floats(slabs, found + start + 32 * j, 4)
        sums[j : j + 4] = [a + b for a, b in zip(sums[j : j + 4], given, strict=True)]


def _pairwise(combine: Callable[[Any, Any], Any], values: Registers) -> Any:
    """Combine any number of registers as a tree, to avoid a long dependency chain."""
    while len(values) > 1:
        pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[2 * len(pairs) :]
    return values[0]


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
