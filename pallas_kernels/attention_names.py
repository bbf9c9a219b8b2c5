"""The names of the attention back ends, for those who must not import JAX to know them.

Owns: the names. Does not know: anything about them; each is a row of `ragged_paged_attention.backends`, whose
package imports JAX.
Called by: that table, which a type checker keeps to these names, and `pensieve_jax.config`.
"""

from __future__ import annotations

from typing import Literal, get_args

AUTO = "auto"
"""The fastest that serves the arguments on the device."""
CompiledBackend = Literal["xla", "pallas_triton", "pallas_mosaic_gpu", "jax_triton"]
"""What a compiled step can call."""
BackendName = Literal[CompiledBackend, "reference"]
COMPILED_BACKENDS: tuple[CompiledBackend, ...] = get_args(CompiledBackend)
ATTENTION_BACKENDS = (AUTO, *COMPILED_BACKENDS)
"""What an engine may be told to use."""
