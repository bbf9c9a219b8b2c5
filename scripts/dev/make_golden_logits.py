"""Make tests/models/golden: tiny checkpoints of every family, with logits computed by transformers.

The script needs torch and transformers, which the project does not. Run it in a separate environment:

    python -m venv /tmp/golden && /tmp/golden/bin/pip install torch transformers absl-py
    /tmp/golden/bin/python scripts/dev/make_golden_logits.py --variants=qwen3_gqa --variants=qwen3_bias

Without `--variants` it makes all variants again. Files differ if transformers or torch have changed.
Each variant is a Hugging Face directory plus logits.npz (input_ids i64[T], logits f32[T, vocab_size]),
computed in float32 from the weights as saved. The live comparison test also builds its models with this
script.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from absl import app, flags

FLAGS = flags.FLAGS
NUM_TOKENS = 40


@dataclasses.dataclass(frozen=True)
class Variant:
    """Tiny model: its `model_type`, its options besides the common ones, and how it is saved."""

    model_type: str
    options: dict[str, Any]
    save_dtype: str = "bfloat16"
    max_shard_size: str = "1GB"


_COMMON = {
    "vocab_size": 64,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 48,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 1,
}
_ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_ROPE_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 12,
}
_GQA = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 24}
_QWEN2 = {
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_QWEN3 = _QWEN2 | {"head_dim": 16}
_MISTRAL = {"num_key_value_heads": 2, "intermediate_size": 40, "rms_norm_eps": 1e-5}

VARIANTS: dict[str, Variant] = {
    "opt_pre_norm": Variant("opt", {"ffn_dim": 40}),
    "opt_post_norm": Variant(
        "opt",
        {
            "ffn_dim": 40,
            "do_layer_norm_before": False,
            "word_embed_proj_dim": 16,
            "activation_function": "gelu",
        },
    ),
    "llama_default": Variant("llama", {"intermediate_size": 40}, save_dtype="float16"),
    "llama_gqa_linear": Variant(
        "llama",
        _GQA
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
        },
        max_shard_size="15KB",
    ),
    "llama3_tied": Variant("llama", _GQA | {"tie_word_embeddings": True, "rope_parameters": _ROPE_LLAMA3}),
    "llama_yarn": Variant("llama", _GQA | {"rope_parameters": _ROPE_YARN}),
    "qwen2_tied": Variant("qwen2", _QWEN2 | {"tie_word_embeddings": True}),
    "qwen2_untied": Variant("qwen2", _QWEN2 | {"rope_parameters": _ROPE_YARN}, max_shard_size="15KB"),
    "qwen3_gqa": Variant("qwen3", _QWEN3),
    "qwen3_bias": Variant("qwen3", _QWEN3 | {"attention_bias": True, "tie_word_embeddings": True}),
    "mistral_gqa": Variant("mistral", _MISTRAL | {"sliding_window": None}),
    "mistral_window": Variant("mistral", _MISTRAL | {"head_dim": 8, "sliding_window": 48}, "float16"),
    "mistral_short_window": Variant("mistral", _MISTRAL | {"sliding_window": 11}),
    "qwen2_late_window": Variant(
        "qwen2", _QWEN2 | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    ),
    "qwen3_early_window": Variant(
        "qwen3",
        _QWEN3
        | {
            "use_sliding_window": True,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
"""Variants by name. The seed depends on the index in this table, so append new ones at the end."""


def build(variant: Variant, seed: int) -> Any:
    """Build the transformers model of `variant` with seeded weights, in float32, for inference."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(variant.model_type, **(_COMMON | variant.options))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = name.endswith("weight") and parameter.ndim == 1
            parameter.copy_(1.0 + 0.2 * noise if is_scale else 0.3 * noise)
            # Saved weights are rounded, and logits must be those of the rounded weights.
            parameter.copy_(parameter.to(getattr(torch, variant.save_dtype)).float())
    return model.eval()


def logits_of(model: Any, input_ids: Any) -> Any:
    """Return logits f32[T, vocab_size] of one sequence of ids, as NumPy."""
    import torch

    with torch.no_grad():
        return model(torch.as_tensor(input_ids)[None]).logits[0].float().numpy()


def save(model: Any, variant: Variant, directory: Path) -> None:
    """Write the model as a Hugging Face directory in the variant's dtype."""
    import torch

    model.to(getattr(torch, variant.save_dtype)).save_pretrained(
        directory, max_shard_size=variant.max_shard_size
    )
    for path in directory.iterdir():
        path.chmod(0o644)


def main(argv: list[str]) -> None:
    del argv
    import numpy as np

    root = Path(FLAGS.output)
    for index, (name, variant) in enumerate(VARIANTS.items()):
        if FLAGS.variants and name not in FLAGS.variants:
            continue
        directory = root / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        model = build(variant, FLAGS.seed + index)
        input_ids = np.random.default_rng(FLAGS.seed + index).integers(0, 64, NUM_TOKENS)
        logits = logits_of(model, input_ids)
        np.savez_compressed(directory / "logits.npz", input_ids=input_ids, logits=logits)
        save(model, variant, directory)
        print(f"{name}: {sum(path.stat().st_size for path in directory.iterdir())} bytes")


if __name__ == "__main__":
    flags.DEFINE_string("output", "tests/models/golden", "Directory to write the variants into.")
    flags.DEFINE_multi_enum("variants", [], list(VARIANTS), "Variants to make; default: all.")
    flags.DEFINE_integer("seed", 20240501, "Seed of weights and input ids.")
    app.run(main)
