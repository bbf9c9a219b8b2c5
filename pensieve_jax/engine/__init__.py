"""The engine: turns from submission to outcome. It does not import jax."""
