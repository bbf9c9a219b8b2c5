"""The compared systems: an engine with both tiers, with one, without state, or with a feature left out.

Owns: how a system, with its policy and features, becomes an engine configuration for a machine.
Does not know: workloads, or how the three systems differ (`common.systems`).
Called by the experiments.
"""

from __future__ import annotations

from dataclasses import dataclass

from pensieve_jax import CacheConfig, EngineConfig, SchedulerConfig
from pensieve_lab.common.systems import PENSIEVE, SYSTEMS, system_config
from pensieve_lab.experiments.machines import load_profile
from pensieve_lab.experiments.machines import memory_bytes as memory_of_paper

_CONTEXT_TOKENS = 16_384  # the paper's longest
_LABELS = {
    "pensieve": "both tiers",
    "pensieve-gpu": "device alone",
    "stateless": "no state between turns",
    "not unified": "both tiers, separate phases",
}
# Of small versions: contexts, and device and host memory.
_SMALL_CONTEXT_TOKENS, _SMALL_MEMORY_TOKENS = 2048, (12_000, 60_000)


@dataclass(frozen=True, kw_only=True)
class System:
    """A serving system.

    Attributes:
      name: of its curves.
      kind: one of `common.systems.SYSTEMS`.
      policy: eviction policy.
      unified: whether prompts and decodes share steps.
    """

    name: str
    kind: str
    policy: str = "retention"
    unified: bool = True

    @property
    def label(self) -> str:
        """Label of its curves in pictures."""
        return _LABELS.get(self.name, self.name)

    @property
    def has_host_tier(self) -> bool:
        """Whether host memory backs the device's."""
        return self.kind == PENSIEVE


BOTH_TIERS, ONE_TIER, NO_STATE = THREE_SYSTEMS = tuple(System(name=kind, kind=kind) for kind in SYSTEMS)


def engine(
    system: System,
    device: str,
    model: str,
    *,
    memory_bytes: tuple[int, int],
    max_context_tokens: int,
    chunk_tokens: int = 32,
    max_num_running: int = 256,
    max_num_batched_tokens: int = 2048,
) -> EngineConfig:
    """Return a system's configuration with this memory; raises ConfigError for too little."""
    gpu_bytes, cpu_bytes = memory_bytes
    page_bytes = chunk_tokens * load_profile(device, model).kv_token_bytes
    config = EngineConfig(
        cache=CacheConfig(
            gpu_pages=gpu_bytes // page_bytes,
            cpu_pages=cpu_bytes // page_bytes,
            chunk_tokens=chunk_tokens,
            policy=system.policy,
        ),
        scheduler=SchedulerConfig(
            max_num_running=max_num_running,
            max_num_batched_tokens=max_num_batched_tokens,
            max_context_tokens=max_context_tokens,
            prompt_order="arrival",  # the paper's
            unified=system.unified,
        ),
    )
    config.resolve_context_tokens(max_context_tokens)
    return system_config(system.kind, config)


def engine_of_paper(system: System, device: str, model: str, *, small: bool) -> EngineConfig:
    """Return a configuration with the paper's memory and contexts; if `small`, with little of both."""
    memory = memory_of_tokens(device, model, *_SMALL_MEMORY_TOKENS) if small else memory_of_paper(model)
    max_context_tokens = context_tokens_of_paper(small=small)
    return engine(system, device, model, memory_bytes=memory, max_context_tokens=max_context_tokens)


def context_tokens_of_paper(*, small: bool) -> int:
    """Return the longest context that `engine_of_paper` serves."""
    return _SMALL_CONTEXT_TOKENS if small else _CONTEXT_TOKENS


def memory_of_tokens(device: str, model: str, gpu_tokens: int, cpu_tokens: int) -> tuple[int, int]:
    """Return device and host memory for the KV cache of these numbers of tokens."""
    token_bytes = load_profile(device, model).kv_token_bytes
    return gpu_tokens * token_bytes, cpu_tokens * token_bytes
