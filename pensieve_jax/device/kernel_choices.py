"""The implementation of each kernel that a runner's programs call, and the reason for it.

Owns: the refusal of a selected back end that cannot serve the model on these devices, and the texts of the
reasons.
Does not know: what a kernel computes, or how the kernel packages choose; it asks them as traced programs do.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from model_defs.config import ModelConfig
from pallas_kernels import (
    all_reduce,
    byte_matmul,
    decode_matmul,
    grouped_matmul,
    page_copies,
    residual_norms,
    sampling_cutoffs,
)
from pallas_kernels.devices import triton_device_limit
from pallas_kernels.ragged_paged_attention import (
    AttentionArgumentError,
    AttentionHeads,
    BackendChoice,
    choose_backend,
    device_limit,
    page_shape,
)
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.errors import ConfigError

_BACKEND_FIELD = "runner.attention_backend"
_SUM_FIELD = "runner.all_reduce"


class KernelChoices(NamedTuple):
    """The chosen back end of each kernel in a step and in copies between the tiers."""

    attention: BackendChoice
    residual_norm: BackendChoice
    decode_matmul: BackendChoice  # XLA serves the projections that this back end does not
    experts: BackendChoice | None  # None for a model without experts
    all_reduce: BackendChoice | None  # None for one device; XLA serves the sums that this back end does not
    sampling_cutoff: BackendChoice
    page_copy: BackendChoice | None  # None without a host tier


def choose_kernels(
    model: ModelConfig,
    config: EngineConfig,
    dtype: np.dtype,
    mesh: Mesh,
    *,
    weights_dtype: str | None = None,
) -> KernelChoices:
    """Return the choices for a model on one mesh.

    Args:
      model: the model.
      config: the configuration of the engine.
      dtype: dtype of the computation.
      mesh: the devices that share the model.
      weights_dtype: format in 8 bits in which layers keep their weights; None is `dtype`.

    Raises:
      ConfigError: a selected back end does not run on the mesh's devices, or does not serve this model.
    """
    device, num_shards = mesh.devices.flat[0], mesh.devices.size
    cache = config.cache
    page = page_shape(cache.kv_dtype, cache.chunk_tokens, model.num_kv_heads // num_shards, model.head_dim)
    norm = residual_norms.choose_backend(model.hidden_size, device)
    cutoff = sampling_cutoffs.choose_backend(device)
    copy = page_copies.choose_backend(page, device)
    sums = _sum_choice(model, config, dtype, list(mesh.devices.flat)) if num_shards > 1 else None
    return KernelChoices(
        attention=attention_choice(model, config, dtype, device, num_shards),
        residual_norm=_explained(norm, f"rows of {model.hidden_size} elements", device),
        decode_matmul=_matmul_choice(model, config, dtype, device, num_shards, sums, weights_dtype),
        experts=_expert_choice(model, config, dtype, device, num_shards),
        all_reduce=sums,
        sampling_cutoff=_explained(cutoff, "scores of any vocabulary", device),
        page_copy=_explained(copy, f"pages of {page}", device) if cache.num_cpu_pages else None,
    )


def attention_choice(
    model: ModelConfig, config: EngineConfig, dtype: np.dtype, device: jax.Device, num_shards: int
) -> BackendChoice:
    """Return the attention back end for the heads of one of `num_shards` shards; see `choose_kernels`."""
    backend = config.runner.attention_backend
    if (limit := device_limit(backend, device)) is not None:
        raise ConfigError(_BACKEND_FIELD, backend, "'auto' or 'xla' on this device", limit)
    try:
        heads = AttentionHeads(
            model.num_heads // num_shards,
            model.num_kv_heads // num_shards,
            model.head_dim,
            dtype,
            config.cache.kv_dtype,
            window=model.windows[-1],  # a back end that supports a window supports any
            softcap=model.attention_softcap,
            has_sinks=model.has_sinks,
        )
        return choose_backend(backend, heads, device, named_in=_BACKEND_FIELD)
    except AttentionArgumentError as error:
        raise ConfigError(_BACKEND_FIELD, backend, "'auto' or 'xla' for this model", str(error)) from error


def _matmul_choice(
    model: ModelConfig,
    config: EngineConfig,
    dtype: np.dtype,
    device: jax.Device,
    num_shards: int,
    sums: BackendChoice | None,
    weights_dtype: str | None,
) -> BackendChoice:
    """Return the back end that multiplies small batches with weights, where it serves the projection."""
    if config.runner.decode_matmul == "xla":
        return BackendChoice("xla", "named in runner.decode_matmul")
    limit = decode_matmul.device_limit(device)
    has_own_sums = num_shards == 1 or (sums is not None and sums.name != "xla")
    if dtype != np.dtype("bfloat16"):
        limit = f"pallas_mosaic_gpu multiplies bfloat16, not {dtype}"
    elif limit is None and not _has_served_projection(
        model, dtype, num_shards, has_own_sums, in_8_bits=weights_dtype is not None
    ):
        limit = (
            "pallas_mosaic_gpu serves none of this model's projections: their sizes do not fit, or they have "
            "a bias after the compiler's sum over devices"
        )
    if limit is not None:
        return BackendChoice("xla", limit)
    weights = "" if weights_dtype is None else f" with weights in {weights_dtype}"
    few = f"up to {decode_matmul.MAX_ROWS} rows of {dtype}{weights} on {device.device_kind}"
    return BackendChoice("pallas_mosaic_gpu", f"the fastest that serves {few}")


def _expert_choice(
    model: ModelConfig, config: EngineConfig, dtype: np.dtype, device: jax.Device, num_shards: int
) -> BackendChoice | None:
    """Return the back end of a mixture of experts; each device has a part of every expert."""
    if model.experts is None:
        return None
    if config.runner.expert_matmul == "xla":
        return BackendChoice("xla", "named in runner.expert_matmul")
    width = model.experts.width // num_shards
    limit = grouped_matmul.device_limit(device)
    if limit is None:
        limit = grouped_matmul.shape_limit(model.hidden_size, width, dtype)
    if limit is not None:
        return BackendChoice("xla", limit)
    what = f"experts of width {width} of {dtype} on {device.device_kind}"
    return BackendChoice("pallas_mosaic_gpu", f"the fastest that serves {what}")


def _sum_choice(
    model: ModelConfig, config: EngineConfig, dtype: np.dtype, devices: list[jax.Device]
) -> BackendChoice:
    """Return the back end of sums over devices, where it serves the sum."""
    asked = config.runner.all_reduce
    if asked == "xla":
        return BackendChoice("xla", f"named in {_SUM_FIELD}")
    limit = all_reduce.devices_limit(devices)
    if limit is None and not all_reduce.supports(1, model.hidden_size, dtype, len(devices)):
        limit = (
            f"jax_triton adds up rows of a multiple of 8 elements, of at most {all_reduce.MAX_ROW_BYTES} "
            f"bytes, on at most {all_reduce.MAX_DEVICES} devices"
        )
    if limit is None:
        return BackendChoice(
            "jax_triton", f"the fastest that serves {len(devices)} devices of {devices[0].device_kind}"
        )
    if asked != "auto":
        raise ConfigError(_SUM_FIELD, asked, "'auto' or 'xla' here", limit)
    return BackendChoice("xla", limit)


def _has_served_projection(
    model: ModelConfig, dtype: np.dtype, num_shards: int, has_own_sums: bool, *, in_8_bits: bool
) -> bool:
    """Return whether the kernel serves a device's part of any weight of a layer, in the smallest step.

    The kernel does not serve a bias after the compiler's sum over devices. With a bias, a gated product is
    computed as a plain one.
    """
    hidden, wide = model.hidden_size, model.intermediate_size // num_shards
    heads = model.num_heads // num_shards * model.head_dim
    kv_heads = 2 * model.num_kv_heads // num_shards * model.head_dim
    gated = model.is_gated and not model.mlp_bias
    up = (hidden, wide, True) if gated else (hidden, (1 + model.is_gated) * wide, False)
    found = [(hidden, heads + kv_heads, False)]
    if any(kind.mlp == "dense" for kind in model.kinds):
        found.append(up)
        if has_own_sums or not model.mlp_bias:
            found.append((wide, hidden, False))
    if has_own_sums or not model.attention_bias:
        found.append((heads, hidden, False))
    kernels = byte_matmul if in_8_bits else decode_matmul
    return any(kernels.supports(1, depth, width, gated=gated, dtype=dtype) for depth, width, gated in found)


def _explained(name: str, supported: str, device: jax.Device) -> BackendChoice:
    """Return the choice between the Triton kernel and XLA with its reason."""
    if name != "xla":
        return BackendChoice(name, f"the fastest that serves {supported} on {device.device_kind}")
    limit = triton_device_limit(device)
    return BackendChoice(name, f"pallas_triton does not serve {supported}" if limit is None else limit)
