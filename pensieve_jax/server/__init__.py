"""Conversations over HTTP whose ids are state: an asynchronous front, and the engine in a process of its own.

Owns: the OpenAI-compatible API, which turn a request goes on from, and the two processes.
Does not know: batches, pages, devices.
"""
