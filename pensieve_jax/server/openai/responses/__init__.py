"""The Responses and Conversations APIs.

Owns: responses that a client waits for, follows, or leaves in the background; their retries, events and
objects; the conversations that they are appended to.
Does not know: Chat Completions, sockets, or how the engine runs a turn.
"""
