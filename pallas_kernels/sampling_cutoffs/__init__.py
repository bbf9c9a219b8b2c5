"""Top-k and top-p cutoffs: the least score of each row that both keep, found by exact sums without a sort."""

from pallas_kernels.sampling_cutoffs.api import (
    MASS_BITS,
    MAX_VOCAB_SIZE,
    CutoffArgumentError,
    choose_backend,
    cutoffs,
)

__all__ = ["MASS_BITS", "MAX_VOCAB_SIZE", "CutoffArgumentError", "choose_backend", "cutoffs"]
