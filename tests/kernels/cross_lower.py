"""Lowering for an NVIDIA GPU on a machine without one.

Catches what the kernel language refuses: shapes, dtypes, operations, ranks. What only the GPU's own compiler
knows (registers, shared memory) shows first on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax

_DEPRECATED = "The Pallas Triton backend is deprecated"


def lower_for_cuda(fn: Callable[..., Any], *args: Any, device_kind: str = "NVIDIA H200") -> str:
    """StableHLO of `fn` for `device_kind`; `args` are arrays or `jax.ShapeDtypeStruct`s, nothing is run."""
    device = jax.sharding.AbstractDevice(device_kind=device_kind, num_cores=None, platform="cuda")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_DEPRECATED, category=DeprecationWarning)
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
