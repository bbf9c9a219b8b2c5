"""The least score that top-k and top-p leave of each row, found by exact sums and without a sort."""

from pallas_kernels.sampling_cutoffs.api import (
    MASS_BITS,
    MAX_VOCAB_SIZE,
    CutoffArgumentError,
    choose_backend,
    cutoffs,
)

__all__ = ["MASS_BITS", "MAX_VOCAB_SIZE", "CutoffArgumentError", "choose_backend", "cutoffs"]
