"""The three systems of the paper's section 6, by name: KV cache in two tiers, in one, and none.

Owns: their names, and how their engine configurations differ.
Does not know: what they are measured with.
Called by programs and experiments.
"""

from __future__ import annotations

import dataclasses

from pensieve_jax import ConfigError, EngineConfig

PENSIEVE, PENSIEVE_GPU, STATELESS = "pensieve", "pensieve-gpu", "stateless"
SYSTEMS = (PENSIEVE, PENSIEVE_GPU, STATELESS)
"""KV cache in device and host memory; in device memory only, the paper's "Pensieve (GPU cache)"; no KV cache
between turns."""


HTTP = "http"
"""The system `PENSIEVE` behind its own HTTP server."""


def system_config(name: str, config: EngineConfig) -> EngineConfig:
    """Return the configuration of one of `SYSTEMS`, derived from one with both tiers.

    Raises:
      ConfigError: `name` needs host memory, and `config` has none.
    """
    cache = config.cache
    if name == PENSIEVE:
        if not config.asks_for_host_tier:
            limit = f"(or --cpu_pages) above 0 for {PENSIEVE}; without host memory it is {PENSIEVE_GPU}"
            raise ConfigError("--cpu_bytes", 0, limit)
        return config
    cache = dataclasses.replace(cache, cpu_pages=0, cpu_bytes=None, cpu_memory_fraction=None)
    return dataclasses.replace(config, cache=cache, stateful=name != STATELESS)
