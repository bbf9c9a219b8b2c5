"""The packed plan: the device inputs of one step, as one numpy buffer.

Owns: the table of a plan's fields (`FIELDS`), and so the layout of the int32 buffer that goes to the device
in each step. The columns of sampling fields come from `core.sampling_params`. Every part has a named view.
One copy carries all metadata of a step, because the fixed cost of a copy exceeds that of its bytes.
Does not know: how a plan is filled (`planner`) or how a device uses it (`device.model_runner`).
Called by the planner and the model runners.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from pensieve_jax.decoding.adjustments import Adjustment
from pensieve_jax.decoding.prompt_rows import PromptRows
from pensieve_jax.decoding.sampling_rows import COLUMNS

NUM_FLAGS = 4
MAX_TILE_LISTS: Final = 2
"""The most lists of the attention kernel, one for each distinct window of the model's layers."""
# Fields begin at multiples of 256 bytes. XLA passes a slice of the buffer to a kernel without a copy, and
# Mosaic GPU kernels reject arguments with a smaller alignment.
_ALIGNMENT = 64
FLAG_SAMPLES, FLAG_TRUNCATES, FLAG_LOGPROBS = range(3)


class PackedField(NamedTuple):
    """One part of the packed buffer: first element, shape, and the type of its 32-bit elements."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Number of 32-bit elements."""
        return prod(self.shape)


class PlanField(NamedTuple):
    """Declaration of one field of a plan.

    Attributes:
      sizes: size of each dimension: a number, or a key of `PlanLayout.sizes`.
      dtype: a 32-bit type.
      padding: value of unused elements; None is the first slot past the pool, which only the planner knows.
    """

    sizes: tuple[int | str, ...]
    dtype: np.dtype = np.dtype(np.int32)
    padding: float | None = 0

    @property
    def padding_word(self) -> int | None:
        """Padding as the int32 with the same bits; None if `padding` is None."""
        return None if self.padding is None else int(np.array(self.padding, self.dtype).view(np.int32))


FIELDS: Final[Mapping[str, PlanField]] = {
    "token_ids": PlanField(("T",)),
    # Row of the previous step's samples that holds the id, or -1.
    "prev_samples": PlanField(("T",), padding=-1),
    "positions": PlanField(("T",)),
    # page * page_size + offset; writes out of bounds are dropped.
    "write_slots": PlanField(("T",), padding=None),
    "cu_q_lens": PlanField(("R + 1",)),  # past the last row: the number of tokens
    "kv_lens": PlanField(("R",)),
    "page_indices": PlanField(("R", "P")),  # page 0 is the dummy
    "num_rows": PlanField((1,)),
    # The kernel's list builder fills every element that the kernel reads.
    **{f"tiles_{i}": PlanField((f"N{i}",)) for i in range(MAX_TILE_LISTS)},
    "num_samples": PlanField((1,)),
    "sample_tokens": PlanField(("S",)),  # index into the T tokens
    "sample_positions": PlanField(("S",)),  # absolute position of the token to be sampled
    # The columns of sampling fields: `temperature`, `top_k`, `top_p`.
    **{
        name: PlanField(("S",), np.dtype(column.dtype), padding=column.off)
        for name, column in COLUMNS.items()
    },
    "seed": PlanField(("S", 2), np.dtype(np.uint32)),  # 64 bits, low word first
    "banned_ids": PlanField(("S", "B"), padding=-1),
    "flags": PlanField((NUM_FLAGS,)),  # see the FLAG_ constants
}
"""Every field of a plan by name, in the order of the buffer."""


