"""Prints the commit of this tree and the digest of its source files, for a copy without the git history.

    # here; set the same value beside the copy
    export PENSIEVE_REVISION=$(python -m pensieve_lab.programs.print_revision)

A benchmark in the copy compares the digest with its own files and stops if they differ. Exit status 1 if the
source files differ from the commit.
"""

from __future__ import annotations

import sys

from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.provenance import source_state


def main() -> int:
    state = source_state()
    if not state.tree_is_clean:
        print("The source files differ from the commit; commit them first.", file=sys.stderr)
        return EXIT_FAILED
    print(f"{state.revision}:{state.source_digest}")
    return 0


def define_flags() -> None:
    """Define nothing: this program has no flags."""


if __name__ == "__main__":
    define_flags()
    run(main)
