"""Checkpoints of formats that are not supported, recognized by files, options or names of tensors.

Owns the names of these formats, and what a user can do instead. Every error names the format and what shows
it. Knows nothing of families and reads no weights.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from model_defs.errors import CheckpointError, UnsupportedModelError

_UNQUANTIZED = "use the model's unquantized safetensors"
_QUANTIZED_FILES = {
    "quant_config.json": "AWQ",
    "quantize_config.json": "GPTQ",
    "hf_quant_config.json": "ModelOpt",
}
_QUANTIZED_OPTIONS = {
    "quantization_config": None,  # its quant_method names the format
    "compression_config": "compressed-tensors",
    "quantization": "MLX",
}
_METHODS = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "modelopt": "ModelOpt",
    "fp8": "FP8",
    "fbgemm_fp8": "FBGEMM FP8",
    "mxfp4": "MXFP4",
    "sparseml": "compressed-tensors",
}
# The first row with a suffix that occurs names the format: some suffixes occur in several formats.
_QUANTIZED_TENSORS = (
    (".g_idx", "GPTQ"),
    (".qweight", "AWQ or GPTQ"),
    (".qzeros", "AWQ or GPTQ"),
    (".weight_packed", "compressed-tensors"),
    (".weight_shape", "compressed-tensors"),
    (".weight_zero_point", "compressed-tensors"),
    (".weight_scale_2", "ModelOpt NVFP4"),
    (".weight_scale_inv", "FP8"),
    (".weight_scale", "FP8 or INT8"),
    (".input_scale", "FP8"),
    (".SCB", "bitsandbytes INT8"),
    (".weight_format", "bitsandbytes INT8"),
    (".absmax", "bitsandbytes 4-bit"),
    (".quant_map", "bitsandbytes 4-bit"),
    (".k_scale", "a quantized KV cache"),
    (".v_scale", "a quantized KV cache"),
    (".kv_scale", "a quantized KV cache"),
    (".biases", "MLX"),
)
_QUANTIZED_DTYPES = ("F8_", "F4", "F6_", "I8", "U8", "I4", "U4")
_OTHER_WEIGHTS = (
    ("*.gguf", "GGUF", "use the model's safetensors"),
    ("consolidated*.safetensors", "Mistral's own format", "use the files that transformers reads"),
    ("consolidated*.pth", "Meta's own format", "use the files that transformers reads"),
    ("adapter_model.*", "a LoRA adapter (PEFT)", "merge it into its base model and save that"),
    ("*.h5", "TensorFlow", "save the model as safetensors"),
    ("*.msgpack", "Flax", "save the model as safetensors"),
    ("*.onnx", "ONNX", "use the model's safetensors"),
)


class _Entry(Protocol):
    """Header of a tensor."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...


def refuse_other_formats(directory: Path) -> None:
    """Raise CheckpointError for a directory of another format, which it names with the file that shows it."""
    adapter = directory / "adapter_config.json"
    if adapter.is_file():
        raise CheckpointError(
            f"{directory} holds {adapter.name}: a LoRA adapter (PEFT) is not supported; merge it into its "
            f"base model (merge_and_unload) and save that"
        )
    for name, method in _QUANTIZED_FILES.items():
        if (directory / name).is_file():
            raise CheckpointError(
                f"{directory} holds {name}: checkpoints quantized by {method} are not supported; "
                f"{_UNQUANTIZED}"
            )
    if (directory / "config.json").is_file():
        return
    if (directory / "params.json").is_file():
        raise CheckpointError(
            f"{directory} holds params.json and no config.json: the original format of Mistral and Meta is "
            f"not supported; use the files that transformers reads"
        )
    refuse_other_weights(directory)


def refuse_other_weights(directory: Path) -> None:
    """Raise CheckpointError for a directory with weights of another format only."""
    for pattern, name, hint in _OTHER_WEIGHTS:
        found = sorted(path.name for path in directory.glob(pattern))
        if found:
            raise CheckpointError(f"{directory} holds {found[0]}: {name} is not supported; {hint}")


def refuse_quantized(values: dict[str, Any]) -> None:
    """Raise UnsupportedModelError if config.json describes quantized weights; it names the method."""
    for option, name in _QUANTIZED_OPTIONS.items():
        found = values.get(option)
        if not found:
            continue
        method = name or (_method(found) if isinstance(found, dict) else repr(found))
        raise UnsupportedModelError(
            f"config.json: {option}: checkpoints quantized by {method} are not supported; {_UNQUANTIZED}"
        )


def refuse_quantized_tensors(entries: Iterable[_Entry]) -> None:
    """Raise CheckpointError if names or dtypes of tensors show that the checkpoint is quantized."""
    found = list(entries)
    for suffix, name in _QUANTIZED_TENSORS:
        for entry in found:
            if entry.name.endswith(suffix):
                raise CheckpointError(
                    f"tensor {entry.name!r} shows a quantized checkpoint ({name}), which is not supported; "
                    f"{_UNQUANTIZED}"
                )
    for entry in found:
        if entry.dtype.startswith(_QUANTIZED_DTYPES):
            raise CheckpointError(
                f"tensor {entry.name!r} has dtype {entry.dtype}: quantized checkpoints are not supported; "
                f"{_UNQUANTIZED}"
            )


def _method(section: dict[str, Any]) -> str:
    """Return the name of the method in a `quantization_config`."""
    method = section.get("quant_method")
    if method is None and any(key.removeprefix("_") in ("load_in_8bit", "load_in_4bit") for key in section):
        return "bitsandbytes"
    if method is None and "quant_algo" in section:
        return "ModelOpt"
    return _METHODS.get(str(method), str(method or "an unnamed method"))
