"""Start of a program of the laboratory, shared by the launchers in this folder."""

import importlib
import sys

from pensieve_jax.commands.launch import EXIT_BAD_INPUT, run


def start(name: str) -> None:
    """Run `pensieve_lab.programs.NAME`. If the laboratory is missing, print how to install it, and exit."""
    try:
        program = importlib.import_module(f"pensieve_lab.programs.{name}")
    except ModuleNotFoundError as error:
        if error.name != "pensieve_lab":
            raise
        print(f"error: {name} needs the laboratory: pip install -e ./lab", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    program.define_flags()
    run(program.main)
