"""Config and weight recipes of Mamba.

Owns: the config, its reading from Hugging Face's config.json, and the recipe of each parameter.
Does not know: the arithmetic.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from model_defs.errors import UnsupportedModelError
from model_defs.hf_options import boolean, choice, integer, number
from model_defs.recurrent.model import RecurrentConfig
from model_defs.tensor_recipes import Recipe, matrix, table, vector


@dataclasses.dataclass(frozen=True, kw_only=True)
class MambaConfig(RecurrentConfig):
    """Sizes of a `Mamba`.

    `intermediate_size` is the number of channels, each with a window of `conv_kernel` values and a state of
    `state_size` numbers. `time_step_rank` is the rank of the projection to their time steps. `eos_token_id`
    ends a reply; None means that replies end only by length.
    """

    architecture: ClassVar[str] = "mamba"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    state_size: int
    conv_kernel: int
    time_step_rank: int
    norm_eps: float = 1e-5
    use_bias: bool = False
    use_conv_bias: bool = True
    tie_word_embeddings: bool = True
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        """Raise UnsupportedModelError for invalid sizes. A window must hold at least one past value."""
        super().__post_init__()
        if self.conv_kernel < 2:
            raise UnsupportedModelError(f"conv_kernel={self.conv_kernel} must be at least 2")


def parse_mamba(values: Mapping[str, Any], dtype: str) -> MambaConfig:
    """Read the config of a config.json whose `model_type` is "mamba".

    Raises:
      UnsupportedModelError: an option is not implemented, or of a wrong type; the message names it.
    """
    options = dict(values)
    if options.get("model_type") != "mamba":
        raise UnsupportedModelError(f"model_type={options.get('model_type')!r} is not 'mamba'")
    choice(options, "hidden_act", "silu", {"silu": "silu", "swish": "silu"})
    hidden_size = integer(options, "hidden_size")
    rank = options.get("time_step_rank", "auto")
    eos = options.get("eos_token_id", 0)
    if isinstance(eos, list) and len(eos) == 1:
        eos = eos[0]
    if eos is not None and type(eos) is not int:
        raise UnsupportedModelError(
            f"eos_token_id={eos!r} must be one id or null, since a chain of cells can end at only one id"
        )
    return MambaConfig(
        dtype=dtype,
        vocab_size=integer(options, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=int(number(options, "expand", 2) * hidden_size),
        num_layers=integer(options, "num_hidden_layers", 32),
        state_size=integer(options, "state_size", 16),
        conv_kernel=integer(options, "conv_kernel", 4),
        time_step_rank=math.ceil(hidden_size / 16) if rank == "auto" else integer(options, "time_step_rank"),
        norm_eps=number(options, "layer_norm_epsilon", 1e-5),
        use_bias=boolean(options, "use_bias", False),
        use_conv_bias=boolean(options, "use_conv_bias", True),
        tie_word_embeddings=boolean(options, "tie_word_embeddings", True),
        eos_token_id=eos,
    )


def mamba_recipes(config: MambaConfig) -> dict[str, Recipe]:
    """Return the recipes of all parameters, including absent ones (a bias, a tied head)."""
    hidden, inner, rank = config.hidden_size, config.intermediate_size, config.time_step_rank
    words = (config.vocab_size, hidden)
    num_states = rank + 2 * config.state_size

    def stacked(
        name: str, shape: tuple[int, ...], assemble: Callable[[jax.Array], jax.Array] | None = None
    ) -> Recipe:
        """Return the recipe of one array for all layers; `assemble` transforms the tensor of one layer."""

        def stack(*parts: jax.Array) -> jax.Array:
            return jnp.stack(parts if assemble is None else [assemble(part) for part in parts])

        names = tuple(f"backbone.layers.{i}.{name}" for i in range(config.num_layers))
        return Recipe(names, (shape,) * config.num_layers, stack)

    return {
        "embeddings.weight": table("backbone.embeddings.weight", *words),
        "norm_f": vector("backbone.norm_f.weight", hidden),
        "lm_head": matrix("lm_head.weight", hidden, config.vocab_size),
        "layers.norm": stacked("norm.weight", (hidden,)),
        "layers.in_proj": stacked("mixer.in_proj.weight", (2 * inner, hidden), jnp.transpose),
        "layers.in_proj_bias": stacked("mixer.in_proj.bias", (2 * inner,)),
        "layers.conv1d": stacked("mixer.conv1d.weight", (inner, 1, config.conv_kernel), lambda w: w[:, 0].T),
        "layers.conv1d_bias": stacked("mixer.conv1d.bias", (inner,)),
        "layers.x_proj": stacked("mixer.x_proj.weight", (num_states, inner), jnp.transpose),
        "layers.dt_proj": stacked("mixer.dt_proj.weight", (inner, rank), jnp.transpose),
        "layers.dt_proj_bias": stacked("mixer.dt_proj.bias", (inner,)),
        "layers.A_log": stacked("mixer.A_log", (inner, config.state_size), jnp.transpose),
        "layers.D": stacked("mixer.D", (inner,)),
        "layers.out_proj": stacked("mixer.out_proj.weight", (hidden, inner), jnp.transpose),
        "layers.out_proj_bias": stacked("mixer.out_proj.bias", (hidden,)),
    }
