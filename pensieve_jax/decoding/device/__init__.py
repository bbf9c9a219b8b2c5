"""Sampling, weights and the structure of a model, with JAX."""
