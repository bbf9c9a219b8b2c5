"""The routes of OpenAI's API.

Owns: their handlers, and the schemas of requests and responses.
Does not know: sockets, keys and HTTP limits, which `server.http` handles, or how the engine runs a turn.
Called by `server.app`.
"""
