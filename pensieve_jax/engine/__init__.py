"""Turns from submission to outcome: a loop over scheduler, cache and whatever runs steps. No jax here."""
