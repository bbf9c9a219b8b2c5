"""Clients that keep a server busy for an hour, and whether it is then as it was.

Owns: what clients do, what is sampled meanwhile, and what counts as growth.
Does not know: the server's code.
"""
