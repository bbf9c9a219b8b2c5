"""compressed-tensors: FP8, INT8 and packed integers of four and eight bits, by groups of layers.

Owns the options of the format, and which of its groups a layer belongs to. Where options leave that unclear,
or tensors contradict them, the checkpoint is refused. Activations are not quantized here: their scales and
zero points are skipped by name.
"""

import dataclasses
import re

from model_defs.errors import UnsupportedModelError
from model_defs.quantized.options import Options
from model_defs.quantized.packed import packed_source
from model_defs.quantized.scaled_codes import E4M3, INT8, ScaledCodes, codes_part, scale_part
from model_defs.quantized.source import Source, Tensors, present
from model_defs.tensor_recipes import Shape

NAME = "compressed-tensors"
_OF_ACTIVATIONS = ("input_scale", "input_zero_point")
_CODES = {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized"}
_SPARSE = {"marlin-24", "sparse-24", "sparse-24-bitmask", "sparse-bitmask"}
_REGEX = "re:"


@dataclasses.dataclass(frozen=True)
class GroupWeights:
    """How the weights of a group of layers are stored; `block` is what one scale covers, None: all channels.

    A block of (None, None) is the whole tensor, (1, None) an output channel, (1, 128) a group of its inputs.
    """

    dtype: str
    bits: int
    block: tuple[int | None, int | None]
    is_packed: bool = False
    has_zeros: bool = False
    has_act_order: bool = False

    def digest(self) -> str:
        block = "x".join(str(size or "all") for size in self.block)
        return f"{self.dtype}-{self.bits}-{block}{'-packed' * self.is_packed}{'-zeros' * self.has_zeros}"


@dataclasses.dataclass(frozen=True)
class Group:
    """Group of layers with its name, the targets that it is for, and its weights; None: they are plain."""

    name: str
    targets: tuple[str, ...]
    weights: GroupWeights | None


@dataclasses.dataclass(frozen=True)
class CompressedTensors:
    """Groups of layers, and the layers that belong to none of them."""

    groups: tuple[Group, ...]
    ignore: tuple[str, ...] = ()
    name = NAME

    def digest(self) -> str:
        groups = (
            f"{','.join(group.targets)}={'plain' if group.weights is None else group.weights.digest()}"
            for group in self.groups
        )
        return f"{NAME}:{';'.join(groups)}"

    def source(self, name: str, shape: Shape, tensors: Tensors) -> Source | None:
        if not name.endswith(".weight") or len(shape) != 2:
            return None
        module = name.removesuffix("weight")
        packed, plain = tensors.get(module + "weight_packed"), tensors.get(name)
        stored = packed or plain
        layer = name.removesuffix(".weight")
        if stored is not None:
            layer = re.sub(r"\.weight(_packed)?$", "", stored.name)
        weights = self._find_weights(layer)
        is_quantized = packed is not None or (plain is not None and plain.dtype in (E4M3, INT8))
        if weights is None:
            if not is_quantized:
                return None
            raise UnsupportedModelError(
                f"config_groups: the tensors of layer {layer!r} are quantized, but no group names it, or "
                f"ignore does; its scales are unclear"
            )
        if stored is not None and not is_quantized:
            raise UnsupportedModelError(
                f"config_groups: the layer {layer!r} is in a group of quantized layers, but its tensor is "
                f"{stored.dtype}; add it to ignore if its weight is plain"
            )
        block = tuple(size or whole for size, whole in zip(weights.block, shape, strict=True))
        if weights.is_packed:
            source = packed_source(
                module,
                shape,
                weights.bits,
                block[1],
                weights.has_zeros,
                weights.has_act_order,
                tensors,
                NAME,
            )
        else:
            source = _scaled_source(module, shape, weights, (block[0], block[1]), tensors)
        return source._replace(
            others=source.others + present(tensors, [module + suffix for suffix in _OF_ACTIVATIONS])
        )

    def _find_weights(self, layer: str) -> GroupWeights | None:
        """Return how the weights of `layer` are stored, by the most specific of its groups.

        As in the format's library, a layer's name goes before an expression, and that before a class.
        """
        kind = "Embedding" if layer.rpartition(".")[2].startswith("embed_") else "Linear"
        if any(_rank(one, layer, kind) is not None for one in self.ignore):
            return None
        ranked: dict[int, list[Group]] = {}
        for group in self.groups:
            ranks = [rank for one in group.targets if (rank := _rank(one, layer, kind)) is not None]
            if ranks:
                ranked.setdefault(min(ranks), []).append(group)
        if not ranked:
            return None
        found = ranked[min(ranked)]
        if len({group.weights for group in found}) > 1:
            names = " and ".join(repr(group.name) for group in found)
            raise UnsupportedModelError(
                f"config_groups: the layer {layer!r} is in the groups {names}, which differ; name it in one"
            )
        return found[0].weights


def _rank(target: str, layer: str, kind: str) -> int | None:
    """Return how specific a matching target is, from 0 for the layer's own name; None: it does not match."""
    if target.startswith(_REGEX):
        return 1 if re.match(target.removeprefix(_REGEX), layer) else None
    if target == layer:
        return 0
    return 2 if target == kind else None


def _scaled_source(
    module: str, shape: Shape, weights: GroupWeights, block: tuple[int, int], tensors: Tensors
) -> Source:
    """Return the source of codes of eight bits that are not packed."""
    parts = [
        codes_part(module + "weight", shape, weights.dtype),
        scale_part(module + "weight_scale", shape, block, tensors),
    ]
    if weights.has_zeros:
        parts.append(scale_part(module + "weight_zero_point", shape, block, tensors, (INT8,)))
    return Source(tuple(parts), ScaledCodes(block), asked_by=NAME)


def parse_compressed_tensors(options: Options) -> CompressedTensors:
    """Read the options of a compressed-tensors checkpoint."""
    layout = options.text("format", "dense")
    if layout in _SPARSE:
        raise options.refusal(f"format={layout!r}", "sparse weights are not supported")
    sparsity = options.section("sparsity_config")
    if sparsity is not None and sparsity.text("format", "dense") != "dense":
        raise options.refusal("sparsity_config", "sparse weights are not supported")
    options.refuse_set("moe_sparsity_config", what="sparsity")
    options.refuse_set("transform_config", what="a rotation of weights and activations")
    options.refuse_set("kv_cache_scheme", what="a quantized KV cache")
    options.choice("quantization_status", "compressed", ("compressed", "frozen"), "weights")
    groups = options.section("config_groups")
    if groups is None:
        raise options.refusal("config_groups is missing", "the layers that are quantized are unknown")
    ignore = options.names("ignore")
    options.without_effect(
        *("quant_method", "version", "global_compression_ratio", "run_compressed", "dequantize"),
        "use_optimized_inference",
    )
    options.close()
    for one in ignore:
        _check_expression(one, options)
    return CompressedTensors(
        tuple(_read_group(groups, name, layout) for name in groups.names_of_all()), ignore
    )


def _read_group(groups: Options, name: str, layout: str) -> Group:
    """Read one group of layers."""
    options = groups.section(name)
    if options is None:
        raise groups.refusal(f"{name}=null", "a group must be an object")
    targets = options.names("targets")
    for one in targets:
        _check_expression(one, options)
    layout = options.text("format", layout)
    weights = options.section("weights")
    options.without_effect("input_activations", "output_activations")
    options.close()
    return Group(name, targets, None if weights is None else _read_weights(weights, layout))


def _read_weights(options: Options, layout: str) -> GroupWeights:
    """Read how the weights of a group are stored."""
    bits, kind = options.integer("num_bits", 8), options.text("type", "int")
    if kind == "float" and bits == 4:
        raise options.refusal(f"format={layout!r}", "floats of four bits (NVFP4, MXFP4) are not supported")
    if layout not in _CODES:
        raise options.refusal(f"format={layout!r}", f"the format must be one of {', '.join(sorted(_CODES))}")
    is_packed = layout == "pack-quantized"
    if kind not in ("int", "float") or (bits != 8 and (bits, is_packed) != (4, True)):
        raise options.refusal(
            f"type={kind!r}, num_bits={bits}, format={layout!r}",
            f"weights of {bits} bits are not supported in this form; int of 4 bits, packed, and int and "
            f"float of 8 bits are",
        )
    if kind == "float" and is_packed:
        raise options.refusal(f"type='float', format={layout!r}", "packed floats are not supported")
    options.refuse_set("dynamic", what="weights with scales that are made at each step")
    block, has_act_order = _read_block(options)
    if has_act_order and not is_packed:
        raise options.refusal(
            "actorder='group'", f"act order is not supported in {layout}, it is in pack-quantized"
        )
    if is_packed and block[0] != 1:
        raise options.refusal("strategy", "packed weights need scales for channels or groups")
    has_zeros = not options.boolean("symmetric", True)
    if has_zeros and kind == "float":
        raise options.refusal("symmetric=False", "zero points of floats are not supported")
    options.without_effect("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    options.close()
    dtype = E4M3 if kind == "float" else INT8
    return GroupWeights(dtype, bits, block, is_packed, has_zeros, has_act_order)


def _read_block(options: Options) -> tuple[tuple[int | None, int | None], bool]:
    """Read what one scale covers, where None is the whole of an axis, and whether groups have act order.

    An option that the strategy does not use is refused, as in the format's library.
    """
    given = options.value("group_size")
    size = None if given is None else options.group_size("group_size")
    inferred = "group" if size is not None else "tensor" if given is None else "channel"
    strategy = options.choice(
        "strategy", inferred, ("tensor", "channel", "group", "block"), "the strategy of scales"
    )
    structure, order = options.sizes("block_structure", 2), _read_order(options)
    unused = {
        "group_size": None if strategy == "group" else size,
        "block_structure": None if strategy == "block" or structure is None else list(structure),
        "actorder": None if strategy == "group" else order,
    }
    for name, value in unused.items():
        if value is not None:
            raise options.refusal(f"{name}={value!r}", f"the strategy {strategy!r} does not use it")
    if strategy == "block":
        if structure is None:
            raise options.refusal("block_structure is missing", "the strategy 'block' needs it")
        return (structure[0], structure[1]), False
    if strategy == "group":
        if size is None:
            what = "is missing" if given is None else f"is {given}"
            raise options.refusal(f"group_size {what}", "the strategy 'group' needs a positive integer")
        return (1, size), order == "group"
    return (None, None) if strategy == "tensor" else (1, None), False


def _read_order(options: Options) -> str | None:
    """Read `actorder`: "group", whose weight_g_idx says the groups, or "weight", which leaves them in order.

    Without the option it returns None. Older files say true for "group".
    """
    found = options.value("actorder")
    if isinstance(found, bool):
        return "group" if found else None
    if found is None:
        return None
    if not isinstance(found, str):
        raise UnsupportedModelError(
            f"{options.where}: actorder={found!r:.60} must be a string, true or false"
        )
    names = {"group": "group", "dynamic": "group", "weight": "weight", "static": "weight"}
    return names[options.choice("actorder", "", tuple(names), "the order of groups")]


def _check_expression(target: str, options: Options) -> None:
    """Raise UnsupportedModelError if a target is an expression that cannot be read."""
    if not target.startswith(_REGEX):
        return
    try:
        re.compile(target.removeprefix(_REGEX))
    except re.error as error:
        raise options.refusal(f"target {target!r}", f"it is not an expression: {error}") from error
