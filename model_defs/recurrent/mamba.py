"""Mamba: a language model with a state of constant size, so that cells batch it without pages.

Owns: the model, its only cell, its requests, and their unfolding.
Does not know: how an engine forms batches, text, or sampling (decoding is greedy).

It follows Gu and Dao (2023), with selective state spaces of version 1, as in transformers' `MambaForCausalLM`
for `state-spaces/mamba-130m-hf` and similar models. The same cell reads a prompt and writes a reply, so
requests in both phases run in one batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from model_defs.config import read_json
from model_defs.errors import CheckpointError
from model_defs.parameters import named_parameters
from model_defs.recurrent.cells import Arrays, GraphBuilder, RecurrentCell, State, field
from model_defs.recurrent.layers import RecurrentEmbedding, best, declare, project
from model_defs.recurrent.mamba_config import MambaConfig, mamba_recipes, parse_mamba
from model_defs.recurrent.model import RecurrentModel
from model_defs.recurrent.requests import check_count, check_id, check_ids, check_requests
from model_defs.recurrent.tensors import TensorSource, open_tensors

OWN_TOKEN = -1
"""Token of a node that stands for the token written by the previous step."""

type Weights = Mapping[str, jax.Array]


class _Output(Protocol):
    """Output of a request by an engine."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Emitted tokens of all nodes."""


@dataclasses.dataclass(frozen=True, slots=True)
class MambaRequest:
    """Prompt to continue.

    Attributes:
      prompt_ids: i32[n].
      max_new_tokens: most tokens of the reply.
      eos_id: token that ends the reply early, or None.
    """

    prompt_ids: np.ndarray
    max_new_tokens: int
    eos_id: int | None

    def reply(self, output: _Output) -> tuple[int, ...]:
        """Return the tokens of the reply: the output without that of nodes before the prompt's last token."""
        return output.tokens[len(self.prompt_ids) - 1 :]


class MambaLayers(nnx.Module):
    """Arrays of all layers, each [num_layers, ...]. The cell loops over layers, so that it compiles once."""

    def __init__(self, config: MambaConfig) -> None:
        """Declare the arrays. Those that determine the decay of states are float32 in every model."""
        num, hidden, inner = config.num_layers, config.hidden_size, config.intermediate_size
        rank, size, dtype = config.time_step_rank, config.state_size, config.dtype
        self.norm = declare((num, hidden), "float32", 1.0, constant=True)
        self.in_proj = declare((num, hidden, 2 * inner), dtype, hidden**-0.5)
        self.conv1d = declare((num, config.conv_kernel, inner), "float32", config.conv_kernel**-0.5)
        self.x_proj = declare((num, inner, rank + 2 * size), dtype, inner**-0.5)
        self.dt_proj = declare((num, rank, inner), dtype, rank**-0.5)
        self.dt_proj_bias = declare((num, inner), "float32", -4.6, constant=True)  # time steps around 0.01
        self.A_log = declare((num, size, inner), "float32", 1.0)
        self.D = declare((num, inner), "float32", 1.0, constant=True)
        self.out_proj = declare((num, inner, hidden), dtype, inner**-0.5)
        if config.use_bias:
            self.in_proj_bias = declare((num, 2 * inner), "float32", 0.0, constant=True)
            self.out_proj_bias = declare((num, hidden), "float32", 0.0, constant=True)
        if config.use_conv_bias:
            self.conv1d_bias = declare((num, inner), "float32", 0.0, constant=True)

    def arrays(self) -> dict[str, jax.Array]:
        """Return all declared arrays, by name."""
        return {name: parameter[...] for name, parameter in named_parameters(self)}


