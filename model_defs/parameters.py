"""Iteration over a model's parameters by name, and setting of their values from any source.

Owns the names ("layers.0.qkv.proj.kernel") that checkpoints, mappings and seeds refer to. A filler makes
one array at a time, already on its devices, so a loader holds at most one parameter besides the model.
"""

from collections.abc import Callable, Iterator

import jax
from flax import nnx

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
    """Replace the abstract value of every parameter by `filler(name, parameter)`, in place."""
    parameters = list(named_parameters(model))
    for done, (name, parameter) in enumerate(parameters, start=1):
        parameter.set_value(filler(name, parameter))
        if progress is not None:
            progress(done, len(parameters), name)
