"""Loading of a model from the tensors of a Hugging Face checkpoint.

Owns the check that a checkpoint has exactly the tensors of the config. It reads only headers, except that
the bytes of a tied head are compared with its table. Each parameter is made of one to three tensors, or of
sections of one, by the recipes of hf_recipes. They are copied to the devices in the file's form, and cast,
transposed and fused there, one parameter at a time.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from model_defs.config import ModelConfig
from model_defs.errors import CheckpointError
from model_defs.hf_recipes import recipe
from model_defs.other_formats import refuse_quantized_tensors
from model_defs.parameters import Filler, Parameter
from model_defs.registry import family
from model_defs.safetensors_reader import TensorEntry, is_constant
from model_defs.sharding import TENSOR_AXIS
from model_defs.tensor_recipes import Recipe

_MAX_NAMES_SHOWN = 8
# In this order: a multimodal checkpoint may have three of them.
_PREFIXES = ("model.", "language_model.", "model.", "decoder.", "transformer.")
_HEAD = "lm_head.weight"
_COMPARED_BYTES = 2**24  # per block, since a table may be a gigabyte


def hf_filler(entries: dict[str, TensorEntry], config: ModelConfig, parameter_names: list[str]) -> Filler:
    """Return a filler from a checkpoint of `config`, after checking every tensor before any is read.

    Raises CheckpointError, which names missing, extra or misshapen tensors with both shapes, an unsupported
    dtype, two tensors of one name, or a head that differs from its tied table.
    """
    by_short_name = _by_short_name(entries, family(config.architecture).constants)
    recipes = {name: recipe(name, config) for name in parameter_names}
    _check(by_short_name, recipes, config)

    def fill(name: str, parameter: Parameter) -> jax.Array:
        target: Any = parameter.get_value()  # still a ShapeDtypeStruct
        recipe_ = recipes[name]
        sharding, assemble = target.sharding, recipe_.assemble
        if assemble is not None:
            axes = [None] * (recipe_.split_axis or 0) + [TENSOR_AXIS] * (recipe_.split_axis is not None)
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*axes))
        parts = []
        for index, short in enumerate(recipe_.names):
            tensor = by_short_name[short].read()
            if recipe_.sections:
                where = (slice(None),) * (recipe_.split_axis or 0) + (slice(*recipe_.sections[index]),)
                tensor = tensor[where]
            if name == "position_table":
                tensor = tensor[: target.shape[0]]  # a lowered context length takes the first rows
            # A copy, since on a CPU the device array may share the host array, which is a view of the file.
            parts.append(jax.device_put(np.array(tensor), sharding))
        return _assembler(assemble, target.dtype, target.sharding)(*parts).block_until_ready()

    return fill


@functools.lru_cache(maxsize=64)
def _assembler(
    assemble: Callable[..., jax.Array] | None, dtype: jnp.dtype, sharding: NamedSharding
) -> Callable[..., jax.Array]:
    """Return the jitted assembly of a recipe, including the cast."""

    def run(*parts: jax.Array) -> jax.Array:
        return (parts[0] if assemble is None else assemble(*parts)).astype(dtype)

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


def _check(entries: dict[str, TensorEntry], recipes: dict[str, Recipe], config: ModelConfig) -> None:
    """Raise CheckpointError unless the tensors are exactly those of the recipes, in their shapes."""
    prefix = family(config.architecture).tensor_prefix
    wanted = {
        name: shape
        for recipe_ in recipes.values()
        for name, shape in zip(recipe_.names, recipe_.shapes, strict=True)
    }
    refuse_quantized_tensors(entries.values())
    missing = [name if name == _HEAD else prefix + name for name in wanted if name not in entries]
    if missing:
        raise CheckpointError(f"{len(missing)} tensor(s) are missing: {_listed(missing)}")
    for name, shape in wanted.items():
        entries[name].check_readable()
        if entries[name].shape != shape:
            raise CheckpointError(
                f"tensor {entries[name].name!r} in {entries[name].path.name} has shape "
                f"{list(entries[name].shape)}, the config asks for {list(shape)}"
            )
    extra = [
        entry.name
        for name, entry in entries.items()
        if name not in wanted and not (name == _HEAD and config.tie_word_embeddings)
    ]
    if extra:
        raise CheckpointError(f"{len(extra)} tensor(s) are not part of this model: {_listed(extra)}")
    if config.tie_word_embeddings and _HEAD in entries:
        _check_tied(entries[_HEAD], entries[recipes["embed.table"].names[0]])


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
