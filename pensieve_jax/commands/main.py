"""`pensieve`: the commands that are installed with the library, a line each, and the start of one of them.

Owns: the table of commands, `--version`, and what is said of a command that is none.
Does not know: what a command does, or its flags. A command is a module beside this one with `define_flags`
and `main`, whose docstring is its help, and a row of the table.
Nothing here imports JAX: a list of commands comes at once.
"""

from __future__ import annotations

import importlib
import sys

from absl import flags

import pensieve_jax
from pensieve_jax.commands.launch import EXIT_BAD_INPUT, run, show

flags.disclaim_key_flags()  # a command's flags are those of the program
COMMANDS = {
    "chat": "a chat in the terminal, with replies as they come",
    "generate": "JSON lines of conversations in, JSON lines of turns out",
    "serve": "an OpenAI-compatible server over HTTP, whose conversations are state",
    "history": "copies of a history between files and Postgres",
    "profile": "what recomputing a chunk costs on this device: the eviction order reads it",
    "demo": "conversations that lose state and answer as if they had not, checked against a dense reference",
}
_HELP = ("help", "--help", "-h", "-help", "-?", "--helpshort", "--helpfull")


def main() -> None:
    """Start the command that is named, or list them all; ends the process."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name == "help" and arguments and arguments[0] in COMMANDS:
        name, arguments = arguments[0], ["--help"]
    if name in _HELP:
        sys.exit(show(overview()))
    if name == "--version":
        sys.exit(show(pensieve_jax.__version__))
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"error: there is no command {name!r}, but {known}; see pensieve --help", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    command = importlib.import_module(f"pensieve_jax.commands.{name}")
    sys.argv = [f"pensieve {name}", *arguments]
    command.define_flags()
    run(command.main)


def overview() -> str:
    """Every command in a line."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: pensieve COMMAND [--flag=value ...]",
            "",
            "commands:",
            *rows,
            "",
            "pensieve COMMAND --help explains a command and its flags; pensieve --version is the version.",
        ]
    )
