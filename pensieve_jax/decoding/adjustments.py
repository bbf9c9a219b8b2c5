"""How rows change their logits before a choice, as numpy arrays: biases, penalties, masks of allowed ids.

Owns: the layout of the arrays beside a step's plan, and the codes of ids that seed counts. They go to the
device in the steps that use them.
Does not know: requests, plans, or how logits are changed (`decoding.device.adjust`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pensieve_jax.core.sampling_params import MAX_BIASED_IDS, SamplingParams, penalty_columns

PENALTIES: Final = penalty_columns()
"""The sampling fields of penalties, by name; each is a word of a row."""
NUM_SEED_IDS: Final = 1024
"""Ids that one program adds to a row of counts."""
PADDING_CODE: Final = np.iinfo(np.int32).max
MAX_COUNT: Final = 2**16 - 1
"""Occurrences of an id in a reply beyond this number are not counted."""


@dataclass
class Adjustment:
    """What a step's rows change in their logits, apart from masks.

    Attributes:
      bias: i32[2, S, MAX_BIASED_IDS]: ids (padding -1) and the bits of the f32 biases; None if no row has
        any.
      counted: i32[2 + len(PENALTIES), S]: each row's slot of counts (-1 for none), the row of the previous
        step that sampled its last id (-1 if that id is counted), and the bits of its f32 penalties. None if
        no row has penalties.
      seeds: i32[2 + NUM_SEED_IDS] each, applied in order before the step's choice; see `seeds`.
    """

    bias: np.ndarray | None = None
    counted: np.ndarray | None = None
    seeds: list[np.ndarray] = field(default_factory=list)


def no_bias(num_rows: int) -> np.ndarray:
    """Return `Adjustment.bias` for rows without biases."""
    bias = np.zeros((2, num_rows, MAX_BIASED_IDS), np.int32)
    bias[0] = -1
    return bias


def not_counted(num_rows: int) -> np.ndarray:
    """Return `Adjustment.counted` for rows without penalties."""
    counted = np.full((2 + len(PENALTIES), num_rows), -1, np.int32)
    for row, column in zip(counted[2:], PENALTIES.values(), strict=True):
        row[:] = np.array(column.off, column.dtype).view(np.int32)
    return counted


def penalty_words(params: SamplingParams) -> np.ndarray:
    """Return the bits of a row's penalties, i32[len(PENALTIES)]."""
    values = [getattr(params, name) for name in PENALTIES]
    return np.array(values, np.float32).view(np.int32)


def bias_words(params: SamplingParams) -> np.ndarray:
    """Return a row's biases as i32[2, number of biases]."""
    ids = np.array(list(params.logit_bias), np.int32)
    biases = np.array(list(params.logit_bias.values()), np.float32)
    return np.stack([ids, biases.view(np.int32)])


def seeds(
    slot: int, context_ids: Sequence[int], reply_ids: Sequence[int], *, clears: bool
) -> list[np.ndarray]:
    """Return the inputs of the programs that add ids to a slot of counts.

    Each is the slot, whether its counts are cleared first, and codes of ids: `id` for an id of the reply,
    `-1 - id` for an id that the context has, and `PADDING_CODE`.

    Args:
      slot: row of the counts.
      context_ids: ids whose presence in the context is to be marked.
      reply_ids: ids of the reply, which are counted.
      clears: whether earlier counts of the slot are of another turn.
    """
    codes = np.concatenate([-1 - np.unique(np.array(context_ids, np.int32)), np.array(reply_ids, np.int32)])
    if not clears and not len(codes):
        return []
    found = []
    for start in range(0, max(len(codes), 1), NUM_SEED_IDS):
        words = np.full(2 + NUM_SEED_IDS, PADDING_CODE, np.int32)
        words[:2] = slot, clears and start == 0
        part = codes[start : start + NUM_SEED_IDS]
        words[2 : 2 + len(part)] = part
        found.append(words)
    return found
