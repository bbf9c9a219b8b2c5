"""Balancing rules that the engine's own server does not use: bounded hashing, migration, least tokens."""
