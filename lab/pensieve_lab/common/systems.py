"""The three systems of the paper's section 6, by name: state in two tiers, in one, and none.

Owns: their names, and what of an engine's configuration tells them apart.
Does not know: what they are measured with.
"""

from __future__ import annotations

import dataclasses

from pensieve_jax import ConfigError, EngineConfig

PENSIEVE, PENSIEVE_GPU, STATELESS = "pensieve", "pensieve-gpu", "stateless"
SYSTEMS = (PENSIEVE, PENSIEVE_GPU, STATELESS)
"""State in device and host memory; in device memory alone, the paper's "Pensieve (GPU cache)"; no state
between turns."""


HTTP = "http"
"""The first of them behind its own server."""


def system_config(name: str, config: EngineConfig) -> EngineConfig:
    """The configuration of one of `SYSTEMS`, from one with both tiers.

    Raises:
      ConfigError: there is no host memory in `config`, and `name` says that there is.
    """
    cache = config.cache
    if name == PENSIEVE:
        if not cache.cpu_pages and not cache.cpu_bytes:
            limit = f"(or --cpu_pages) above 0 for {PENSIEVE}, which without host memory is {PENSIEVE_GPU}"
            raise ConfigError("--cpu_bytes", 0, limit)
        return config
    cache = dataclasses.replace(cache, cpu_pages=0, cpu_bytes=None)
    return dataclasses.replace(config, cache=cache, stateful=name != STATELESS)
