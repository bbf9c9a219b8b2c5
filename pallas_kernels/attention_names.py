"""Names of attention back ends and of KV cache formats, for modules that must not import JAX.

Owns: the names. Does not know: what they stand for. `ragged_paged_attention.backends` has a row for each back
end, but its package imports JAX.
"""

from __future__ import annotations

from typing import Literal, get_args

AUTO = "auto"
"""The fastest back end that supports the arguments on the device."""
CompiledBackend = Literal["xla", "pallas_triton", "pallas_mosaic_gpu", "jax_triton"]
"""Back ends that a compiled step can call."""
BackendName = Literal[CompiledBackend, "reference"]
COMPILED_BACKENDS: tuple[CompiledBackend, ...] = get_args(CompiledBackend)
ATTENTION_BACKENDS = (AUTO, *COMPILED_BACKENDS)
"""Values of an engine's option."""
RING_DECODE_BACKENDS = (AUTO, "xla", "pallas_triton")
"""The same for steps of padded batches; all but "auto" are rows of `ring_decode.backends`."""
KV_DTYPES = ("int8", "float8_e4m3fn")
"""Formats of the KV cache beside the model's dtype; see `ragged_paged_attention.page_formats`."""
