"""Variants of all-reduces over devices, and of their launches.

Owns: a name for each, and the XLA flags and engine flags behind it.
Does not know: how fast they are.
Called by `programs.profile_parallel`.

By default, jaxlib 0.11.2 sums up to 256 KB with its own one-shot kernel and up to 2 MB with a two-shot one,
and uses NCCL for more. It leaves collectives out of the graphs with which it launches kernels, and runs them
on a separate stream.
"""

from __future__ import annotations

from typing import NamedTuple

_IN_GRAPHS = "--xla_gpu_enable_command_buffer=+COLLECTIVES"
_ON_THE_STREAM = "--xla_gpu_disable_async_collectives=ALLREDUCE,ALLGATHER"
_NCCL = "--xla_gpu_experimental_use_collective_kernels="


class Variant(NamedTuple):
    """Flags of a variant, which follow those of the environment (`xla_flags`) or of the command."""

    xla_flags: tuple[str, ...] = ()
    engine_flags: tuple[str, ...] = ()


_XLA = ("--all_reduce=xla",)
_OWN = ("--all_reduce=jax_triton",)

VARIANTS = {
    "default": Variant(),
    "own": Variant((), _OWN),
    "own_stream_graphs": Variant((_ON_THE_STREAM, _IN_GRAPHS), _OWN),
    "xla": Variant((), _XLA),
    "all_xla": Variant((), (*_XLA, "--decode_matmul=xla")),
    "graphs": Variant((_IN_GRAPHS,), _XLA),
    "stream": Variant((_ON_THE_STREAM,), _XLA),
    "stream_graphs": Variant((_ON_THE_STREAM, _IN_GRAPHS), _XLA),
    "nccl": Variant((_NCCL,), _XLA),
    "nccl_stream_graphs": Variant((_NCCL, _ON_THE_STREAM, _IN_GRAPHS), _XLA),
    "hiding": Variant(("--xla_gpu_enable_latency_hiding_scheduler=true",), _XLA),
}
