"""Mixture of experts in place of a layer's MLP: the router, the experts' weights, and their sum.

Owns: the choice of experts, in float32 whatever the model runs in, and the placement of weights on devices.
Each device has a part of the width of every expert, so that all have the same work. Does not know: how rows
are grouped and multiplied (`pallas_kernels.grouped_matmul`), or checkpoints.

Code that is traced inside `computing_experts` uses the given back end; outside of it, XLA. The choice is a
context variable for the reasons given in `small_batch_matmul`.
"""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from model_defs.all_reduce import PartialSums, Summand, current_all_reduce
from model_defs.config import ExpertsConfig
from model_defs.errors import UnsupportedModelError
from model_defs.layers import Build, declare
from model_defs.sharding import TENSOR_AXIS, tensor_parallel_size
from pallas_kernels.grouped_matmul import expert_mlp

XLA = "xla"
NumTokens = Annotated[jax.Array, "i32[]"]
"""Number of tokens of a step."""
Choices = Annotated[jax.Array, "i32[T, num_chosen]"]
"""Experts of T tokens, the most likely first."""
Weights = Annotated[jax.Array, "f32[T, num_chosen]"]
"""Factors of the chosen experts."""
_current: ContextVar[tuple[str, NumTokens | None]] = ContextVar("experts", default=(XLA, None))
_WHOLE = PartitionSpec()
_GATE_UP, _DOWN = PartitionSpec(None, None, TENSOR_AXIS, None), PartitionSpec(None, None, TENSOR_AXIS)


@contextlib.contextmanager
def computing_experts(backend: str, num_tokens: NumTokens | None = None) -> Iterator[None]:
    """Make code that is traced in this context use a back end of `grouped_matmul`.

    Tokens from `num_tokens` on are padding: they choose no experts, so that these are not read for nothing.
    """
    token = _current.set((backend, num_tokens))
    try:
        yield
    finally:
        _current.reset(token)


def choose_experts(
    logits: Annotated[jax.Array, "f32[T, num_experts]"], config: ExpertsConfig
) -> tuple[Choices, Weights]:
    """Return the most likely experts of each token, and their factors.

    The softmax is over all experts. With `normalized`, the factors of the chosen ones add up to 1. Of equally
    likely experts the first ones are chosen.
    """
    weights, experts = lax.top_k(jax.nn.softmax(logits, axis=-1), config.num_chosen)
    if config.normalized:
        weights /= weights.sum(axis=-1, keepdims=True)
    return experts, weights


class Experts(nnx.Module):
    """Gated MLPs of all experts of a layer, with weights [out, in] as in checkpoints.

    gate_up [num_experts, 2, width, hidden_size], the gate first; down [num_experts, hidden_size, width]. Both
    are split by width.
    """

    def __init__(self, build: Build, config: ExpertsConfig) -> None:
        self.build = build
        hidden, num, width = build.config.hidden_size, config.num_experts, config.width
        self.gate_up = declare(build, (num, 2, width, hidden), tuple(_GATE_UP))
        self.down = declare(build, (num, hidden, width), tuple(_DOWN))

    def __call__(
        self, x: Annotated[jax.Array, "f[T, hidden_size]"], experts: Choices, weights: Weights
    ) -> Summand:
        """Return each token's weighted sum in the weights' dtype, or partial sums; see `Linear.deferred`."""
        mesh, (backend, num_tokens) = self.build.mesh, _current.get()
        run, sums = functools.partial(expert_mlp, backend=backend), current_all_reduce()
        x, kernels = x.astype(self.build.dtype), (self.gate_up[...], self.down[...])
        arguments = x, experts, weights, *kernels, num_tokens
        specs = _WHOLE, _WHOLE, _WHOLE, _GATE_UP, _DOWN, _WHOLE
        adds_up = tensor_parallel_size(mesh) > 1
        if adds_up and sums is not None and sums.supports(x.shape[0], x.shape[1], x.dtype):
            return PartialSums(sums, sums.partial(run, arguments, specs), None)

        def on_device(*parts: Any) -> jax.Array:
            y = run(*parts)
            return lax.psum(y, TENSOR_AXIS) if adds_up else y

        # Kernels do not declare the axes over which their outputs vary.
        shards = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=_WHOLE, check_vma=False)
        result: jax.Array = shards(*arguments)
        return result


class ExpertMLP(nnx.Module):
    """Router f[num_experts, hidden_size] and the experts that it chooses for each token."""

    def __init__(self, build: Build) -> None:
        config = build.config.experts
        assert config is not None, "a layer of this kind needs experts"
        if build.config.activation != "silu":
            raise UnsupportedModelError(
                f"activation={build.config.activation!r} is not supported in experts; 'silu' is"
            )
        self.config = config
        self.router = declare(build, (config.num_experts, build.config.hidden_size))
        self.experts = Experts(build, config)

    def __call__(self, x: Annotated[jax.Array, "f[T, hidden_size]"]) -> Summand:
        """Map [T, hidden_size] to [T, hidden_size] in the weights' dtype, or to partial sums."""
        # In bfloat16 the last chosen expert and the next one would often tie.
        logits = jnp.matmul(
            x.astype(jnp.float32), self.router[...].astype(jnp.float32).T, precision=lax.Precision.HIGHEST
        )
        return self.experts(x, *choose_experts(logits, self.config))
