"""Recognition of quantized checkpoints: from config.json and side files of tools to a format, or a refusal.

Owns where formats are described, and the names of those that are refused. Each format reads its own options.
Reads no weights.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from model_defs.config import read_json
from model_defs.errors import CheckpointError, UnsupportedModelError
from model_defs.quantized.awq import parse_awq
from model_defs.quantized.compressed_tensors import NAME, parse_compressed_tensors
from model_defs.quantized.fp8 import parse_fp8
from model_defs.quantized.gptq import parse_gptq
from model_defs.quantized.mxfp4 import parse_mxfp4
from model_defs.quantized.options import HINT, Options
from model_defs.quantized.source import QuantizedFormat

type Parser = Callable[[Options], QuantizedFormat]

_PARSERS: dict[str, Parser] = {
    "awq": parse_awq,
    "compressed-tensors": parse_compressed_tensors,
    "fp8": parse_fp8,
    "gptq": parse_gptq,
    "mxfp4": parse_mxfp4,
    "sparseml": parse_compressed_tensors,  # its earlier name
}
_SIDE_FILES = {"quant_config.json": "awq", "quantize_config.json": "gptq"}
"""Files of tools, and the method of one without quant_method."""
_REFUSED_FILES = {"hf_quant_config.json": "ModelOpt"}
_SECTIONS = {"quantization_config": "", "compression_config": NAME}
"""Sections of config.json, and the method of one without quant_method."""
_REFUSED = {
    "aqlm": "AQLM",
    "bitsandbytes": "bitsandbytes",
    "eetq": "EETQ",
    "fbgemm_fp8": "FBGEMM FP8",
    "gguf": "GGUF",
    "hqq": "HQQ",
    "modelopt": "ModelOpt",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "quanto": "Quanto",
    "quark": "Quark",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
_EXPORT_HINTS = {
    "auto-round": "export it in the format auto_gptq or auto_awq, or use the model's unquantized safetensors",
    "modelopt": "use the model's unquantized safetensors, or a version in compressed-tensors",
}


def read_format(directory: Path) -> QuantizedFormat | None:
    """Return the format of a Hugging Face directory, or None if nothing says that it is quantized.

    Reads config.json, if it is there, and the side files that AutoAWQ and AutoGPTQ write. Raises
    UnsupportedModelError for a format that is not supported, or two descriptions that differ, and
    CheckpointError for a file that is not JSON, or that ModelOpt writes.
    """
    path = directory / "config.json"
    found = parse_format(read_json(path)) if path.is_file() else None
    for name, method in _REFUSED_FILES.items():
        if (directory / name).is_file():
            raise CheckpointError(
                f"{directory} holds {name}: checkpoints quantized by {method} are not supported; "
                f"{_hint(method)}"
            )
    for name, method in _SIDE_FILES.items():
        if not (directory / name).is_file():
            continue
        side = _parse_section(read_json(directory / name), name, method)
        if found is not None and found != side:
            raise UnsupportedModelError(
                f"{directory}: config.json describes {found.name} ({found.digest()}), {name} describes "
                f"{side.name} ({side.digest()}); correct one of them, or remove the side file"
            )
        found = side
    return found


def parse_format(values: dict[str, Any]) -> QuantizedFormat | None:
    """Return the format that the JSON object of config.json describes, or None.

    Raises UnsupportedModelError, which names the format or the option that is not supported.
    """
    found = []
    for where, one in (("config.json: ", values), ("config.json: text_config: ", _text_config(values))):
        if one.get("quantization"):  # first, since MLX writes its options into the next section, too
            raise UnsupportedModelError(
                f"{where}quantization: checkpoints quantized by MLX are not supported; {HINT}"
            )
        found += [
            _parse_section(one[name], f"{where}{name}", method)
            for name, method in _SECTIONS.items()
            if one.get(name)
        ]
    if any(one != found[0] for one in found):
        raise UnsupportedModelError(
            f"config.json describes the quantized format {len(found)} times, and differently: "
            f"{', '.join(one.digest() for one in found)}; remove all but one"
        )
    return found[0] if found else None


def _text_config(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the text model in the config of one with several."""
    found = values.get("text_config")
    return found if isinstance(found, dict) else {}


def _parse_section(values: Any, where: str, default: str) -> QuantizedFormat:
    """Read a section whose format its quant_method names, or else `default`."""
    if not isinstance(values, dict):
        raise UnsupportedModelError(f"{where}={values!r:.80} must be an object; {HINT}")
    method = str(values.get("quant_method") or default).lower()
    if method not in _PARSERS:
        raise UnsupportedModelError(
            f"{where}: checkpoints quantized by {_named(values)} are not supported; {_hint(method)}"
        )
    return _PARSERS[method](Options(values, where))


def _named(values: dict[str, Any]) -> str:
    """Return the name of the method in a `quantization_config`."""
    method = values.get("quant_method")
    if method is None and any(key.removeprefix("_") in ("load_in_8bit", "load_in_4bit") for key in values):
        return "bitsandbytes"
    if method is None and "quant_algo" in values:
        return "ModelOpt"
    return _REFUSED.get(str(method).lower(), str(method or "an unnamed method"))


def _hint(method: str) -> str:
    """Return what helps where `method` is refused."""
    return _EXPORT_HINTS.get(method.lower(), HINT)
