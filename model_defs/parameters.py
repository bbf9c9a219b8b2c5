"""Iteration over a model's parameters by name, and setting of their values from any source.

Owns the names ("layers.0.qkv.proj.kernel") that checkpoints, mappings and seeds refer to. A filler makes
one array at a time, already on its devices, so a loader holds at most one parameter besides the model.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from model_defs.weight_formats import Kept, encoder

_KERNEL, _SCALE = "kernel", "scale"
Parameter = nnx.Param[jax.Array]
Filler = Callable[[str, Parameter], jax.Array]
Progress = Callable[[int, int, str], None]
"""Callback `progress(num_done, num_total, what)`, called after each parameter."""


def named_parameters(model: nnx.Module) -> Iterator[tuple[str, Parameter]]:
    """Yield every (name, parameter) in a fixed order; names are attribute paths joined by dots."""
    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Param):
            yield ".".join(str(part) for part in path), variable


def fill_parameters(model: nnx.Module, filler: Filler, progress: Progress | None = None) -> None:
    """Replace the abstract value of every parameter by `filler(name, parameter)`, in place.

    The filler makes weights in the model's dtype, and knows no others. Of a kernel that is kept in 8 bits, it
    makes the weights that codes and scale are computed of, one kernel at a time.
    """
    parameters = dict(named_parameters(model))
    for done, (name, parameter) in enumerate(parameters.items(), start=1):
        kept: Kept | None = parameter.get_metadata().get("kept")
        if kept is None:
            parameter.set_value(filler(name, parameter))
        elif is_kernel(name):
            scale = parameters[name.removesuffix(_KERNEL) + _SCALE]
            plain: Any = kept.plain
            weights = filler(name, nnx.Param(plain, ones=False))
            targets: list[Any] = [parameter.get_value(), scale.get_value()]
            codes, factors = encoder(kept, tuple(target.sharding for target in targets))(weights)
            weights.delete()
            parameter.set_value(codes)
            scale.set_value(factors)
        if progress is not None:
            progress(done, len(parameters), name)


def is_kernel(name: str) -> bool:
    """Return whether a parameter's name is that of a kernel."""
    return name.rpartition(".")[2] == _KERNEL


def has_codes(model: nnx.Module) -> bool:
    """Return whether some kernels are kept in 8 bits."""
    return any(parameter.get_metadata().get("kept") for _, parameter in named_parameters(model))


def source_names(model: nnx.Module) -> list[str]:
    """Return the names of the parameters that a filler makes: all but the scales of kernels in 8 bits."""
    return [
        name
        for name, parameter in named_parameters(model)
        if not parameter.get_metadata().get("kept") or is_kernel(name)
    ]
