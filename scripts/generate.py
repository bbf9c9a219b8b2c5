"""Batch generation, conversations in and turns out as JSON lines: `pensieve generate`, from a checkout."""

from pensieve_jax.commands.generate import define_flags, main
from pensieve_jax.commands.launch import run

if __name__ == "__main__":
    define_flags()
    run(main)
