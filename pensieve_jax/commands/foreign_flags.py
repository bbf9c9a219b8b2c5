"""Flags of other servers, and what they are here.

Owns: the tables of names that users know from vLLM, SGLang, llama.cpp and Ollama, and the sentence about one.
Does not know: which command runs; a flag that the command lacks is not suggested.
"""

from __future__ import annotations

from typing import Final

from absl import flags

flags.disclaim_key_flags()
# Names with - as _. A name that differs from ours only by that needs no entry.
OURS: Final = {
    # the model
    **dict.fromkeys(("m", "model_path", "hf", "hf_repo", "model_tag"), "model"),
    **dict.fromkeys(("alias", "a", "served_model"), "served_model_name"),
    **dict.fromkeys(("tp", "tp_size"), "tensor_parallel_size"),
    **dict.fromkeys(("dp", "dp_size", "data_parallel_size"), "replicas"),
    # memory
    **dict.fromkeys(("gpu_memory_utilization", "mem_fraction_static"), "gpu_memory_fraction"),
    **dict.fromkeys(("num_gpu_blocks_override",), "gpu_pages"),
    **dict.fromkeys(("swap_space", "kv_offloading_size", "hicache_size", "cache_ram", "cram"), "cpu_bytes"),
    **dict.fromkeys(("kv_cache_dtype", "cache_type_k", "cache_type_v", "ctk", "ctv"), "kv_dtype"),
    **dict.fromkeys(("block_size", "page_size"), "chunk_tokens"),
    # sizes of a step
    **dict.fromkeys(("max_model_len", "c", "ctx_size", "context_length", "num_ctx"), "max_context_tokens"),
    **dict.fromkeys(("max_num_seqs", "max_running_requests", "np", "parallel"), "max_num_running"),
    **dict.fromkeys(("chunked_prefill_size", "b", "batch_size", "ub"), "max_num_batched_tokens"),
    # access
    **dict.fromkeys(("api_key_file", "api_keys"), "api_keys_file"),
    **dict.fromkeys(("allowed_origins", "allow_origins"), "cors_origin"),
    **dict.fromkeys(("otlp_traces_endpoint",), "otel_endpoint"),
    # replies
    **dict.fromkeys(("n", "n_predict", "num_predict", "predict", "max_new_tokens"), "max_tokens"),
    **dict.fromkeys(("temp",), "temperature"),
    **dict.fromkeys(("s",), "seed"),
    **dict.fromkeys(("sys", "system_prompt"), "system"),
    **dict.fromkeys(("i", "input_file"), "input"),
    **dict.fromkeys(("o", "output_file"), "output"),
}
# A flag that has no counterpart, or whose counterpart takes other values.
EXPLAINED: Final = {
    **dict.fromkeys(
        ("enable_prefix_caching", "enable_radix_cache", "cache_prompt", "cache_reuse"),
        "The KV cache is always kept; --nostateful keeps none",
    ),
    **dict.fromkeys(
        ("no_enable_prefix_caching", "disable_radix_cache", "no_cache_prompt"), "Here it is --nostateful"
    ),
    **dict.fromkeys(
        ("enable_chunked_prefill", "cont_batching", "cb"),
        "Prompts are always computed in parts, beside decodes",
    ),
    **dict.fromkeys(
        ("enable_auto_tool_choice", "jinja"), "Tool calls need no flag: --tool_call_parser is auto"
    ),
    **dict.fromkeys(
        ("ngl", "gpu_layers", "n_gpu_layers"), "A GPU holds all layers; JAX_PLATFORMS=cpu uses the CPU"
    ),
    **dict.fromkeys(
        ("keep_alive",),
        "The model stays loaded until the command ends, and its KV cache while there is room",
    ),
    **dict.fromkeys(
        ("max_total_tokens",), "Here it is --gpu_pages, which counts chunks of --chunk_tokens (32) tokens"
    ),
    **dict.fromkeys(("t", "threads"), "The CPU's threads are not a setting"),
    **dict.fromkeys(
        ("q", "quantization"),
        "A quantized checkpoint is recognized by its files, and --weights_dtype keeps others in 8 bits",
    ),
    **dict.fromkeys(("trust_remote_code",), "Code of a checkpoint never runs; see docs/model_families.md"),
    **dict.fromkeys(("enforce_eager", "cuda_graph_max_bs"), "Every step is compiled before serving"),
    **dict.fromkeys(
        ("chat_template", "chat_template_file", "tokenizer"), "They are read from the model's directory"
    ),
}


def hint(name: str) -> str | None:
    """Return the sentences about an unknown flag that has another name here; None for other names."""
    given = f"Unknown command line flag '{name}'. "
    plain = name.replace("-", "_")
    if plain in EXPLAINED:
        return f"{given}{EXPLAINED[plain]}."
    ours = OURS.get(plain, plain)
    return f"{given}Here it is --{ours}." if ours != name and ours in flags.FLAGS else None
