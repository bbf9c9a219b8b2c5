"""Flags of programs that run a recurrent model, and the model that they select.

Owns: their names and help.
Does not know: what is measured.
Called by the programs of cellular batching.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from pensieve_jax.core.errors import ConfigError
from pensieve_lab.cells.models import MODELS, Model, make

flags.disclaim_key_flags()
FLAGS = flags.FLAGS


def define_model_flags() -> None:
    """Define the flags of the model, its size, and its requests."""
    flags.DEFINE_enum("model", "lstm", MODELS, "One of the three models of the thesis.")
    flags.DEFINE_integer("hidden_size", 1024, "Hidden size of all cells.", lower_bound=1)
    flags.DEFINE_enum("dtype", "float32", ("float32", "bfloat16"), "Type of weights and states.")
    flags.DEFINE_list("max_batch", ["512"], "Largest batch size of each cell, or one number for all.")
    help = "Words in every sentence, or leaves of every tree; default: as in the data."
    flags.DEFINE_integer("num_words", None, help, lower_bound=1)
    help = "A CSV of length pairs, two files of parallel sentences, or a file with one tree per line."
    flags.DEFINE_list("data", [], help)
    flags.DEFINE_integer("seed", 0, "Seed of requests and arrivals.", lower_bound=0)


def numbers(flag: str) -> list[int]:
    """Return a flag's numbers; raises ConfigError unless all are above 0."""
    words: list[str] = getattr(FLAGS, flag)
    try:
        found = [int(one) for one in words]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"--{flag}", ",".join(words), "numbers above 0, with commas between them")
    return found


def model_from_flags() -> Model:
    """Return the model with random weights; raises ConfigError."""
    return make(
        FLAGS.model,
        hidden_size=FLAGS.hidden_size,
        dtype=FLAGS.dtype,
        max_batches=numbers("max_batch"),
        data=[Path(one) for one in FLAGS.data],
        num_words=FLAGS.num_words,
    )
