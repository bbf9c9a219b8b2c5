"""The rows of a step whose hidden states score prompt tokens, and their scores, as numpy arrays.

Owns: the form in which a plan names positions to score, and the form in which a runner returns the scores.
Does not know: requests, or how scores are computed (`decoding.device.prompt_scores`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

MAX_SCORED_ROWS: Final = 128
"""The most positions whose logits exist at once. More are scored in several runs of one program."""


class PromptRows(NamedTuple):
    """Positions of a step to score; each predicts the prompt token after it."""

    tokens: np.ndarray  # i32[N]: index into the step's tokens
    targets: np.ndarray  # i32[N]: id of the next token


class PromptScores(NamedTuple):
    """The scores of `PromptRows`, row by row, under the distribution before temperature."""

    logprobs: np.ndarray  # f32[N]: of the targets; not finite if the row's logits define no distribution
    ranks: np.ndarray  # i32[N]: place of the target by logit, from 1; the lower id comes first on ties
    top_ids: np.ndarray  # i32[N, K]: most likely first, lowest id first on ties
    top_logprobs: np.ndarray  # f32[N, K]
