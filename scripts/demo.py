"""Demonstrate that losing parts of the KV cache changes no reply: `pensieve demo`, from a checkout."""

from pensieve_jax.commands.demo import define_flags, main
from pensieve_jax.commands.launch import run

if __name__ == "__main__":
    define_flags()
    run(main)
