"""Chat in the terminal: `pensieve chat`, from a checkout."""

from pensieve_jax.commands.chat import define_flags, main
from pensieve_jax.commands.launch import run

if __name__ == "__main__":
    define_flags()
    run(main)
