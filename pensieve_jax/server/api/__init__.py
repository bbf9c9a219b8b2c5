"""The routes of the API: what each asks for, and what it answers.

Owns: handlers and the schemas of their bodies.
Does not know: sockets, keys or limits of HTTP, which `server.http` has, or how the engine runs a turn.
"""
