"""Command-line flags for timed steps: which steps, how often, and the device's measured ceilings.

Owns: names, defaults and help of these flags, and `CASE_FLAGS`, their names for programs that forward them.
Does not know: how a step is timed.
Called by programs, which list these flags in their own help.
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
    """Define the flags that `CASE_FLAGS` lists."""
    flags.DEFINE_list("decodes", ["32", "128"], "Sequences per decode step; one step for each number.")
    flags.DEFINE_list("prompts", ["2048"], "Tokens per prompt step; one step for each number.")
    flags.DEFINE_integer("context_tokens", 1024, "Context tokens of decoding sequences.", lower_bound=1)
    flags.DEFINE_integer("num_repeats", 5, "Samples per measurement.", lower_bound=1)
    flags.DEFINE_integer("num_launches", 10, "Consecutive launches per sample.", lower_bound=1)
    flags.DEFINE_integer(
        "ceiling_bytes", 2**32, "Bytes of the array that measures bandwidth.", lower_bound=2**20
    )
    flags.DEFINE_integer(
        "ceiling_matrix", 8192, "Rows and columns of the matrices that measure FLOP/s.", lower_bound=16
    )
