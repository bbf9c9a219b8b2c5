"""How the rows of a batch are sampled, as numpy arrays: the device's input and output.

Owns: the packing of sampling parameters and a seed, the rule for which rows need the sampler's cuts, and the
arrays of a result.
Does not know: plans, requests, or how tokens are chosen (`decoding.device.sampler`).
"""

from __future__ import annotations

import functools
import struct
from typing import Any, Final, NamedTuple, overload

import numpy as np

from pensieve_jax.core.sampling_params import SamplingParams, plan_columns
from pensieve_jax.decoding.prompt_rows import PromptScores

COLUMNS: Final = plan_columns()
"""The sampling fields that a device reads, by name; each is one word of a row."""
# A request's sampling fields in the order of `SamplingRows`, whether it wants log-probabilities, and whether
# its steps need an `Adjustment`.
SAMPLING: Final = np.dtype(
    [
        *((name, column.dtype) for name, column in COLUMNS.items()),
        ("seed", "<u4", (2,)),
        ("logprobs", "<i4"),
        ("adjusts", "<i4"),
    ]
)
# The same as a format of `struct`, which packs a record in half of numpy's time; the seed is one number.
_RECORD: Final = struct.Struct(
    "<" + "".join({"<f4": "f", "<i4": "i"}[column.dtype] for column in COLUMNS.values()) + "Qii"
)
SAMPLING_WORDS: Final = (*COLUMNS, "seed_low", "seed_high")
"""The 32-bit words at the beginning of a `SAMPLING` record: all but the last two."""


class SamplingRows[A](NamedTuple):
    """How each row is sampled. A is the array type, of jax or numpy.

    The first fields are those of `COLUMNS`, in their order.
    """

    temperature: A  # f32[S]: 0 is greedy
    top_k: A  # i32[S]: 0 is off
    top_p: A  # f32[S]: 1 is off
    min_p: A  # f32[S]: 0 is off
    seed: A  # u32[S, 2]: 64 bits, low word first
    sample_positions: A  # i32[S]: absolute position of the token to be sampled
    banned_ids: A  # i32[S, B]: never sampled; padding -1


class SamplerMode(NamedTuple):
    """What a batch needs beyond greedy choice; static, so that a batch only computes what some row needs.

    These are not traced conditions, because a conditional on a GPU can make the host wait until the device
    reaches it, and a dispatch must never wait. The mode does not change the result of a row.

    Attributes:
      draws: some row has a temperature above 0.
      truncates: some row has top-k or top-p.
      top_logprobs: some row wants the most likely ids.
    """

    draws: bool = False
    truncates: bool = False
    top_logprobs: bool = False


class StepResult(NamedTuple):
    """The samples of a step, row by row.

    K is 0 unless the mode had `top_logprobs`.
    """

    token_ids: np.ndarray  # i32[S]
    # f32[S]: of the chosen ids, under the distribution before temperature; not finite if the row's logits
    # define no distribution, so that its id means nothing
    logprobs: np.ndarray
    top_ids: np.ndarray  # i32[S, K]: most likely first
    top_logprobs: np.ndarray  # f32[S, K]
    prompt: PromptScores | None = None  # of the plan's `prompt_rows`


def pack_sampling(params: SamplingParams, seed: int) -> bytes:
    """Return a `SAMPLING` record. It is made once per request; a step joins the records of its rows."""
    columns = [getattr(params, name) for name in COLUMNS]
    adjusts = params.has_penalties or bool(params.logit_bias)
    return _RECORD.pack(*columns, seed, bool(params.logprobs), adjusts)


def sampling_words(params: SamplingParams, seed: int) -> np.ndarray:
    """Return the `SAMPLING_WORDS` of a record as i32[len(SAMPLING_WORDS)], with the same bits."""
    return np.frombuffer(pack_sampling(params, seed), np.int32)[: len(SAMPLING_WORDS)]


@overload
def truncates(sampling: SamplingParams) -> bool: ...


@overload
def truncates(sampling: np.ndarray) -> np.ndarray: ...


def truncates(sampling: Any) -> Any:
    """Return whether a row needs the sampler's cuts. Greedy rows do not use top-k or top-p.

    `sampling` holds the parameters of one row, or `SAMPLING` records, one for each row.
    """
    read = sampling.__getitem__ if isinstance(sampling, np.ndarray) else functools.partial(getattr, sampling)
    temperature, top_k, top_p = map(read, ("temperature", "top_k", "top_p"))
    return (temperature > 0) & ((top_k > 0) | (top_p < 1))
