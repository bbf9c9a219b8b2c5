"""The soak test: clients that keep a server busy for an hour, and the check that its resources do not grow.

Owns: what clients do, what is sampled meanwhile, and what counts as growth.
Does not know: the server's code.
"""
