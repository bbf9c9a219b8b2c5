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
    """Tiny model: its `model_type`, its options besides the common ones, how it is saved, and its seed.

    With `vision`, the model is multimodal, and the other options are those of its text half.
    """

    model_type: str
    options: dict[str, Any]
    save_dtype: str = "bfloat16"
    max_shard_size: str = "1GB"
    vision: dict[str, Any] | None = None
    seed: int | None = None  # None means the index in the table


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
_OLMO2 = {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40}
_COHERE2 = {
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "sliding_window": 12,
    "layer_types": None,
    "logit_scale": 0.5,
    "hidden_size": 32,
}
_GEMMA = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "sliding_window": 12,
    "query_pre_attn_scalar": 10,
    "tie_word_embeddings": True,
}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "image_size": 32,
    "patch_size": 2,
}
_MISTRAL = {"num_key_value_heads": 2, "intermediate_size": 40, "rms_norm_eps": 1e-5}
_QWEN3_MOE = _QWEN3 | {"moe_intermediate_size": 16}
_GPT2 = {"layer_norm_epsilon": 1e-4}
_PHI3 = {"hidden_size": 32, "intermediate_size": 40}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "patch_size": 2,
    "temporal_patch_size": 1,
    "spatial_merge_size": 1,
    "out_hidden_size": 24,
}
_SMALL_VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_PIXTRAL = _SMALL_VISION | {"model_type": "pixtral", "head_dim": 4, "image_size": 4, "patch_size": 2}

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
    "qwen2_5_vl": Variant(
        "qwen2_5_vl",
        _QWEN2 | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 1]}},
        vision=_QWEN_VISION,
        seed=101,
    ),
    "qwen3_vl": Variant(
        "qwen3_vl",
        _QWEN3
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
        },
        vision=_QWEN_VISION | {"num_position_embeddings": 4, "deepstack_visual_indexes": [0]},
        seed=102,
    ),
    "mistral3": Variant(
        "mistral3",
        _MISTRAL | {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        vision=_PIXTRAL,
        seed=103,
    ),
    "phi3_long": Variant(
        "phi3",
        _PHI3
        | {
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.1, 1.3, 1.2],
                "long_factor": [1.5, 3.0, 8.0],
            },
        },
        seed=104,
    ),
    "phi3_short": Variant(
        "phi3",
        _PHI3
        | {
            "sliding_window": 12,
            "original_max_position_embeddings": 48,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 5000.0,
                "attention_factor": 1.3,
                "short_factor": [1.1, 1.3, 1.2, 2.0],
                "long_factor": [1.5, 3.0, 8.0, 9.0],
            },
        },
        "float16",
        max_shard_size="15KB",
        seed=105,
    ),
    "gpt2_tied": Variant("gpt2", _GPT2, seed=106),
    "gpt2_untied": Variant(
        "gpt2",
        _GPT2 | {"n_inner": 40, "activation_function": "gelu", "tie_word_embeddings": False},
        "float16",
        max_shard_size="15KB",
        seed=107,
    ),
    "granite_tied": Variant(
        "granite",
        _GQA
        | {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.15,
            "logits_scaling": 2.5,
            "rms_norm_eps": 1e-2,
            "tie_word_embeddings": True,
        },
        seed=108,
    ),
    "granite_bias": Variant(
        "granite",
        _GQA
        | {
            "residual_multiplier": 0.22,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": _ROPE_YARN,
        },
        "float16",
        max_shard_size="15KB",
        seed=109,
    ),
    "ministral3_growth": Variant(
        "ministral3",
        _MISTRAL
        | {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE_YARN
            | {"mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.4},
        },
        seed=110,
    ),
    "ministral3_multimodal": Variant(
        "mistral3",
        _MISTRAL
        | {
            "model_type": "ministral3",
            "head_dim": 8,
            "sliding_window": 12,
            "rope_parameters": _ROPE_YARN | {"llama_4_scaling_beta": 0.2},
        },
        "float16",
        vision=_PIXTRAL,
        seed=111,
    ),
    "qwen3_in_internvl": Variant(
        "internvl",
        _QWEN3 | {"model_type": "qwen3"},
        vision=_SMALL_VISION | {"image_size": [4, 4], "patch_size": [2, 2]},
        seed=112,
    ),
    "llama_in_smolvlm": Variant(
        "smolvlm",
        _GQA | {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        "float16",
        vision=_SMALL_VISION | {"image_size": 4, "patch_size": 2},
        seed=113,
    ),
    "seed_oss_gqa": Variant("seed_oss", _QWEN3 | {"mlp_bias": True}, seed=114),
    "olmo2_gqa": Variant("olmo2", _OLMO2 | {"rms_norm_eps": 1e-6}, seed=201),
    "olmo2_bias": Variant(
        "olmo2",
        _OLMO2 | {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": _ROPE_YARN},
        seed=202,
    ),
    "glm4_bias": Variant(
        "glm4",
        _GQA
        | {
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 3000.0,
                "partial_rotary_factor": 0.25,
            },
        },
        seed=211,
    ),
    "glm4_yarn": Variant(
        "glm4",
        _GQA
        | {
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE_YARN | {"partial_rotary_factor": 0.5},
        },
        seed=212,
    ),
    "smollm3_nope": Variant(
        "smollm3",
        _GQA | {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": False},
        seed=203,
    ),
    "smollm3_window": Variant(
        "smollm3",
        _GQA
        | {
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "use_sliding_window": True,
            "sliding_window": 12,
        },
        seed=204,
    ),
    "olmo3_window": Variant(
        "olmo3",
        _OLMO2
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            "sliding_window": 12,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": _ROPE_YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
            },
        },
        seed=205,
    ),
    "cohere2_window": Variant("cohere2", _COHERE2 | {"num_hidden_layers": 4}, seed=206),
    "cohere2_bias": Variant(
        "cohere2", _COHERE2 | {"attention_bias": True, "tie_word_embeddings": False}, seed=207
    ),
    "gemma3_window": Variant("gemma3_text", _GEMMA | {"num_hidden_layers": 6}, seed=208),
    "gemma3_ropes": Variant(
        "gemma3_text",
        _GEMMA
        | {
            "attention_bias": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 4.0,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
        seed=209,
    ),
    "gemma2_window": Variant(
        "gemma2",
        _GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0, "num_hidden_layers": 3},
        seed=210,
    ),
    "gemma3_vision": Variant(
        "gemma3",
        {name: value for name, value in _GEMMA.items() if name != "query_pre_attn_scalar"},
        vision=_SIGLIP,
        seed=213,
    ),
    "qwen3_moe_gqa": Variant(
        "qwen3_moe",
        _QWEN3_MOE
        | {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True, "attention_bias": True},
        seed=301,
    ),
    "qwen3_moe_raw": Variant(
        "qwen3_moe",
        _QWEN3_MOE
        | {"num_experts": 16, "num_experts_per_tok": 2, "tie_word_embeddings": True}
        | {"num_hidden_layers": 3, "mlp_only_layers": [1], "moe_intermediate_size": 8},
        seed=302,
    ),
    "mixtral_gqa": Variant(
        "mixtral", _MISTRAL | {"num_local_experts": 6, "num_experts_per_tok": 2}, seed=303
    ),
}
"""Variants by name. Append new ones at the end, with a seed that no other has."""


