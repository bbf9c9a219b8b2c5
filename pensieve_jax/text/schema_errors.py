"""Errors about the grammar of calls, in terms of the tools that it was made from.

Owns: which tool's schema an error of the grammar library is about.
Does not know: how the grammar is written or compiled, or the field names of an API.
Called by `prompts` and `server.turns.tool_choice`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.text.grammar import check_grammar
from pensieve_jax.text.tools import Tool


def schema_error(
    error: InvalidRequestError, tools: Sequence[Tool], held: Collection[str]
) -> InvalidRequestError:
    """Return the error of a grammar of calls as one about the tools; compiling each schema takes a while.

    Args:
      error: the error of the grammar. Its place in the grammar says nothing to the caller.
      tools: the tools of the turn.
      held: names of the tools whose schemas stand in the grammar.

    Its field is `tools[i].function.parameters` of the first tool whose schema fails alone, else `tools`.
    """
    for index, tool in enumerate(tools):
        function = tool["function"]
        if function["name"] in held:
            try:
                check_grammar(StructuredOutput.json_schema(function["parameters"]))
            except InvalidRequestError as own:
                return type(own)(f"tools[{index}].function.parameters", own.value, own.limit, own.hint)
    return type(error)("tools", f"{len(tools)} tools", error.limit)
