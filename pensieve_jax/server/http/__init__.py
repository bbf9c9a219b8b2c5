"""The HTTP layer under all routes: routing, keys, limits, errors, event streams, logs.

Owns: everything between a socket and a handler.
Does not know: what a route does, models, or the history. Called by `server.app` and by every handler.
"""
