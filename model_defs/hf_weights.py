"""Loading of a model from the tensors of a Hugging Face checkpoint.

Owns the check that a checkpoint has exactly the tensors of the config. It reads only headers, except that the
bytes of a tied head are compared with its table, and small tensors that say how others are stored are read.
Each parameter is made of one to three tensors, of sections of one, or of those of all experts, by the recipes
of hf_recipes. In a quantized checkpoint each of these has a source of several. They are copied to the devices
in the file's form, and decoded, cast, transposed and fused there, one parameter at a time.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs.config import ModelConfig
from model_defs.errors import CheckpointError, UnsupportedModelError
from model_defs.hf_recipes import recipe
from model_defs.other_formats import refuse_quantized_tensors
from model_defs.parameters import Filler, Parameter
from model_defs.quantized import QuantizedFormat, Source, SourcePart, plain
from model_defs.registry import family
from model_defs.safetensors_reader import TensorEntry, is_constant
from model_defs.sharding import TENSOR_AXIS, tensor_parallel_size
from model_defs.tensor_recipes import Recipe

_MAX_NAMES_SHOWN = 8
# In this order: a multimodal checkpoint may have three of them.
_PREFIXES = ("model.", "language_model.", "text_model.", "model.", "decoder.", "transformer.")
_HEAD = "lm_head.weight"
_HEAD_MODULE = _HEAD.removesuffix("weight")
_COMPARED_BYTES = 2**24  # per block, since a table may be a gigabyte


type TensorDecoder = Callable[..., jax.Array]


def hf_filler(
    entries: dict[str, TensorEntry],
    config: ModelConfig,
    parameter_names: list[str],
    quantized: QuantizedFormat | None = None,
) -> Filler:
    """Return a filler from a checkpoint of `config`, after checking every tensor before any is read.

    quantized: the format of the checkpoint, whose weights are decoded while they are loaded.
    Raises CheckpointError, which names missing, extra or misshapen tensors with both shapes, an unsupported
    dtype, two tensors of one name, or a head that differs from its tied table. The filler raises it for codes
    that are not numbers.
    """
    by_short_name = _by_short_name(entries, family(config.architecture).constants)
    recipes = {name: recipe(name, config) for name in parameter_names}
    sources = _sources(recipes, by_short_name, quantized)
    _check(by_short_name, sources, config, quantized, table=recipes["embed.table"].names[0])

    def fill(name: str, parameter: Parameter) -> jax.Array:
        target: Any = parameter.get_value()  # still a ShapeDtypeStruct
        recipe_, sharding = recipes[name], target.sharding
        axis = _split_axis(recipe_, sharding)
        parts, decoders = [], []
        for index, (short, shape) in enumerate(zip(recipe_.names, recipe_.shapes, strict=True)):
            source = sources[short]
            arrays = [_read(by_short_name[part.name], part) for part in source.parts]
            if recipe_.sections:
                assert axis is not None
                begin, end = recipe_.sections[index]
                if source.decode is None:
                    arrays = [arrays[0][(slice(None),) * axis + (slice(begin, end),)]]
                else:
                    source = source.section(axis, begin, end)
            if name == "position_table":
                arrays = [arrays[0][: target.shape[0]]]  # a lowered context length takes the first rows
            specs = source.specs(shape, axis, tensor_parallel_size(sharding.mesh))
            parts.append([_copied(one, sharding.mesh, spec) for one, spec in zip(arrays, specs, strict=True)])
            decoders.append(source.decode)
        assemble = _assembler(recipe_.assemble, tuple(decoders), target.dtype, sharding)
        return assemble(parts).block_until_ready()

    return fill


def _copied(array: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Return a view of a file as an array on the devices."""
    # A copy, since on a CPU the device array may share the host array.
    return jax.device_put(np.array(array), NamedSharding(mesh, spec))


def _split_axis(recipe_: Recipe, sharding: NamedSharding) -> int | None:
    """Return the axis of a recipe's tensors that is split over the devices."""
    if recipe_.assemble is not None:
        return recipe_.split_axis
    return next((axis for axis, name in enumerate(sharding.spec) if name == TENSOR_AXIS), None)


def _read(entry: TensorEntry, part: SourcePart) -> np.ndarray:
    """Return a part's values as a view of the file; raise CheckpointError for codes of NaN."""
    values = entry.read(part.dtypes)
    fault = None if part.fault is None else part.fault(values)
    if fault is not None:
        raise CheckpointError(
            f"tensor {entry.name!r} in {entry.path.name} has {fault}; download or quantize the model again"
        )
    return values


@functools.lru_cache(maxsize=256)
def _assembler(
    assemble: Callable[..., jax.Array] | None,
    decoders: tuple[TensorDecoder | None, ...],
    dtype: jnp.dtype,
    sharding: NamedSharding,
) -> Callable[[list[list[jax.Array]]], jax.Array]:
    """Return the jitted assembly of a recipe from the parts of its tensors, with decoders and the cast."""

    def run(parts: list[list[jax.Array]]) -> jax.Array:
        # A decoded tensor is cast first, so that fusing moves values of the narrower dtype.
        tensors = [
            arrays[0] if decode is None else decode(*arrays).astype(dtype)
            for decode, arrays in zip(decoders, parts, strict=True)
        ]
        return (tensors[0] if assemble is None else assemble(*tensors)).astype(dtype)

    return jax.jit(run, out_shardings=sharding)


