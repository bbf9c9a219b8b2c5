"""Measure the cost to recompute a chunk: `pensieve profile`, from a checkout."""

from pensieve_jax.commands.launch import run
from pensieve_jax.commands.profile import define_flags, main

if __name__ == "__main__":
    define_flags()
    run(main)
