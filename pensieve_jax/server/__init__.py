"""Stateful conversations over HTTP: an asynchronous front end, and the engine in its own process.

Owns: the OpenAI-compatible API, the choice of the turn that a request continues, and both processes.
Does not know: batches, pages or devices.
"""
