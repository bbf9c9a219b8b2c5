"""A residual addition and the norm after it, as one kernel on NVIDIA GPUs."""

from pallas_kernels.residual_norms.api import BACKENDS, NormArgumentError, add_and_norm, choose_backend
from pallas_kernels.residual_norms.specs import KINDS, NormKind, RowBlock

__all__ = [
    "BACKENDS",
    "KINDS",
    "NormArgumentError",
    "NormKind",
    "RowBlock",
    "add_and_norm",
    "choose_backend",
]
