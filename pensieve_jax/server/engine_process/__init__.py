"""An engine in a process of its own, and what an event loop in another process holds of it.

Owns: what the two say to each other, the engine's loop beside its inbox, and starting it again when it died.
Does not know: HTTP. Only `worker`, which is that process, imports what imports JAX.
"""
