"""OpenAI-compatible HTTP server: `pensieve serve`, from a checkout."""

from pensieve_jax.commands.launch import run
from pensieve_jax.commands.serve import define_flags, main

if __name__ == "__main__":
    define_flags()
    run(main)
