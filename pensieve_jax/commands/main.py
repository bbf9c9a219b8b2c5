"""Entry point of `pensieve`: list the commands, or start one.

Owns: the table of commands, `--version`, and the error of an unknown command.
Does not know: the work of a command, or its flags. A command is a row of the table and a module of this
package with `define_flags` and `main`, whose docstring is its help.
This module does not import JAX, so that the list of commands appears at once. Before anything that takes
time, Ctrl-C gets its handler, and `serve` ignores SIGHUP: it means "read the keys again", and would end a
process that has no handler yet.
"""

from __future__ import annotations

import importlib
import signal
import sys

import pensieve_jax
from pensieve_jax.commands.interrupts import exit_on_interrupt

COMMANDS = {
    "chat": "chat in the terminal, with streamed replies",
    "generate": "JSON lines of conversations in, JSON lines of turns out",
    "serve": "an OpenAI-compatible HTTP server that keeps the KV cache of conversations",
    "history": "copy a history between files and Postgres",
    "profile": "measure the cost to recompute a chunk on this device, for the eviction order",
    "demo": "conversations that lose KV cache without any change of replies, checked by a dense reference",
}
_HELP = ("help", "--help", "-h", "-help", "-?", "--helpshort", "--helpfull")


def main() -> None:
    """Start the named command, or list all commands; exit."""
    exit_on_interrupt()
    name, *arguments = sys.argv[1:] or ["--help"]
    if name == "serve":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    from absl import flags  # after the signals, because these imports take time

    from pensieve_jax.commands.launch import EXIT_BAD_INPUT, run, show

    flags.disclaim_key_flags()  # so that a command's flags count as those of the program
    if name == "help" and arguments and arguments[0] in COMMANDS:
        name, arguments = arguments[0], ["--help"]
    if name in _HELP:
        sys.exit(show(overview()))
    if name == "--version":
        sys.exit(show(pensieve_jax.__version__))
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"error: unknown command {name!r}; known are {known}; see pensieve --help", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    command = importlib.import_module(f"pensieve_jax.commands.{name}")
    sys.argv = [f"pensieve {name}", *arguments]
    command.define_flags()
    run(command.main)


def overview() -> str:
    """Return the list of commands, one per line."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: pensieve COMMAND [--flag=value ...]",
            "",
            "commands:",
            *rows,
            "",
            "pensieve COMMAND --help explains a command and its flags; pensieve --version prints the version",
        ]
    )
