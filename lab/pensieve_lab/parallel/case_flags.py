"""The command-line flags that say which shared steps are timed, how often, and against which ceilings.

Owns: names, defaults and help of these flags, and the list of their names for who passes them on.
Does not know: how a step is timed. The flags are those of whoever
calls.
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
    """All of them."""
    flags.DEFINE_list("decodes", ["32", "128"], "Numbers of sequences in decode steps.")
    flags.DEFINE_list("prompts", ["2048"], "Tokens of a prompt that is a step by itself.")
    flags.DEFINE_integer("context_tokens", 1024, "Context of sequences that decode.", lower_bound=1)
    flags.DEFINE_integer("num_repeats", 5, "Samples of everything.", lower_bound=1)
    flags.DEFINE_integer("num_launches", 10, "Launches in a row that a sample is of.", lower_bound=1)
    flags.DEFINE_integer("ceiling_bytes", 2**32, "Of the array that is read and copied.", lower_bound=2**20)
    flags.DEFINE_integer("ceiling_matrix", 8192, "Rows and columns of the matrices.", lower_bound=16)
