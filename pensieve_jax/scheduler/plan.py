"""What one step is told and what it answers, as numpy: the packed plan, and the packed result.

Owns: the layout of the one int32 buffer that goes to the device each step, with a named view on every
part of it, so that one copy carries all of a step's metadata (a copy costs far more than its bytes).
Does not know: how a plan comes about (`planner`), or what a device does with it (`device.model_runner`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

NUM_FLAGS = 4
# Fields begin at multiples of 256 bytes: XLA hands a kernel a slice of the buffer as it lies, without a copy,
# and Mosaic GPU kernels refuse arguments that are not aligned so.
_ALIGNMENT = 64
FLAG_SAMPLES, FLAG_TRUNCATES, FLAG_LOGPROBS = range(3)


class Field(NamedTuple):
    """One part of the packed buffer: first element, shape, and how its 32 bits are read."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Elements of 32 bits."""
        return prod(self.shape)


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

    @cached_property
    def fields(self) -> dict[str, Field]:
        """Every part by name, in the order of the buffer."""
        tokens, rows, samples = (self.num_tokens,), (self.max_num_rows,), (self.max_num_samples,)
        i32, f32, u32 = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.uint32)
        shapes: list[tuple[str, tuple[int, ...], np.dtype]] = [
            ("token_ids", tokens, i32),
            ("prev_samples", tokens, i32),
            ("positions", tokens, i32),
            ("write_slots", tokens, i32),
            ("cu_q_lens", (self.max_num_rows + 1,), i32),
            ("kv_lens", rows, i32),
            ("page_indices", (self.max_num_rows, self.pages_per_row), i32),
            ("num_rows", (1,), i32),
            ("tiles", (self.tiles_len,), i32),
            ("num_samples", (1,), i32),
            ("sample_tokens", samples, i32),
            ("sample_positions", samples, i32),
            ("temperature", samples, f32),
            ("top_k", samples, i32),
            ("top_p", samples, f32),
            ("seed", (self.max_num_samples, 2), u32),
            ("banned_ids", (self.max_num_samples, self.max_num_banned), i32),
            ("flags", (NUM_FLAGS,), i32),
        ]
        fields, offset = {}, 0
        for name, shape, dtype in shapes:
            fields[name] = Field(offset, shape, dtype)
            offset += -(-prod(shape) // _ALIGNMENT) * _ALIGNMENT
        return fields

    @cached_property
    def size(self) -> int:
        """Elements of the whole buffer, 32 bits each."""
        last = list(self.fields.values())[-1]
        return last.offset + last.size


class StepPlan:
    """One step's buffer, and views on it by field name (`plan.token_ids`, `plan.kv_lens`, ...).

    A buffer belongs to one step and is never reused: a CPU device reads it in place.

    Attributes:
      layout: the bucket's shape.
      buffer: i32[layout.size].
      step_id: counts plans from 0; the runner asserts that none is skipped.
    """

    token_ids: np.ndarray  # i32[T]: padding 0
    prev_samples: np.ndarray  # i32[T]: row of the previous step's samples that holds the id, or -1
    positions: np.ndarray  # i32[T]
    write_slots: np.ndarray  # i32[T]: page * page_size + offset; padding is out of bounds and dropped
    cu_q_lens: np.ndarray  # i32[R + 1]
    kv_lens: np.ndarray  # i32[R]
    page_indices: np.ndarray  # i32[R, P]: padding 0, the dummy page
    num_rows: np.ndarray  # i32[1]
    tiles: np.ndarray  # i32[N]
    num_samples: np.ndarray  # i32[1]
    sample_tokens: np.ndarray  # i32[S]: index into the T tokens
    sample_positions: np.ndarray  # i32[S]: absolute position of the token to be sampled
    temperature: np.ndarray  # f32[S]: 0 is greedy
    top_k: np.ndarray  # i32[S]: 0 is off
    top_p: np.ndarray  # f32[S]: 1 is off
    seed: np.ndarray  # u32[S, 2]: 64 bits, low word first
    banned_ids: np.ndarray  # i32[S, B]: padding -1
    flags: np.ndarray  # i32[4]: see the FLAG_ constants

    def __init__(self, layout: PlanLayout, step_id: int) -> None:
        """Views on a new buffer of zeros."""
        self.layout = layout
        self.step_id = step_id
        self.buffer = np.zeros(layout.size, np.int32)
        for name, field in layout.fields.items():
            part = self.buffer[field.offset : field.offset + field.size]
            setattr(self, name, part.view(field.dtype).reshape(field.shape))


class StepResult(NamedTuple):
    """What a step sampled; rows in the plan's order.

    `top_ids` and `top_logprobs` are undefined unless the plan's FLAG_LOGPROBS was set.
    """

    token_ids: np.ndarray  # i32[S]
    logprobs: np.ndarray  # f32[S]: of the chosen ids, under the distribution before temperature
    top_ids: np.ndarray  # i32[S, K]: most likely first
    top_logprobs: np.ndarray  # f32[S, K]
