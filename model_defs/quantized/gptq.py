"""GPTQ of four and eight bits: codes packed along the input channels, zero points along the output channels.

Owns the options and the tensors of the format, as AutoGPTQ and GPTQModel write it. A layer is quantized if it
has a `qweight`. With act order, `g_idx` names the group of each input channel.
"""

import dataclasses

import jax
import numpy as np

from model_defs.errors import CheckpointError
from model_defs.quantized.options import OF_TOOLS, Options
from model_defs.quantized.source import (
    Axis,
    Source,
    SourcePart,
    Tensors,
    check_packs,
    present,
    read_group_index,
)
from model_defs.quantized.unpacking import per_word, scaled, spread, unpack
from model_defs.safetensors_reader import FLOATS
from model_defs.tensor_recipes import Shape

_FORMATS = ("gptq", "gptq_v2")
_OF_GPTQ_TOOLS = (
    *("static_groups", "model_name_or_path", "model_file_base_name", "disable_exllama", "use_exllama_v2"),
    *("damp_auto_increment", "mse", "parallel_packing", "v2", "v2_alpha", "hessian_chunk_size"),
)


@dataclasses.dataclass(frozen=True)
class GptqDecoder:
    """Decoder of qweight i32[in*bits/32, out], qzeros i32[groups, out*bits/32], scales f[groups, out].

    Files of the first version hold each zero point less one, modulo 2**bits. A fourth array, g_idx i32[in],
    is the group of each input channel; without it each `group` channels in order are one.
    """

    bits: int
    group: int
    is_v2: bool = False

    def __call__(
        self, qweight: jax.Array, qzeros: jax.Array, scales: jax.Array, g_idx: jax.Array | None = None
    ) -> jax.Array:
        """Return the weight f32[out, in]."""
        codes, zeros = unpack(qweight, self.bits, 0), unpack(qzeros, self.bits, 1)
        if not self.is_v2:
            zeros = (zeros + 1) & (2**self.bits - 1)
        if g_idx is not None:
            return scaled(codes, zeros[g_idx], scales[g_idx]).T
        size = codes.shape[0]
        return scaled(codes, spread(zeros, self.group, size, 0), spread(scales, self.group, size, 0)).T


@dataclasses.dataclass(frozen=True)
class Gptq:
    """GPTQ weights; `group` input channels share a scale and a zero point, None: all of them do."""

    bits: int
    group: int | None
    has_act_order: bool = False
    is_v2: bool = False
    name = "GPTQ"

    def digest(self) -> str:
        return f"gptq-{self.bits}-g{self.group or 'all'}-{'v2' if self.is_v2 else 'v1'}"

    def source(self, name: str, shape: Shape, tensors: Tensors) -> Source | None:
        module = name.removesuffix("weight")
        if module + "qweight" not in tensors or len(shape) != 2:
            return None
        num_out, num_in = shape
        count = per_word(self.bits)
        group = self.group or num_in
        groups = -(-num_in // group)
        packed = tensors[module + "qweight"]
        check_packs(packed, {"input channels": num_in, "output channels": num_out}, count)
        index = _group_index(module + "g_idx", num_in, groups, tensors)
        if index is not None and np.array_equal(index, np.arange(num_in) // group):
            index = None
        if index is not None and not self.has_act_order:  # some libraries read it then, others do not
            raise CheckpointError(
                f"tensor {tensors[module + 'g_idx'].name!r} names groups out of order, but desc_act is "
                f"false; set it to true in the description if the weights have act order"
            )
        if module + "g_idx" not in tensors and self.has_act_order and groups > 1:
            raise CheckpointError(f"tensor {packed.name!r} has no g_idx beside it; desc_act=true needs one")
        # With act order a device may need the scales of any group.
        along = Axis(0, group) if index is None else None
        parts = [
            SourcePart(module + "qweight", (num_in // count, num_out), ("I32",), (Axis(1), Axis(0, count))),
            SourcePart(module + "qzeros", (groups, num_out // count), ("I32",), (Axis(1, count), along)),
            SourcePart(module + "scales", (groups, num_out), FLOATS, (Axis(1), along)),
        ]
        if index is not None:
            parts.append(SourcePart(module + "g_idx", (num_in,), ("I32",), (None, Axis(0))))
        others = present(tensors, [module + "g_idx"]) + _zero_bias(module + "bias", num_out, tensors)
        return Source(tuple(parts), GptqDecoder(self.bits, group, self.is_v2), others, self.name)


def parse_gptq(options: Options) -> Gptq:
    """Read the options of a GPTQ checkpoint, in config.json or in AutoGPTQ's own file."""
    bits = options.integer("bits")
    if bits not in (4, 8):
        raise options.refusal(f"bits={bits}", f"GPTQ of {bits} bits is not supported, that of 4 and 8 is")
    layout = options.choice(
        "checkpoint_format", options.text("format", "gptq"), _FORMATS, "the form of a GPTQ checkpoint"
    )
    options.choice("format", layout, (layout,), "the form, as in checkpoint_format,")
    options.choice("method", "gptq", ("gptq",), "the method")
    options.choice("pack_dtype", "int32", ("int32",), "words")
    options.refuse_set("is_marlin_format", what="a checkpoint packed for Marlin")
    options.refuse_set("adapter", what="an adapter beside the weights")
    options.refuse_set("rotation", what="a rotation of the weights")
    layers = options.section("dynamic")
    kept_whole = () if layers is None else layers.names_of_all()
    if not all(name.startswith("-:") for name in kept_whole):
        raise options.refusal("dynamic", "options of single layers are not supported")
    options.without_effect("group_size", *OF_TOOLS, *_OF_GPTQ_TOOLS)
    has_act_order = options.boolean("desc_act", False)
    group = options.group_size("group_size")
    options.close()
    return Gptq(bits, group, has_act_order, layout == "gptq_v2")


def _group_index(name: str, num_in: int, groups: int, tensors: Tensors) -> np.ndarray | None:
    """Read the group of each input channel, i32[in], if the checkpoint has it."""
    if name not in tensors:
        return None
    return read_group_index(tensors[name], num_in, groups)


def _zero_bias(name: str, num_out: int, tensors: Tensors) -> tuple[str, ...]:
    """Return the name of a bias of zeros, which older tools added to layers that have none."""
    entry = tensors.get(name)
    if entry is None or entry.dtype not in FLOATS or entry.shape != (num_out,) or entry.read().any():
        return ()
    return (name,)
