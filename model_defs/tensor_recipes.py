"""Recipes of parameters from Hugging Face tensors: names, shapes, fusing and transposing.

Owns `Recipe`, and the parts of weight maps that several families share. Hugging Face's linear weights are
[out, in], ours are [in, out] with separate head dimensions. Names are given without the prefix ("model." or
"model.decoder."). Some checkpoints have several of these tensors in one; a recipe takes sections of it.
Assembly runs on the devices, where a transpose is cheap, so a recipe also names the axis along which the
tensors may be split beforehand. Knows nothing of files, and no family.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier

from model_defs.config import ExpertsConfig, ModelConfig

Shape = tuple[int, ...]


class Recipe(NamedTuple):
    """Tensor names without prefix, the shape of each, and the function that assembles one array of them.

    With `assemble` None the single tensor is the parameter. `split_axis` is the axis of the tensors that
    becomes the parameter's "tp" dimension; None means that whole tensors are needed. With `sections`, the
    function gets the elements from begin to end along `split_axis` of each tensor; a name may occur several
    times. `shapes` are those of whole tensors. `is_in_out` says that the tensors are linear
    weights [in, out].
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    assemble: Callable[..., jax.Array] | None = None
    split_axis: int | None = None
    sections: tuple[tuple[int, int], ...] = ()
    is_in_out: bool = False


class WeightMap(NamedTuple):
    """Recipes by our parameter names: outside of layers, and of one layer (names without "layers.i.").

    It may include parameters that a config does not have (a bias, a tied head).
    """

    outer: dict[str, Recipe]
    layer: dict[str, Recipe]


def vector(name: str, size: int) -> Recipe:
    """Return the recipe of an unchanged parameter f[size]."""
    return Recipe((name,), ((size,),))


def table(name: str, num_rows: int, width: int) -> Recipe:
    """Return the recipe of an unchanged parameter f[num_rows, width]."""
    return Recipe((name,), ((num_rows, width),))


def matrix(name: str, in_size: int, out_size: int, split_axis: int | None = None) -> Recipe:
    """Return the recipe of a transposed linear weight; `split_axis` refers to the source, [out, in]."""
    return Recipe((name,), ((out_size, in_size),), jnp.transpose, split_axis)


def from_one_tensor(recipe: Recipe, name: str) -> Recipe:
    """Return `recipe` for a checkpoint that has its tensors one after another in a single tensor `name`.

    They follow one another along the axis that is split over devices, so each is split by itself.
    """
    axis = recipe.split_axis
    assert axis is not None
    ends = list(itertools.accumulate(shape[axis] for shape in recipe.shapes))
    whole = tuple(ends[-1] if i == axis else size for i, size in enumerate(recipe.shapes[0]))
    count = len(recipe.names)
    sections = tuple(zip([0, *ends[:-1]], ends, strict=True))
    return recipe._replace(names=(name,) * count, shapes=(whole,) * count, sections=sections)


def transposed(recipe: Recipe) -> Recipe:
    """Return `recipe` for a checkpoint whose linear weights are [in, out] instead of [out, in]."""
    assemble, axis = recipe.assemble, recipe.split_axis
    assert assemble is not None and axis is not None

    def run(*tensors: jax.Array) -> jax.Array:
        return assemble(*(tensor.T for tensor in tensors))

    shapes = tuple(shape[::-1] for shape in recipe.shapes)
    split_axis = len(shapes[0]) - 1 - axis
    return recipe._replace(shapes=shapes, assemble=run, split_axis=split_axis, is_in_out=True)


def untransposed(name: str, in_size: int, out_size: int) -> Recipe:
    """Return the recipe of a linear weight that the checkpoint has as [in, out], as we do."""
    return table(name, in_size, out_size)._replace(is_in_out=True)


def token_recipes(config: ModelConfig) -> dict[str, Recipe]:
    """Return the recipes of the token table and the head."""
    return {
        "embed.table": table("embed_tokens.weight", config.vocab_size, config.embed_width),
        "head.table": table("lm_head.weight", config.vocab_size, config.embed_width),
    }