class _View(NamedTuple):
    """The parameters of one field's view; `dtype` and `shape` are None if the view needs no conversion."""

    name: str
    part: slice
    dtype: np.dtype | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class PlanLayout:
    """The shape of a bucket's plans; hashable, so that it can key a compiled executable.

    Attributes:
      num_tokens: T, padded query tokens; the bucket.
      max_num_rows: R, sub-requests.
      pages_per_row: P, pages of the longest context.
      max_num_samples: S, ids that one step can sample.
      max_num_banned: B, token ids that one row can ban from sampling.
      tiles_lens: lengths of the attention kernel's tile lists, one for each distinct window; at most
        `MAX_TILE_LISTS`.
    """

    num_tokens: int
    max_num_rows: int
    pages_per_row: int
    max_num_samples: int
    max_num_banned: int
    tiles_lens: tuple[int, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Values of the size names in the field declarations."""
        return {
            "T": self.num_tokens,
            "R": self.max_num_rows,
            "R + 1": self.max_num_rows + 1,
            "P": self.pages_per_row,
            "S": self.max_num_samples,
            "B": self.max_num_banned,
            **dict.fromkeys((f"N{i}" for i in range(MAX_TILE_LISTS)), 0),
            **{f"N{i}": size for i, size in enumerate(self.tiles_lens)},
        }

    @cached_property
    def tile_fields(self) -> tuple[str, ...]:
        """Names of the fields of tile lists, in the order of `tiles_lens`."""
        return tuple(f"tiles_{i}" for i in range(len(self.tiles_lens)))

    @cached_property
    def fields(self) -> dict[str, PackedField]:
        """Every field by name, in the order of the buffer."""
        fields, offset, sizes = {}, 0, self.sizes
        for name, declared in FIELDS.items():
            shape = tuple(sizes[size] if isinstance(size, str) else size for size in declared.sizes)
            fields[name] = PackedField(offset, shape, declared.dtype)
            offset += -(-prod(shape) // _ALIGNMENT) * _ALIGNMENT
        return fields

    @cached_property
    def size(self) -> int:
        """Number of 32-bit elements of the whole buffer."""
        last = list(self.fields.values())[-1]
        return last.offset + last.size

    @cached_property
    def views(self) -> tuple[_View, ...]:
        """Parameters of a plan's views, cached because a plan is made in every step.

        Tile lists that the model has no window for have none, since each view takes time.
        """
        unused = {f"tiles_{i}" for i in range(len(self.tiles_lens), MAX_TILE_LISTS)}
        return tuple(
            _View(
                name,
                slice(field.offset, field.offset + field.size),
                None if field.dtype == np.int32 else field.dtype,
                None if len(field.shape) == 1 else field.shape,
            )
            for name, field in self.fields.items()
            if name not in unused
        )

    @cached_property
    def padded(self) -> tuple[tuple[slice, int | None], ...]:
        """Slices of fields whose padding is not 0, with its int32; None is the first slot past the pool."""
        words = ((view.part, FIELDS[view.name].padding_word) for view in self.views)
        return tuple((part, word) for part, word in words if word != 0)


class StepPlan:
    """One step's buffer, with views by field name (`plan.token_ids`, `plan.kv_lens`, ...).

    A buffer belongs to one step and is never reused, because a CPU device reads it in place.

    Attributes:
      layout: shape of the bucket's plans.
      buffer: i32[layout.size].
      step_id: number of the plan, from 0; the runner asserts that none is skipped.
      tiles: views of the tile lists, in the order of `layout.tiles_lens`.
      adjustment: biases and penalties of the rows that sample; None if no row has any.
      prompt_rows: positions that score prompt tokens; None in most steps, so they are beside the buffer.
    """

    def __init__(self, layout: PlanLayout, step_id: int, padding_slot: int) -> None:
        """Start with a new buffer of padding only: no rows, no writes, no samples.

        Args:
          layout: shape of the bucket's plans.
          step_id: number of the plan.
          padding_slot: the first write slot past the pool, where writes are dropped.
        """
        self.layout = layout
        self.step_id = step_id
        self.prompt_rows: PromptRows | None = None
        self.adjustment: Adjustment | None = None
        self.buffer = buffer = np.zeros(layout.size, np.int32)
        for part, word in layout.padded:
            buffer[part] = padding_slot if word is None else word
        own = self.__dict__
        for name, part, dtype, shape in layout.views:
            view = buffer[part]
            if dtype is not None:
                view = view.view(dtype)
            own[name] = view if shape is None else view.reshape(shape)
        self.tiles: tuple[np.ndarray, ...] = tuple(own[name] for name in layout.tile_fields)

    if TYPE_CHECKING:  # the views, whose names are in a table

        def __getattr__(self, name: str) -> np.ndarray: ...
