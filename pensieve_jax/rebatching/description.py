"""What an engine of padded batches turned out to be on this machine, as plain values.

Owns: the keys of `PaddedLLM.describe`, and what each means.
Does not know: how anything was chosen; the parts say.
"""

from __future__ import annotations

from pensieve_jax.decoding.device.describe import (
    Description,
    describe_choice,
    describe_devices,
    describe_model,
)
from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.device.runner import DeviceRunner


def describe(name: str, runner: DeviceRunner, config: RebatchingConfig) -> Description:
    """Plain values, which JSON can hold; printed, they are a line each.

    Keys:
      model, device: as of `pensieve_jax.LLM.describe`; `name` is the model's.
      kernels: for `attention` of prompts and for `decode`, that of steps, the `backend` and the `reason`.
      batch: the `shapes` that the ring may have, rows x columns, the shortest first; `unused_lengths` of the
        config, of which the budget has no room for a row and for one beside it; `max_context_tokens` of the
        longest query, `insertion`, `prefill` and `preemptive`.
      memory: `kv_bytes` of the budget and `token_bytes`, both a device's, and `host_bytes` of pinned memory.
      compilation_cache_dir: where compiled programs are kept, or None.
    """
    storage, lattice = runner.storage, runner.lattice
    return Description(
        {
            "model": describe_model(name, storage.model, storage.dtype, runner.weights_bytes),
            "device": describe_devices(runner.mesh),
            "kernels": {
                "attention": describe_choice(runner.backends.attention_backend),
                "decode": describe_choice(runner.backends.decode_backend),
            },
            "batch": {
                "shapes": [f"{shape.batch} x {shape.length}" for shape in lattice.shapes],
                "unused_lengths": list(lattice.unused_lengths),
                "max_context_tokens": lattice.max_context_tokens,
                "insertion": config.insertion,
                "prefill": config.prefill,
                "preemptive": config.preemptive,
            },
            "memory": {
                "kv_bytes": lattice.kv_bytes,
                "token_bytes": lattice.token_bytes,
                "host_bytes": config.host_bytes,
            },
            "compilation_cache_dir": config.compilation_cache_dir,
        }
    )
