"""The Responses and Conversations APIs.

Owns: foreground, streamed and background responses; their retries, events and objects; the conversations
that they are appended to.
Does not know: Chat Completions, sockets, or how the engine runs a turn. Called by `server.app`.
"""
