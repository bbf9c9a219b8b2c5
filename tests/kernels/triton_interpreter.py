"""The kernels of `jax_triton` in Triton's interpreter, on a CPU, against the dense reference.

    TRITON_INTERPRET=1 JAX_PLATFORMS=cpu python -m tests.kernels.triton_interpreter

`test_jax_triton` starts this as a separate program, since Triton decides at import whether kernels are
compiled or interpreted. Everything but the launch is the back end's own code: a replacement of
`jax_triton.triton_call` passes numpy arrays to the interpreter. The interpreter expects PyTorch tensors;
`HostTensor` has the methods that it uses. There is no bfloat16: the interpreter multiplies the bits of such
numbers as integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_triton
import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

from pallas_kernels.ragged_paged_attention import (
    BlockSizes,
    TileClass,
    build_tiles,
    ragged_paged_attention,
    tile_spec,
)
from pallas_kernels.ragged_paged_attention.shapes import Heads
from tests.kernels.batches import Room, assert_equals_reference, make_batch, random_rows

SCALE = 0.17
# Few programs and short splits, so that small batches are also split and merged.
TWO_CLASSES = BlockSizes((TileClass(16, 32, 4, 2, 64, 8), TileClass(64, 16, 4, 2, 64, 8)))
ONE_CLASS = BlockSizes((TileClass(64, 16, 4, 2, 32, 16, whole_loop=False),))
# Whole tiles and partial ones, one key and none, ends inside and at the end of pages.
ROWS = [(1, 70), (5, 33), (40, 40), (1, 1), (0, 12), (70, 80), (17, 200)]
ROOM = Room(num_tokens=96, max_num_seqs=9, pages_per_seq=14, num_pages=50)


class HostTensor:
    """Numpy array with the methods by which the interpreter copies a tensor to the host; they do nothing."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def here(self, *_: Any, **__: Any) -> HostTensor:
        return self

    cpu = untyped_storage = new_empty = set_ = copy_ = storage_offset = size = stride = here


def patch_the_language_once() -> None:
    """Patch the language only once for the inner functions of a module.

    Triton patches the whole language at every call of an inner function, which takes half of the time.
    Patches for an inner function stay in place; a launch patches again.
    """
    patched: set[str] = set()

    def call(function: InterpretedFunction[Any], *args: Any, **kwargs: Any) -> Any:
        if function.fn.__module__ not in patched:
            patched.add(function.fn.__module__)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **kwargs)

    InterpretedFunction.__call__ = call


def interpreted_call(*args: Any, kernel: Any, out_type: Any, grid: Any, **kwargs: Any) -> Any:
    """Replace `jax_triton.triton_call`; outputs start as NaN."""
    refs = [arg for arg in args if isinstance(arg, jax.Ref)]
    inputs = [arg for arg in args if not isinstance(arg, jax.Ref)]
    arrays = [np.array(arg) for arg in inputs] + [np.array(ref[...]) for ref in refs]
    outputs = [np.full(out.shape, np.nan, out.dtype) for out in out_type]
    kernel[grid](*map(HostTensor, arrays + outputs), **kwargs)
    for ref, array in zip(refs, arrays[len(inputs) :], strict=True):
        ref[...] = jnp.asarray(array)
    return tuple(map(jnp.asarray, outputs))


def check(
    rows: list[tuple[int, int]],
    heads: Heads,
    page_size: int = 16,
    dtype: str = "float32",
    blocks: BlockSizes = TWO_CLASSES,
    room: Room | None = None,
    shared: dict[int, int] | None = None,
    seed: int = 0,
) -> int:
    """Compare one batch with the reference; return the number of merges."""
    rng = np.random.default_rng(seed)
    batch = make_batch(rng, rows, heads, page_size=page_size, dtype=dtype, room=room, shared=shared)
    spec = tile_spec(
        num_tokens=batch.q.shape[0], max_num_seqs=len(batch.kv_lens), num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, page_size=page_size, dtype=dtype,
        backend="jax_triton", blocks=blocks,
    )  # fmt: skip
    tiles = build_tiles(spec, batch.cu_q_lens, batch.kv_lens, batch.num_seqs)
    out = ragged_paged_attention(
        *map(jnp.asarray, batch), sm_scale=SCALE, metadata=(spec, jnp.asarray(tiles))
    )
    assert_equals_reference(out, batch, SCALE)
    return int(tiles[len(blocks.classes)])


def check_split(*args: Any) -> None:
    """Check a batch that must be split and merged."""
    assert check(*args)


def check_random(num_seeds: int) -> None:
    """Check random batches with the arguments of `check`."""
    for seed in range(num_seeds):
        rows = random_rows(np.random.default_rng(seed), ROOM, 16, 90)
        check(rows, Heads(4, 2, 32), room=ROOM, seed=seed)


# A block of keys is a page, half a page, or several; 3 and 40 heads per group do not fill a tile.
CASES: dict[str, Callable[[], Any]] = {
    "group1": lambda: check_split(ROWS, Heads(2, 2, 32), 16, "float32"),
    "group4": lambda: check_split(ROWS, Heads(4, 1, 64), 32, "float16"),
    "group8": lambda: check_split(ROWS, Heads(8, 1, 32), 64, "float16"),
    "group3": lambda: check_split(ROWS[:5], Heads(6, 2, 32), 16, "float32", ONE_CLASS),
    "group40": lambda: check_split(ROWS[:5], Heads(40, 1, 128), 32, "float16", ONE_CLASS),
    "head_dim256": lambda: check(ROWS[:5], Heads(2, 1, 256), 32, "float32"),
    # The last part of the range holds one key, which only the last of four queries sees.
    "unseen_part": lambda: check_split([(4, 65)], Heads(2, 2, 32), 16, "float32"),
    "shared_pages": lambda: check(
        [(10, 100), (20, 20), (6, 50), (1, 60)], Heads(4, 2, 32), room=ROOM, shared={1: 0, 2: 0}
    ),
    "no_rows": lambda: check([], Heads(4, 2, 32), room=ROOM),
    "random": lambda: check_random(5),
}


if __name__ == "__main__":
    patch_the_language_once()
    jax_triton.triton_call = interpreted_call
    for name, run_case in CASES.items():
        print(name, flush=True)  # the last printed name is the check that failed
        run_case()
