"""Weights of the same function whose keys and values have other magnitudes in some channels.

Owns: channel factors, their places in the weights, outliers planted with them, and factors that remove
outliers.
Does not know: formats or figures.
Called by `kv_quality.outliers` and the program.

A channel of K may be multiplied by f if the same channel of the query heads that read it is divided by f.
Rotary positions mix channels i and i + head_dim / 2, so both share one factor. A channel of V may be
multiplied by f if its rows of the output projection are divided by f. With powers of two all of this is exact
in floating point. If a norm follows the projections (Qwen3), its scale takes the factors, and KV heads share
them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model_defs.registry import Model
from pensieve_jax.decoding.device.structure import ModelStructure
from pensieve_lab.kv_quality.formats import EXACT, StoredAttention


class Factors(NamedTuple):
    """Factors for the channels of K and of V, f32[num_layers, num_kv_heads, head_dim] each."""

    keys: np.ndarray
    values: np.ndarray

    @classmethod
    def ones(cls, model: Model) -> Self:
        """Return factors that change nothing."""
        config = model.config
        shape = config.num_layers, config.num_kv_heads, config.head_dim
        return cls(np.ones(shape, np.float32), np.ones(shape, np.float32))


class Magnitudes(NamedTuple):
    """The largest magnitude of each channel over some texts, f32[num_layers, num_kv_heads, head_dim]."""

    keys: np.ndarray
    values: np.ndarray

    def outliers(self) -> dict[str, float]:
        """Return a head's largest channel over its median, for K and V, of the median and the worst head."""
        found: dict[str, float] = {}
        for name, largest in self._asdict().items():
            ratios = largest.max(axis=-1) / np.maximum(np.median(largest, axis=-1), 1e-30)
            found |= {
                f"{name}_median_head": float(np.median(ratios)),
                f"{name}_worst_head": float(ratios.max()),
            }
        return found


def planted(model: Model, part: str, scale: float, seed: int) -> Factors:
    """Return `scale` for one channel per head of V ("values"), or one rotary pair of K ("keys"), else 1."""
    random, factors = np.random.default_rng(seed), Factors.ones(model)
    num_layers, num_kv_heads, head_dim = factors.keys.shape
    channels = random.integers(head_dim // 2, size=(num_layers, num_kv_heads))
    if part == "keys" and _has_head_norms(model):
        channels[:] = channels[:, :1]
    layers, heads = np.indices(channels.shape)
    array = factors.keys if part == "keys" else factors.values
    array[layers, heads, channels] = scale
    if part == "keys":
        array[layers, heads, channels + head_dim // 2] = scale
    return factors


def balancing(model: Model, largest: Magnitudes) -> Factors:
    """Return powers of two that bring the largest number of each channel, or rotary pair, near one."""
    first, second = np.split(largest.keys, 2, axis=-1)
    pairs = np.maximum(first, second)
    if _has_head_norms(model):
        pairs = np.broadcast_to(pairs.max(axis=1, keepdims=True), pairs.shape)
    return Factors(_inverse(np.concatenate([pairs, pairs], axis=-1)), _inverse(largest.values))


def with_factors(model: Model, factors: Factors) -> Model:
    """Return a model of the same function; it shares all unchanged arrays."""
    changed: Any = nnx.clone(model)  # separate variables, which share arrays until they are set
    group = model.config.group_size
    for layer, keys, values in zip(changed.layers, factors.keys, factors.values, strict=True):
        ones = np.ones_like(keys)
        if _has_head_norms(model):
            _multiply(layer.k_norm.scale, keys[0])
            _multiply(layer.q_norm.scale, 1 / keys[0])
            parts = [*[ones] * group, ones, values]
        else:
            parts = [*[1 / keys] * group, keys, values]
        fused = np.stack(parts, axis=1)  # [num_kv_heads, group_size + 2, head_dim]
        _multiply(layer.qkv.proj.kernel, fused)
        if layer.qkv.proj.bias is not None:
            _multiply(layer.qkv.proj.bias, fused)
        _multiply(layer.out.kernel, 1 / np.repeat(values, group, axis=0)[..., None])
    return changed


def magnitudes(model: Model, texts: Sequence[np.ndarray]) -> Magnitudes:
    """Return the magnitudes of values and of keys, which are rotated as when stored."""
    structure, leaves = ModelStructure.split(model)
    found = [_largest(leaves, ids, structure=structure) for ids in texts]
    keys, values = (np.max(np.stack([np.asarray(one[i]) for one in found]), axis=0) for i in range(2))
    return Magnitudes(keys, values)


@functools.partial(jax.jit, static_argnames=("structure",))
def _largest(
    leaves: list[jax.Array], token_ids: jax.Array, *, structure: ModelStructure
) -> tuple[jax.Array, jax.Array]:
    attention = StoredAttention(EXACT)
    structure.merge(leaves)(token_ids, jnp.arange(token_ids.shape[0], dtype=jnp.int32), attention)
    keys, values = (jnp.abs(jnp.stack(part)).max(axis=1) for part in (attention.keys, attention.values))
    return keys, values


def _has_head_norms(model: Any) -> bool:
    return hasattr(model.layers[0], "k_norm")


def _inverse(largest: np.ndarray) -> np.ndarray:
    return np.exp2(-np.round(np.log2(np.maximum(largest, np.finfo(np.float32).tiny)))).astype(np.float32)


def _multiply(parameter: Any, factors: np.ndarray) -> None:
    parameter.set_value(parameter[...] * factors)
