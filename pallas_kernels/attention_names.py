"""The names of attention back ends and of what KV state is stored as, for those who must not import JAX.

Owns: the names. Does not know: anything about them; a back end is a row of `ragged_paged_attention.backends`,
whose package imports JAX.
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
RING_DECODE_BACKENDS = (AUTO, "xla", "pallas_triton")
"""The same of steps of padded batches; all but "auto" are rows of `ring_decode.backends`."""
KV_DTYPES = ("int8", "float8_e4m3fn")
"""What KV state may be stored as instead of in the model's dtype: `ragged_paged_attention.page_formats`."""
