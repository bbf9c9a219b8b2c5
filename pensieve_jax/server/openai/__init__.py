"""OpenAI's API: what each route asks for, and what it answers.

Owns: handlers, and the schemas of their bodies and answers.
Does not know: sockets, keys or limits of HTTP, which `server.http` has; how the engine runs a turn.
"""
