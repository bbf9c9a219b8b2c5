"""The systems that can serve conversations, by the names of `--system`.

Owns: the list of systems, and how each is opened from the flags of a benchmark.
Does not know: what is measured of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from absl import flags

from model_defs import ModelConfig
from pensieve_jax import ConfigError
from pensieve_jax.commands.engine_flags import engine_config, shows_progress
from pensieve_jax.model_source import resolve_model
from pensieve_lab.common.systems import HTTP, PENSIEVE, system_config
from pensieve_lab.common.systems import SYSTEMS as ENGINE_SYSTEMS
from pensieve_lab.serving.engine_server import EngineSystem
from pensieve_lab.serving.rebatching_server import SYSTEMS as REBATCHING_SYSTEMS
from pensieve_lab.serving.rebatching_server import RebatchingSystem
from pensieve_lab.serving.run import System
from pensieve_lab.serving.static_server import SYSTEM as STATIC_SYSTEM
from pensieve_lab.serving.static_server import StaticSystem
from pensieve_lab.serving.transformers_server import TransformersSystem
from pensieve_lab.serving.vllm_server import OFFLOAD as VLLM_OFFLOAD
from pensieve_lab.serving.vllm_server import SYSTEMS as VLLM_SYSTEMS
from pensieve_lab.serving.vllm_server import VllmSystem

__all__ = ["ENGINE_SYSTEMS", "OURS", "STORES_IN_8_BITS", "SYSTEMS", "VLLM_OFFLOAD", "open_systems"]

FLAGS = flags.FLAGS
OURS = (*ENGINE_SYSTEMS, HTTP)
"""This project's engine, in this process or behind its server."""
STORES_IN_8_BITS = (*OURS, *VLLM_SYSTEMS)
SYSTEMS = (*OURS, *REBATCHING_SYSTEMS, "transformers", STATIC_SYSTEM, *VLLM_SYSTEMS)


def open_systems(model: ModelConfig, names: Set[str]) -> Mapping[str, System]:
    """Open systems; several must all be of this engine, and share model and pages.

    They serve one at a time: starting one closes the engine of the others. Raises ConfigError, PensieveError
    or ModelError.
    """
    if len(names) == 1:
        return {name: open_system(name, model) for name in names}
    first, *others = (name for name in ENGINE_SYSTEMS if name in names)  # by memory size
    system = EngineSystem(first, system_config(first, engine_config()))
    return {first: system} | {name: system.sibling(name) for name in others}


def open_system(name: str, model: ModelConfig) -> System:
    """Open a system; raises ConfigError, PensieveError or ModelError."""
    config = engine_config()
    if name in ENGINE_SYSTEMS:
        return EngineSystem(name, system_config(name, config))
    if name == HTTP:
        # Imported late: other systems do not need the server's packages.
        from pensieve_lab.serving.http_server import HttpSystem

        return HttpSystem(system_config(PENSIEVE, config))
    rows = FLAGS.padded_batch
    if name in REBATCHING_SYSTEMS:
        return RebatchingSystem(
            name,
            FLAGS.model,
            model,
            FLAGS.dtype,
            config,
            max_batch=rows,
            lengths=_padded_lengths(),
            decode_backend=FLAGS.decode_backend,
            progress=shows_progress(),
        )
    source = resolve_model(FLAGS.model)
    dtype = model.dtype if FLAGS.dtype == "auto" else FLAGS.dtype
    if name == "transformers":
        return TransformersSystem(source, model, dtype, config, FLAGS.transformers_attention)
    if name == STATIC_SYSTEM:
        return StaticSystem(source, model, dtype, config, FLAGS.transformers_attention, max_batch=rows)
    prompt_only = FLAGS.vllm_offload_prompt_only
    return VllmSystem(name, source, model, dtype, config, offload_prompt_only=prompt_only)


def _padded_lengths() -> tuple[int, ...] | None:
    """Parse `--padded_lengths`; the engine's configuration checks the limits."""
    words = FLAGS.padded_lengths
    if not all(word.isdecimal() for word in words):
        raise ConfigError("--padded_lengths", ",".join(words), "numbers with commas between them")
    return tuple(map(int, words)) or None
