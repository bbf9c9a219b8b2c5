"""The routes of Anthropic's Messages API.

Owns: their handlers, the schemas of requests, the form of replies, events and errors.
Does not know: sockets, keys and HTTP limits, which `server.http` handles, or how the engine runs a turn.
Called by `server.app`.
"""
