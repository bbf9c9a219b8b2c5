"""The methods of the Baton paper by name, each a setting of one engine.

Owns: the names, what each changes of a configuration, and how long a ring each may grow.
Does not know: models, loads or devices.

Vector shaping leaves holes, so its rows take more columns than they have tokens: it may have twice as many as
the longest query, where the budget has room for them. The others never need more than that query.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.rebatching import RebatchingConfig
from pensieve_jax.rebatching.ring_shapes import RingShapes

BENCHMARK, PD, BATON, BATON_PD = "Benchmark", "PD", "Baton", "Baton-PD"
PREEMPTIVE = "Baton-PD, preemptive"
METHODS: Mapping[str, Mapping[str, Any]] = {
    BENCHMARK: {"insertion": "none", "prefill": "together"},
    PD: {"insertion": "none", "prefill": "similar"},
    BATON: {"insertion": "shape", "prefill": "similar"},
    BATON_PD: {"insertion": "embed", "prefill": "similar"},
    PREEMPTIVE: {"insertion": "embed", "prefill": "similar", "preemptive": True},
}
OF_THE_TABLES = (BENCHMARK, PD, BATON, BATON_PD)
OF_LOADS = (BENCHMARK, BATON_PD, PREEMPTIVE)
_COLUMNS_OF_SHAPING = 2
_AMPLE_BYTES = 2**62


def chosen(names: Sequence[str], default: Sequence[str]) -> list[str]:
    """What `--methods` says; raises ConfigError for names that there are not."""
    for name in names:
        if name not in METHODS:
            raise ConfigError("--methods", name, f"one of: {'; '.join(METHODS)}")
    return list(dict.fromkeys(names or default))


def config_of(name: str, base: RebatchingConfig) -> RebatchingConfig:
    """The settings of a method; `base` says `max_context_tokens`, and everything else."""
    config = dataclasses.replace(base, **METHODS[name])
    if config.insertion != "shape" or config.lengths is not None or config.max_context_tokens is None:
        return config
    # As lengths, of which the budget may leave out the longest; a context must fit.
    num_tokens = _COLUMNS_OF_SHAPING * config.max_context_tokens
    lengths = lengths_for(config, config.max_context_tokens)
    longer = [one for one in lengths_for(config, num_tokens) if one > lengths[-1]]
    return dataclasses.replace(config, lengths=(*lengths, *longer))


def lengths_for(config: RebatchingConfig, num_tokens: int) -> list[int]:
    """The lengths of a ring that an engine chooses by itself for contexts of so many tokens."""
    ample = dataclasses.replace(config, kv_bytes=_AMPLE_BYTES, max_context_tokens=num_tokens, lengths=None)
    return [shape.length for shape in RingShapes(ample, 1, num_tokens).shapes]


def runner_config(config: RebatchingConfig) -> RebatchingConfig:
    """What a runner is compiled for: equal ones can share it. Only shaping needs programs of its own."""
    is_shaped = config.insertion == "shape"
    return dataclasses.replace(
        config,
        insertion="shape" if is_shaped else "embed",
        prefill="similar",
        preemptive=False,
        prefill_ahead=None,
    )