def attention_recipes(config: ModelConfig, out_name: str, *, num_adjacent: int = 0) -> dict[str, Recipe]:
    """Return the recipes of fused QKV and the output projection. Source rows are (head, dimension).

    The family rotates the first `num_adjacent` elements of each query and key in adjacent pairs. They are put
    in the order of `rotate`, which pairs the two halves. Scores do not depend on the order of elements.
    """
    hidden, heads, kv_heads, dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    rows = (heads * dim, kv_heads * dim, kv_heads * dim)

    order = np.arange(dim)
    order[:num_adjacent] = order[:num_adjacent].reshape(-1, 2).T.reshape(-1)

    def in_order(part: jax.Array, index: int) -> jax.Array:
        return part[:, :, order] if num_adjacent and index < 2 else part

    def fuse_kernel(*weights: jax.Array) -> jax.Array:
        parts = [in_order(weight.reshape(kv_heads, -1, dim, hidden), i) for i, weight in enumerate(weights)]
        # The barrier keeps XLA from fusing copy and transpose, which is several times slower on a CPU.
        return optimization_barrier(jnp.concatenate(parts, axis=1)).transpose(3, 0, 1, 2)

    def fuse_bias(*biases: jax.Array) -> jax.Array:
        parts = [in_order(bias.reshape(kv_heads, -1, dim), i) for i, bias in enumerate(biases)]
        return jnp.concatenate(parts, axis=1)

    def split_heads(weight: jax.Array) -> jax.Array:
        return weight.T.reshape(heads, dim, hidden)

    return {
        "qkv.proj.kernel": Recipe(
            tuple(f"{name}.weight" for name in names), tuple((size, hidden) for size in rows), fuse_kernel, 0
        ),
        "qkv.proj.bias": Recipe(
            tuple(f"{name}.bias" for name in names), tuple((size,) for size in rows), fuse_bias, 0
        ),
        "out.kernel": Recipe((f"self_attn.{out_name}.weight",), ((hidden, heads * dim),), split_heads, 1),
        "out.bias": vector(f"self_attn.{out_name}.bias", hidden),
    }


_STACKED = 16  # arrays of one concatenation


class ExpertNames(NamedTuple):
    """Names of the tensors of a layer's experts; `{}` stands for the number of the expert."""

    router: str
    gate: str
    up: str
    down: str


def expert_recipes(hidden: int, config: ExpertsConfig, names: ExpertNames) -> dict[str, Recipe]:
    """Return the recipes of the router and of the stacked experts, from one tensor for each expert."""
    num, wide = config.num_experts, config.width

    def stack(*weights: jax.Array) -> jax.Array:
        # In parts: XLA takes seconds to compile one concatenation of 256 arrays.
        starts = range(0, len(weights), _STACKED)
        parts = [optimization_barrier(jnp.stack(weights[i : i + _STACKED])) for i in starts]
        return jnp.concatenate(parts)

    def stack_pairs(*weights: jax.Array) -> jax.Array:
        return stack(*weights).reshape(num, 2, *weights[0].shape)

    pairs = tuple(name.format(i) for i in range(num) for name in (names.gate, names.up))
    downs = tuple(names.down.format(i) for i in range(num))
    return {
        "mlp.router": table(names.router, num, hidden),
        "mlp.experts.gate_up": Recipe(pairs, ((wide, hidden),) * len(pairs), stack_pairs, 0),
        "mlp.experts.down": Recipe(downs, ((hidden, wide),) * num, stack, 1),
    }


def gated_mlp_recipes(config: ModelConfig) -> dict[str, Recipe]:
    """Return the recipes of the fused gate and up projection, and of the down projection."""
    hidden, wide = config.hidden_size, config.intermediate_size

    def fuse_kernel(gate: jax.Array, up: jax.Array) -> jax.Array:
        return optimization_barrier(jnp.stack([gate, up])).transpose(2, 0, 1)

    def fuse_bias(gate: jax.Array, up: jax.Array) -> jax.Array:
        return jnp.stack([gate, up])

    return {
        "mlp.gate_up.kernel": Recipe(
            ("mlp.gate_proj.weight", "mlp.up_proj.weight"), ((wide, hidden),) * 2, fuse_kernel, 0
        ),
        "mlp.gate_up.bias": Recipe(("mlp.gate_proj.bias", "mlp.up_proj.bias"), ((wide,),) * 2, fuse_bias, 0),
        "mlp.down.kernel": matrix("mlp.down_proj.weight", wide, hidden, 1),
        "mlp.down.bias": vector("mlp.down_proj.bias", hidden),
    }