def build(variant: Variant, seed: int) -> Any:
    """Build the transformers model of `variant` with seeded weights, in float32, for inference."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    options, maker = _COMMON | variant.options, AutoModelForCausalLM
    if variant.vision is not None:
        is_tied = options.pop("tie_word_embeddings", False)
        options = {"text_config": options, "vision_config": variant.vision, "tie_word_embeddings": is_tied}
        maker = AutoModelForImageTextToText
    config = AutoConfig.for_model(variant.model_type, **options)
    model = maker.from_config(config, attn_implementation="eager")
    center = 0.0 if variant.model_type.startswith("gemma") else 1.0  # Gemma's norms add one to the weight
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = name.endswith("weight") and parameter.ndim == 1
            parameter.copy_(center + 0.2 * noise if is_scale else 0.3 * noise)
            if name.endswith("mlp.gate.weight"):
                parameter[-1] *= 0.01  # the last expert is hardly ever chosen
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
        seed = FLAGS.seed + (index if variant.seed is None else variant.seed)
        model = build(variant, seed)
        input_ids = np.random.default_rng(seed).integers(0, 64, NUM_TOKENS)
        logits = logits_of(model, input_ids)
        np.savez_compressed(directory / "logits.npz", input_ids=input_ids, logits=logits)
        save(model, variant, directory)
        print(f"{name}: {sum(path.stat().st_size for path in directory.iterdir())} bytes")


if __name__ == "__main__":
    flags.DEFINE_string("output", "tests/models/golden", "Directory to write the variants into.")
    flags.DEFINE_multi_enum("variants", [], list(VARIANTS), "Variants to make; default: all.")
    flags.DEFINE_integer("seed", 20240501, "Seed of weights and input ids.")
    app.run(main)
