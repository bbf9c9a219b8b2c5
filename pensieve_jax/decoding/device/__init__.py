"""Sampling, weights and model structure, with JAX."""
