"""HTTP as this server speaks it, whatever is asked for: routes, keys, limits, errors, events, logs.

Owns: everything between a socket and a handler.
Does not know: what a route does, models, or the history.
"""