def _short(name: str) -> str:
    """Return a tensor's name without the prefixes that differ between exports of one model."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _by_short_name(entries: dict[str, TensorEntry], constants: tuple[str, ...]) -> dict[str, TensorEntry]:
    """Return tensors by their names without prefixes, except for constants, also those of the family.

    Raises CheckpointError for two of one name.
    """
    found: dict[str, TensorEntry] = {}
    for entry in entries.values():
        if is_constant(entry.name) or entry.name.endswith(constants):
            continue
        other = found.setdefault(_short(entry.name), entry)
        if other is not entry:
            raise CheckpointError(
                f"tensors {other.name!r} in {other.path.name} and {entry.name!r} in {entry.path.name} are "
                f"the same one of this model; remove one"
            )
    return found


def _sources(
    recipes: dict[str, Recipe], entries: dict[str, TensorEntry], quantized: QuantizedFormat | None
) -> dict[str, Source]:
    """Return the source of every tensor that the recipes name.

    Raises UnsupportedModelError for quantized weights of layers whose plain weights are [in, out].
    """
    wanted = {
        name: (shape, recipe_.is_in_out)
        for recipe_ in recipes.values()
        for name, shape in zip(recipe_.names, recipe_.shapes, strict=True)
    }
    found = {
        name: (None if quantized is None else quantized.source(name, shape, entries)) or plain(name, shape)
        for name, (shape, _) in wanted.items()
    }
    for name, (_, is_in_out) in wanted.items():
        if is_in_out and found[name].decode is not None:  # a square one would load, transposed
            raise UnsupportedModelError(
                f"tensor {name!r} is quantized ({found[name].asked_by}), with weights [out, in]; that is not "
                f"supported in a family whose weights are [in, out]; use the model's unquantized safetensors"
            )
    if quantized is not None and all(source.decode is None for source in found.values()):
        raise CheckpointError(
            f"config.json or a side file says that the weights are quantized ({quantized.name}), but no "
            f"tensor is; remove that description if the weights are plain"
        )
    return found


def _check(
    entries: dict[str, TensorEntry],
    sources: dict[str, Source],
    config: ModelConfig,
    quantized: QuantizedFormat | None,
    *,
    table: str,
) -> None:
    """Raise CheckpointError unless the tensors are exactly those of the sources, in their shapes.

    `table` is the name of the table of tokens, which a copy of a tied head must equal.
    """
    prefix = family(config.architecture).tensor_prefix
    if quantized is None:
        refuse_quantized_tensors(entries.values())
    parts = [(source, part) for source in sources.values() for part in source.parts]
    missing = [part.name for _, part in parts if part.name not in entries]
    if missing:
        shown = [name if name.startswith(_HEAD_MODULE) else prefix + name for name in missing]
        raise CheckpointError(f"{len(missing)} tensor(s) are missing: {_listed(shown)}")
    for source, part in parts:
        entry = entries[part.name]
        entry.check_readable(part.dtypes)
        if entry.shape != part.shape:
            raise CheckpointError(
                f"tensor {entry.name!r} in {entry.path.name} has shape {list(entry.shape)}, "
                f"{source.asked_by} asks for {list(part.shape)}"
            )
    used = {part.name for _, part in parts}.union(*(source.others for source in sources.values()))
    has_copy = config.tie_word_embeddings and _HEAD in entries and table in entries
    extra = [
        entry for name, entry in entries.items() if name not in used and not (name == _HEAD and has_copy)
    ]
    if extra:
        refuse_quantized_tensors(extra, None if quantized is None else quantized.name)
        raise CheckpointError(
            f"{len(extra)} tensor(s) are not part of this model: {_listed([entry.name for entry in extra])}"
        )
    if has_copy:
        _check_tied(entries[_HEAD], entries[table])


def _check_tied(head: TensorEntry, table: TensorEntry) -> None:
    """Raise CheckpointError if a tied head differs from its table, since the file may mean it to be used."""
    shared = "must be the same with tie_word_embeddings=true; set that to false if the head is its own"
    if (head.dtype, head.shape) != (table.dtype, table.shape):
        raise CheckpointError(
            f"tensor {head.name!r} is {head.dtype}{list(head.shape)}, {table.name!r} is "
            f"{table.dtype}{list(table.shape)}: they {shared}"
        )
    for begin in range(0, head.num_bytes, _COMPARED_BYTES):
        one, other = (
            entry.read_bytes(min(_COMPARED_BYTES, entry.num_bytes - begin), begin) for entry in (head, table)
        )
        if not np.array_equal(one, other):
            raise CheckpointError(f"tensors {head.name!r} and {table.name!r} differ: they {shared}")


def _listed(names: list[str]) -> str:
    """Format the first few names."""
    shown = ", ".join(repr(name) for name in names[:_MAX_NAMES_SHOWN])
    return shown + (", ..." if len(names) > _MAX_NAMES_SHOWN else "")
