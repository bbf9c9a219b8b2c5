"""FP8 (`quant_method: fp8`): weights in e4m3 with scales for blocks, for channels or for the whole tensor.

Owns the options and the tensors of the format, as DeepSeek, Qwen and AutoFP8 publish it. The dtype of a
tensor says whether it is quantized, so lists of layers that are not have no effect. Activations are not
quantized here: their scales are skipped by name.
"""

import dataclasses

from model_defs.quantized.options import Options
from model_defs.quantized.scaled_codes import E4M3, E8M0, ScaledCodes, codes_part, is_e8m0, scale_part
from model_defs.quantized.source import Source, Tensors, present
from model_defs.safetensors_reader import FLOATS
from model_defs.tensor_recipes import Shape

_SCALES = ("weight_scale_inv", "weight_scale")
_OF_ACTIVATIONS = ("input_scale", "activation_scale")


@dataclasses.dataclass(frozen=True)
class Fp8:
    """FP8 weights; `block` is what one scale covers, None for a channel or the whole tensor."""

    block: tuple[int, int] | None = None
    name = "FP8"

    def digest(self) -> str:
        return "fp8" if self.block is None else f"fp8-{self.block[0]}x{self.block[1]}"

    def source(self, name: str, shape: Shape, tensors: Tensors) -> Source | None:
        if name not in tensors or tensors[name].dtype != E4M3 or len(shape) != 2:
            return None
        module = name.removesuffix("weight")
        scales = (present(tensors, [module + suffix for suffix in _SCALES]) or (module + _SCALES[0],))[0]
        block = self.block or _covered(scales, shape, tensors)
        return Source(
            (codes_part(name, shape, E4M3), scale_part(scales, shape, block, tensors, (*FLOATS, E8M0))),
            ScaledCodes(block, is_e8m0(scales, tensors)),
            present(tensors, [module + suffix for suffix in _OF_ACTIVATIONS]),
            self.name,
        )


def parse_fp8(options: Options) -> Fp8:
    """Read the options of an FP8 checkpoint."""
    options.choice("fmt", "e4m3", ("e4m3", "float8_e4m3fn"), "weights")
    options.choice("expert_dtype", "fp8", ("fp8",), "experts")
    options.refuse_set("kv_cache_scheme", what="a quantized KV cache")
    block = options.sizes("weight_block_size", 2)
    options.without_effect(
        *("quant_method", "activation_scheme", "modules_to_not_convert", "ignored_layers"),
        *("modules_to_convert", "dequantize", "scale_fmt"),
    )
    options.close()
    return Fp8(None if block is None else (block[0], block[1]))


def _covered(scales: str, shape: Shape, tensors: Tensors) -> tuple[int, int]:
    """Return what a scale covers where no blocks are named: a channel, or the whole tensor."""
    found = tensors[scales].shape if scales in tensors else ()
    is_of_channels = bool(found) and found[0] == shape[0] and shape[0] > 1
    return (1 if is_of_channels else shape[0], shape[1])
