"""Conversations that lose part of their state and do not show it: `pensieve demo`, from a checkout."""

from pensieve_jax.commands.demo import define_flags, main
from pensieve_jax.commands.launch import run

if __name__ == "__main__":
    define_flags()
    run(main)
