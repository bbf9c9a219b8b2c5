"""Checkpoints of formats that are not supported, recognized by files or by names of tensors.

Owns the names of these formats, and what a user can do instead. Every error names the format and what shows
it. Knows nothing of families and reads no weights. Descriptions of quantized formats are read in `quantized`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from model_defs.errors import CheckpointError

_UNQUANTIZED = "use the model's unquantized safetensors"
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


def refuse_quantized_tensors(entries: Iterable[_Entry], unread_by: str | None = None) -> None:
    """Raise CheckpointError if names or dtypes of tensors belong to quantized weights that were not read.

    unread_by: the format of the checkpoint, which does not read these tensors; None if none is named.
    """
    found = list(entries)
    if unread_by is None:
        state = "but neither config.json nor a side file describes how they were quantized; restore that file"
    else:
        state = f"which {unread_by} does not read"
    for suffix, name in _QUANTIZED_TENSORS:
        for entry in found:
            if entry.name.endswith(suffix):
                raise CheckpointError(
                    f"tensor {entry.name!r} shows quantized weights ({name}), {state}, or {_UNQUANTIZED}"
                )
    for entry in found:
        if entry.dtype.startswith(_QUANTIZED_DTYPES):
            raise CheckpointError(
                f"tensor {entry.name!r} has dtype {entry.dtype}, which shows quantized weights, {state}, or "
                f"{_UNQUANTIZED}"
            )
