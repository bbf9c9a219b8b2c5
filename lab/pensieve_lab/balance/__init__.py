"""Rules for a front that the engine's own server does not use: bounded hashing, migration, least tokens."""
