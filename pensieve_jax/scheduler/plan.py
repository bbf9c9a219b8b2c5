"""What one step is told, as numpy: the packed plan.

Owns: the one table of a plan's fields, in the body of `StepPlan` but for the columns of sampling fields
(`core.sampling_params`), and so the layout of the one int32 buffer that goes to the device each step. Every
part of it has a named view, and one copy carries all of a step's metadata: a copy costs more than its bytes.
Does not know: how a plan comes about (`planner`), or what a device does with it (`device.model_runner`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Self, overload

import numpy as np

from pensieve_jax.decoding.sampling_rows import COLUMNS

NUM_FLAGS = 4
# Fields begin at multiples of 256 bytes: XLA hands a kernel a slice of the buffer as it lies, without a copy,
# and Mosaic GPU kernels refuse arguments that are not aligned so.
_ALIGNMENT = 64
FLAG_SAMPLES, FLAG_TRUNCATES, FLAG_LOGPROBS = range(3)


class PackedField(NamedTuple):
    """One part of the packed buffer: first element, shape, and how its 32 bits are read."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Elements of 32 bits."""
        return prod(self.shape)


class PlanField:
    """A row of the table of fields, under its name in the class `StepPlan`; a plan has its view there.

    Attributes:
      sizes: of each dimension: a number, or what `PlanLayout.sizes` calls it.
      dtype: of 32 bits.
      padding: what elements hold that a plan has no use for; None: the first slot past the pool, which only
        whoever makes plans knows.
    """

    def __init__(
        self, *sizes: int | str, dtype: type[np.generic] = np.int32, padding: float | None = 0
    ) -> None:
        self.sizes, self.dtype, self.padding = sizes, np.dtype(dtype), padding

    @overload
    def __get__(self, plan: None, owner: type) -> Self: ...

    @overload
    def __get__(self, plan: object, owner: type) -> np.ndarray: ...

    def __get__(self, plan: object, owner: type) -> Any:
        """The row: a plan's own attributes go before those of its class, so Python asks for no view here."""
        return self

    @property
    def padding_word(self) -> int | None:
        """The padding's 32 bits, as the buffer's dtype reads them; None as `padding`."""
        return None if self.padding is None else int(np.array(self.padding, self.dtype).view(np.int32))


class _View(NamedTuple):
    """How the view of one field is made; None where the words need not be read in another way."""

    name: str
    part: slice
    dtype: np.dtype | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class PlanLayout:
    """The shape of a bucket's plans; hashable, so that it keys a compiled executable.

    Attributes:
      num_tokens: T, padded query tokens; the bucket.
      max_num_rows: R, sub-requests.
      pages_per_row: P, pages of the longest context.
      max_num_samples: S, requests that can sample in this step.
      max_num_banned: B, ids that a row may be kept from sampling.
      tiles_len: N, length of the attention kernel's tile list.
    """

    num_tokens: int
    max_num_rows: int
    pages_per_row: int
    max_num_samples: int
    max_num_banned: int
    tiles_len: int

    @property
    def sizes(self) -> dict[str, int]:
        """What the letters in the table of fields stand for."""
        return {
            "T": self.num_tokens,
            "R": self.max_num_rows,
            "R + 1": self.max_num_rows + 1,
            "P": self.pages_per_row,
            "S": self.max_num_samples,
            "B": self.max_num_banned,
            "N": self.tiles_len,
        }

    @cached_property
    def fields(self) -> dict[str, PackedField]:
        """Every part by name, in the order of the buffer."""
        fields, offset, sizes = {}, 0, self.sizes
        for name, row in StepPlan.rows().items():
            shape = tuple(sizes[size] if isinstance(size, str) else size for size in row.sizes)
            fields[name] = PackedField(offset, shape, row.dtype)
            offset += -(-prod(shape) // _ALIGNMENT) * _ALIGNMENT
        return fields

    @cached_property
    def size(self) -> int:
        """Elements of the whole buffer, 32 bits each."""
        last = list(self.fields.values())[-1]
        return last.offset + last.size

    @cached_property
    def views(self) -> tuple[_View, ...]:
        """How a plan's views are made, worked out once, since a plan is made every step."""
        return tuple(
            _View(
                name,
                slice(field.offset, field.offset + field.size),
                None if field.dtype == np.int32 else field.dtype,
                None if len(field.shape) == 1 else field.shape,
            )
            for name, field in self.fields.items()
        )

    @cached_property
    def padded(self) -> tuple[tuple[slice, int | None], ...]:
        """Where fields lie whose padding is not 0, and its 32 bits; None is the first slot past the pool."""
        rows = StepPlan.rows()
        words = ((view.part, rows[view.name].padding_word) for view in self.views)
        return tuple((part, word) for part, word in words if word != 0)


class StepPlan:
    """One step's buffer, and views on it by field name (`plan.token_ids`, `plan.kv_lens`, ...).

    A buffer belongs to one step and is never reused: a CPU device reads it in place.

    Attributes:
      layout: the bucket's shape.
      buffer: i32[layout.size].
      step_id: counts plans from 0; the runner asserts that none is skipped.
    """

    token_ids = PlanField("T")
    prev_samples = PlanField("T", padding=-1)  # row of the previous step's samples that holds the id, or -1
    positions = PlanField("T")
    write_slots = PlanField("T", padding=None)  # page * page_size + offset; out of bounds is dropped
    cu_q_lens = PlanField("R + 1")  # from the last row on: the number of tokens
    kv_lens = PlanField("R")
    page_indices = PlanField("R", "P")  # page 0 is the dummy
    num_rows = PlanField(1)
    tiles = PlanField("N")  # the kernel's list builder fills all that the kernel reads
    num_samples = PlanField(1)
    sample_tokens = PlanField("S")  # index into the T tokens
    sample_positions = PlanField("S")  # absolute position of the token to be sampled
    # Here stand the columns of the table of sampling fields: `temperature`, `top_k`, `top_p`, each of "S".
    seed = PlanField("S", 2, dtype=np.uint32)  # 64 bits, low word first
    banned_ids = PlanField("S", "B", padding=-1)
    flags = PlanField(NUM_FLAGS)  # see the FLAG_ constants

    def __init__(self, layout: PlanLayout, step_id: int, padding_slot: int) -> None:
        """A plan of no rows, which writes and samples nothing: a new buffer, all of it padding.

        Args:
          layout: the bucket's shape.
          step_id: its number.
          padding_slot: the first write slot past the pool, where writes are dropped.
        """
        self.layout = layout
        self.step_id = step_id
        self.buffer = buffer = np.zeros(layout.size, np.int32)
        for part, word in layout.padded:
            buffer[part] = padding_slot if word is None else word
        own = self.__dict__
        for name, part, dtype, shape in layout.views:
            view = buffer[part]
            if dtype is not None:
                view = view.view(dtype)
            own[name] = view if shape is None else view.reshape(shape)

    if TYPE_CHECKING:  # columns are attributes as the fields above are

        def __getattr__(self, name: str) -> np.ndarray: ...

    @classmethod
    @functools.cache
    def rows(cls) -> dict[str, PlanField]:
        """The table: every field by name, in the order of the buffer, columns before `seed`."""
        declared = {name: row for name, row in vars(cls).items() if isinstance(row, PlanField)}
        columns = {
            name: PlanField("S", dtype=np.dtype(column.dtype).type, padding=column.off)
            for name, column in COLUMNS.items()
        }
        found: dict[str, PlanField] = {}
        for name, row in declared.items():
            if name == "seed":
                found |= columns
            found[name] = row
        return found
