"""Residual addition and the norm after it, as one kernel on NVIDIA GPUs."""

from pallas_kernels.residual_norms.api import BACKENDS, NormArgumentError, add_and_norm, choose_backend
from pallas_kernels.residual_norms.specs import KINDS, NormKind, NormSpec, RowBlock

__all__ = [
    "BACKENDS",
    "KINDS",
    "NormArgumentError",
    "NormKind",
    "NormSpec",
    "RowBlock",
    "add_and_norm",
    "choose_backend",
]
