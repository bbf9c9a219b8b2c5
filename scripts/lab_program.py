"""Starts a program of the laboratory; the launchers beside this file that need it share this."""

import importlib
import sys

from pensieve_jax.commands.launch import EXIT_BAD_INPUT, run


def start(name: str) -> None:
    """Run `pensieve_lab.programs.NAME`; without the laboratory, say how to install it and exit."""
    try:
        program = importlib.import_module(f"pensieve_lab.programs.{name}")
    except ModuleNotFoundError as error:
        if error.name != "pensieve_lab":
            raise
        print(f"error: {name} needs the laboratory: pip install -e ./lab", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    program.define_flags()
    run(program.main)
