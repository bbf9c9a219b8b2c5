"""Which of jaxlib's two clients for GPUs a process gets.

Owns: the choice, which has to be made before JAX makes a client.
Does not know: what is launched.
Called by: the package, when it is imported.

By its usual client the thread that calls an executable launches all of its kernels: 5 to 7 ms for a step of
40 layers, in which nothing can be scheduled, and longer where a CUDA graph is launched again while it runs.
The other client, whose name is older than what it does, launches from a thread of its own (docs/log.md, "Open
loops on the device").
"""

from __future__ import annotations

import os

CLIENT_VARIABLE = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"
"""Of jaxlib: "1" for the client that launches asynchronously, "0" for the other one."""


def launch_asynchronously() -> None:
    """Ask for the client that does, unless the environment says which; too late once JAX has one."""
    os.environ.setdefault(CLIENT_VARIABLE, "1")
