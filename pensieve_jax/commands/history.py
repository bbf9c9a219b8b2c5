"""Copy of a whole history between files and Postgres.

    pensieve history copy chats.sqlite postgresql://me@db/chats
    pensieve history copy postgresql://me@db/chats chats.sqlite

Both arguments of `copy` are the path of a file or a Postgres URL. It copies the whole history in one
transaction, counts the rows and compares a digest. The target must not exist, or hold an empty history of the
same model. No server may use a copied file meanwhile.

Put a password into ~/.pgpass or PGPASSWORD. Other users of the machine can read a command line.
"""

from __future__ import annotations

import sys

from absl import flags
from tqdm import tqdm

from pensieve_jax.commands.launch import take_words
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.history.copying import Copied, copy_history
from pensieve_jax.history.opening import shown

FLAGS = flags.FLAGS
flags.disclaim_key_flags()
_TAKEN = "copy SRC DST"
_WORDS: list[str] = []


def main() -> int:
    """Run the command of the words; return the exit status."""
    match _WORDS:
        case ["copy", source, target]:
            copied = _copy(source, target)
            rows = ", ".join(f"{number} {name}" for name, number in copied.num_rows.items() if number)
            print(f"copied {rows or 'nothing'} to {shown(target)}; digest {copied.digest[:16]}")
        case _:
            raise ConfigError(
                "what to do", " ".join(map(shown, _WORDS)), _TAKEN, "see pensieve history --help"
            )
    return 0


def define_flags() -> None:
    """Define the flags of `pensieve history`, and take its words from the command line."""
    global _WORDS
    _WORDS = take_words()
    flags.DEFINE_bool("progress", None, "Show a bar; default: on a terminal.")


def _copy(source: str, target: str) -> Copied:
    shows = sys.stderr.isatty() if FLAGS.progress is None else FLAGS.progress
    with tqdm(unit="rows", disable=not shows, file=sys.stderr) as bar:

        def progress(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        return copy_history(source, target, progress=progress)
