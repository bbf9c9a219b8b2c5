"""AWQ of the version "gemm": codes of four bits, eight output channels to a word, in an order of its own.

Owns the options and the tensors of the format, as AutoAWQ writes it. A layer is quantized if it has a
`qweight`, so lists of layers that are not have no effect.
"""

import dataclasses

import jax
import numpy as np

from model_defs.quantized.options import OF_TOOLS, Options
from model_defs.quantized.source import Axis, Source, SourcePart, Tensors, check_packs
from model_defs.quantized.unpacking import scaled, spread, unpack
from model_defs.safetensors_reader import FLOATS
from model_defs.tensor_recipes import Shape

BITS, PER_WORD = 4, 8
_NIBBLE_OF_CHANNEL = np.array([0, 4, 1, 5, 2, 6, 3, 7])


@dataclasses.dataclass(frozen=True)
class AwqDecoder:
    """Decoder of qweight i32[in, out/8], qzeros i32[groups, out/8], scales f[groups, out]."""

    group: int

    def __call__(self, qweight: jax.Array, qzeros: jax.Array, scales: jax.Array) -> jax.Array:
        """Return the weight f32[out, in]."""
        size = qweight.shape[0]
        zeros = spread(_channels(qzeros), self.group, size, 0)
        return scaled(_channels(qweight), zeros, spread(scales, self.group, size, 0)).T


def _channels(words: jax.Array) -> jax.Array:
    """Return the codes of i32[n, out/8] in the order of the output channels, i32[n, out]."""
    codes = unpack(words, BITS, 1).reshape(words.shape[0], -1, PER_WORD)
    return codes[:, :, _NIBBLE_OF_CHANNEL].reshape(words.shape[0], -1)


@dataclasses.dataclass(frozen=True)
class Awq:
    """AWQ weights; `group` input channels share a scale and a zero point, None: all of them do."""

    group: int | None = 128
    name = "AWQ"

    def digest(self) -> str:
        return f"awq-{BITS}-g{self.group or 'all'}"

    def source(self, name: str, shape: Shape, tensors: Tensors) -> Source | None:
        module = name.removesuffix("weight")
        if module + "qweight" not in tensors or len(shape) != 2:
            return None
        num_out, num_in = shape
        group = self.group or num_in
        check_packs(tensors[module + "qweight"], {"output channels": num_out}, PER_WORD)
        words, groups = num_out // PER_WORD, -(-num_in // group)
        parts = (
            SourcePart(module + "qweight", (num_in, words), ("I32",), (Axis(1, PER_WORD), Axis(0))),
            SourcePart(module + "qzeros", (groups, words), ("I32",), (Axis(1, PER_WORD), Axis(0, group))),
            SourcePart(module + "scales", (groups, num_out), FLOATS, (Axis(1), Axis(0, group))),
        )
        return Source(parts, AwqDecoder(group), asked_by=self.name)


def parse_awq(options: Options) -> Awq:
    """Read the options of an AWQ checkpoint, in config.json or in AutoAWQ's own file."""
    bits = options.integer(options.one_name("bits", "w_bit"), BITS)
    if bits != BITS:
        raise options.refusal(f"bits={bits}", f"AWQ of {bits} bits is not supported, that of {BITS} is")
    for name in ("version", "format", "checkpoint_format"):
        options.choice(name, "gemm", ("gemm",), "AWQ's version")
    options.choice("method", "awq", ("awq",), "the method")
    options.choice("pack_dtype", "int32", ("int32",), "words")
    if options.text("backend", "auto") == "llm-awq":
        raise options.refusal("backend='llm-awq'", "the packing of llm-awq is not supported, AutoAWQ's is")
    if not options.boolean("zero_point", True):
        raise options.refusal("zero_point=False", "AWQ without zero points is not supported")
    group = options.group_size(options.one_name("group_size", "q_group_size"))
    options.refuse_set("dynamic", what="options of single layers")
    options.without_effect("bits", "w_bit", "group_size", "q_group_size", *OF_TOOLS)
    options.close()
    return Awq(group)
