"""An engine in a separate process, and its client for an event loop in the front-end process.

Owns: the protocol between the two processes, the engine's loop, and the restart of an engine that died.
Does not know: HTTP. Only `worker`, the engine's process, imports modules that import JAX.
"""
