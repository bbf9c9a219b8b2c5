"""How a number of chunks is cut into batches, of sizes for which there are executables.

Owns: the sizes.
Does not know: what is done with a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

# A launch takes all pools of a group, on every device, which costs the host as much as ten to fifty chunks in
# it do. So there is padding rather than another launch, and a size for any number that is
# less than twice as large.
_SIZES = (4, 8, 16, 32, 64)


class Batch(NamedTuple):
    """Chunks [start, stop), in a launch of `size`."""

    start: int
    stop: int
    size: int


def batch_sizes(max_num_chunks: int) -> tuple[int, ...]:
    """The sizes, ascending, where no more than so many chunks are moved at once."""
    largest = min(max_num_chunks, _SIZES[-1])
    return (*(size for size in _SIZES if size < largest), largest)


def max_padding(max_num_chunks: int) -> int:
    """The most places of a batch that hold no chunk."""
    sizes = 0, *batch_sizes(max_num_chunks)
    return max(size - smaller for smaller, size in itertools.pairwise(sizes)) - 1


def batches(num_chunks: int, sizes: tuple[int, ...]) -> Iterator[Batch]:
    """As few as can be of `sizes`, in order."""
    for start in range(0, num_chunks, sizes[-1]):
        stop = min(start + sizes[-1], num_chunks)
        yield Batch(start, stop, next(size for size in sizes if size >= stop - start))
