"""Command-line flags for the timed steps: cases, repetitions and ceilings.

Owns: names, defaults and help of these flags, and the list of their names for programs that pass them on.
Does not know: how a step is timed.
Called by programs, which register the flags as their own.
"""

from __future__ import annotations

from absl import flags

from pensieve_jax.commands.help import flag_group

flags.disclaim_key_flags()
CASE_FLAGS = (
    *("decodes", "prompts", "context_tokens", "num_repeats", "num_launches"),
    *("ceiling_bytes", "ceiling_matrix"),
)


@flag_group("the steps that are timed")
def define_case_flags() -> None:
    """Define the flags of the cases, repetitions and ceilings."""
    flags.DEFINE_list("decodes", ["32", "128"], "Numbers of sequences in decode steps.")
    flags.DEFINE_list("prompts", ["2048"], "Tokens of prompts, each a separate step.")
    flags.DEFINE_integer("context_tokens", 1024, "Context tokens of decoding sequences.", lower_bound=1)
    flags.DEFINE_integer("num_repeats", 5, "Samples of each measurement.", lower_bound=1)
    flags.DEFINE_integer("num_launches", 10, "Consecutive launches in a sample.", lower_bound=1)
    flags.DEFINE_integer(
        "ceiling_bytes", 2**32, "Bytes of the array that is read and copied.", lower_bound=2**20
    )
    flags.DEFINE_integer(
        "ceiling_matrix", 8192, "Rows and columns of the multiplied matrices.", lower_bound=16
    )