class Mamba(RecurrentModel[MambaConfig]):
    """Mamba model, which is its own cell. `MambaRequest.reply` extracts the reply, <eos> included."""

    config_class: ClassVar[type[MambaConfig]] = MambaConfig
    immediates = ("token",)
    emits = ("token",)

    def __init__(self, config: MambaConfig) -> None:
        super().__init__(config)
        self.embeddings = RecurrentEmbedding(config.vocab_size, config.hidden_size, config.dtype, scale=0.1)
        self.layers = MambaLayers(config)
        self.norm_f = declare((config.hidden_size,), "float32", 1.0, constant=True)
        if not config.tie_word_embeddings:
            self.lm_head = declare((config.hidden_size, config.vocab_size), config.dtype, 0.1)

    @classmethod
    def random(
        cls,
        *,
        hidden_size: int,
        vocab_size: int,
        num_layers: int,
        state_size: int = 16,
        conv_kernel: int = 4,
        seed: int = 0,
        dtype: str = "float32",
        eos_token_id: int | None = None,
    ) -> Self:
        """Create a model with seeded weights; other sizes are those of a checkpoint of this width."""
        sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size, "num_hidden_layers": num_layers}
        more = {"state_size": state_size, "conv_kernel": conv_kernel, "eos_token_id": eos_token_id}
        return cls(parse_mamba({"model_type": "mamba", **sizes, **more}, dtype))._fill_randomly(seed)

    @classmethod
    def from_hf(
        cls, source: TensorSource, config: Mapping[str, Any] | None = None, *, dtype: str = "float32"
    ) -> Self:
        """Import a checkpoint of transformers' `MambaForCausalLM`.

        Args:
          source: its directory, or its tensors by name.
          config: contents of config.json; required if `source` is not a directory.
          dtype: dtype to run in.

        Raises:
          CheckpointError: a tensor is missing, misshapen or unexpected.
          UnsupportedModelError: an option is not implemented.
        """
        if config is None:
            if isinstance(source, Mapping):
                raise CheckpointError("tensors alone do not determine the model's sizes; pass its config")
            config = read_json(Path(source) / "config.json")
        model = cls(parse_mamba(config, dtype))
        tensors = open_tensors(source)
        if model.config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        recipes = mamba_recipes(model.config)
        return model._fill_from(tensors, {name: recipes[name] for name, _ in named_parameters(model)})

    @property
    def state(self) -> State:
        """Windows and states of every layer, and the last written token."""
        config = self.config
        num, inner = config.num_layers, config.intermediate_size
        return {
            "window": field(num, config.conv_kernel - 1, inner, dtype=config.dtype),
            "state": field(num, config.state_size, inner),
            "token": field(dtype=jnp.int32),
        }

    def __call__(self, inputs: tuple[Arrays], token: jax.Array) -> dict[str, jax.Array]:
        """Process one token of each of B texts, i32[B]; `OWN_TOKEN` means the last written token."""
        (before,) = inputs
        token = jnp.where(token == OWN_TOKEN, before["token"], token)

        def run_layer(carry: tuple[jax.Array, ...], one: tuple[jax.Array, Weights]) -> tuple[Any, None]:
            # Windows and states are in the carry instead of the scanned inputs, so they are updated in place.
            x, windows, states = carry
            i, weights = one
            window, state = (lax.dynamic_index_in_dim(old, i, 1, keepdims=False) for old in (windows, states))
            y, window, state = _mix(_norm(x, weights["norm"], self.config.norm_eps), window, state, weights)
            windows = lax.dynamic_update_index_in_dim(windows, window, i, 1)
            states = lax.dynamic_update_index_in_dim(states, state, i, 1)
            return (x + y, windows, states), None

        x = self.embeddings(token).astype(jnp.float32)
        layers = jnp.arange(self.config.num_layers), self.layers.arrays()
        (x, windows, states), _ = lax.scan(run_layer, (x, before["window"], before["state"]), layers)
        x = _norm(x, self.norm_f[...], self.config.norm_eps)
        is_tied = self.config.tie_word_embeddings
        head = self.embeddings.weight[...].T if is_tied else self.lm_head[...]
        return {"window": windows, "state": states, "token": best(project(x, head))}

    def cells(self, *, max_batch: int = 64) -> list[RecurrentCell]:
        """Return the only cell: the model itself."""
        return [RecurrentCell(self, "mamba", max_batch)]

    def request(
        self, prompt_ids: Any, max_new_tokens: int, *, eos_id: int | None = None, ignore_eos: bool = False
    ) -> MambaRequest:
        """Make a request to continue a prompt.

        Args:
          prompt_ids: tokens of the prompt, at least one.
          max_new_tokens: most tokens of the reply.
          eos_id: token that ends the reply early; None means the model's.
          ignore_eos: never end the reply early.

        Raises:
          RequestError: an argument is invalid.
        """
        ids = check_ids("prompt_ids", prompt_ids, self.config.vocab_size)
        most = check_count("max_new_tokens", max_new_tokens, 1)
        if ignore_eos:
            return MambaRequest(ids, most, None)
        end = self.config.eos_token_id
        if eos_id is not None:
            end = check_id("eos_id", eos_id, self.config.vocab_size)
        return MambaRequest(ids, most, end)

    def unfold(self, request: MambaRequest, graph: GraphBuilder) -> None:
        """Add a chain for the prompt but its last token, and a chain for this token and the reply."""
        check_requests(MambaRequest, request)
        prompt = request.prompt_ids
        before = graph.chain(self, prompt[:-1])[-1] if len(prompt) > 1 else None
        words = np.full(request.max_new_tokens, OWN_TOKEN, np.int32)
        words[0] = prompt[-1]
        graph.chain(self, words, after=before, until=request.eos_id)


def _norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Compute the root-mean-square norm of f32[B, hidden]."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + eps) * scale


def _mix(
    x: jax.Array, window: jax.Array, state: jax.Array, weights: Weights
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run one step of a layer's mixer.

    Args:
      x: f32[B, hidden].
      window: [B, conv_kernel - 1, inner], the last values of each channel.
      state: f32[B, state_size, inner].
      weights: weights of this layer.

    Returns: the term to add to the residual stream, f32[B, hidden], and the next window and state.
    """
    size = state.shape[1]
    u, gate = jnp.split(project(x, weights["in_proj"], weights.get("in_proj_bias")), 2, axis=1)
    whole = jnp.concatenate([window, u.astype(window.dtype)[:, None]], axis=1)
    u = jnp.sum(whole.astype(jnp.float32) * weights["conv1d"], axis=1)
    u = jax.nn.silu(u + weights["conv1d_bias"] if "conv1d_bias" in weights else u)
    rank = weights["dt_proj"].shape[0]
    step, b, c = jnp.split(project(u, weights["x_proj"]), [rank, rank + size], axis=1)
    step = jax.nn.softplus(project(step, weights["dt_proj"], weights["dt_proj_bias"]))
    fading = jnp.exp(-jnp.exp(weights["A_log"]) * step[:, None])
    state = fading * state + (step * u)[:, None] * b[:, :, None]
    y = jnp.sum(state * c[:, :, None], axis=1) + weights["D"] * u
    y = project(y * jax.nn.silu(gate), weights["out_proj"], weights.get("out_proj_bias"))
    return y, whole[:, 1:], state
