"""Model families in flax.nnx over a flat, ragged token batch: configs, models, attention, weights.

This package uses the kernels and knows nothing of engines, schedulers or caches. The names imported here are
public.
"""

from model_defs.attention import (
    FULL,
    Attention,
    AttentionOptions,
    DenseAttention,
    PagedAttention,
    RaggedBatch,
)
from model_defs.config import ExpertsConfig, LayerKind, ModelConfig, RopeConfig
from model_defs.errors import CheckpointError, ModelError, ShardingError, UnsupportedModelError
from model_defs.fingerprint import model_fingerprint, weights_digest
from model_defs.hf_config import load_config
from model_defs.loading import load_model, random_model, source_config, source_weights_dtype
from model_defs.orbax_store import save_parameters
from model_defs.registry import (
    PRESETS,
    Model,
    abstract_model,
    kv_bytes_per_token,
    num_active_parameters,
    num_layer_parameters,
    num_parameters,
    parameter_bytes,
    preset,
)
from model_defs.sharding import KV_PAGES_SPEC, TENSOR_AXIS, make_mesh

__all__ = [
    "FULL",
    "KV_PAGES_SPEC",
    "PRESETS",
    "TENSOR_AXIS",
    "Attention",
    "AttentionOptions",
    "CheckpointError",
    "DenseAttention",
    "ExpertsConfig",
    "LayerKind",
    "Model",
    "ModelConfig",
    "ModelError",
    "PagedAttention",
    "RaggedBatch",
    "RopeConfig",
    "ShardingError",
    "UnsupportedModelError",
    "abstract_model",
    "kv_bytes_per_token",
    "load_config",
    "load_model",
    "make_mesh",
    "model_fingerprint",
    "num_active_parameters",
    "num_layer_parameters",
    "num_parameters",
    "parameter_bytes",
    "preset",
    "random_model",
    "save_parameters",
    "source_config",
    "source_weights_dtype",
    "weights_digest",
]
