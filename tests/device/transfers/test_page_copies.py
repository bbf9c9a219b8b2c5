"""The compiled copies of a sharded pool, lowered for an absent GPU."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from model_defs import KV_PAGES_SPEC
from pensieve_jax.device.transfers import page_copies


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_copies_lower_for_cuda(num_devices, packed):
    """Each device copies its own heads; nothing is sent between them."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    mesh = AbstractMesh(
        (num_devices,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device
    )
    sharding = NamedSharding(mesh, KV_PAGES_SPEC)
    pools = [jax.ShapeDtypeStruct((3000, 32, 20, 128), jnp.bfloat16, sharding=sharding)] * 3
    chunk = ((3, 49, 20, 128), jnp.uint8) if packed else ((3, 32, 20, 128), jnp.bfloat16)
    chunks = [jax.ShapeDtypeStruct(*chunk, sharding=sharding)] * 16
    pages = jax.ShapeDtypeStruct((16,), np.int32)
    statics = {"mesh": mesh, "backend": "pallas_triton", "packed": packed}
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*Triton backend is deprecated", category=DeprecationWarning
        )
        for traced in (
            page_copies._gather.trace(pools, pages, **statics),
            page_copies._scatter.trace(pools, chunks, pages, **statics),
        ):
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            assert "xla.gpu.triton" in text
            assert f"32x{20 // num_devices}x128" in text
            assert "all_gather" not in text and "all_reduce" not in text
