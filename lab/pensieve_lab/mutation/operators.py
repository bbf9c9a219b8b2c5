"""Mutation operators: those of cosmic-ray that yield plausible mistakes, and two more.

Owns: the list of operators and the two that cosmic-ray lacks.
Does not know: where an operator may be applied, or the results of tests.
Called by `mutation.candidates`.

Cosmic-ray replaces each operator by every other one. Most of those mutants fail in every test, and would only
raise the share of mutants caught. Here a comparison moves its boundary or is negated, and arithmetic has one
replacement.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final

from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.plugins import get_operator
from parso.python.tree import Keyword

type Position = tuple[tuple[int, int], tuple[int, int]]

_COMPARISONS: Final = (
    *("Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt"),
    *("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is"),
)
_ARITHMETIC: Final = (
    *("Add_Sub", "Sub_Add", "Mul_FloorDiv", "FloorDiv_Mul", "Div_Mul", "Mod_FloorDiv", "Pow_Mul"),
    *("RShift_LShift", "LShift_RShift", "BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitOr"),
)
_OTHERS: Final = (
    *("ReplaceUnaryOperator_USub_UAdd", "ReplaceUnaryOperator_Delete_Invert"),
    *("ReplaceUnaryOperator_Delete_Not", "AddNot", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "NumberReplacer", "ZeroIterationForLoop"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer"),
)


class RemoveOperand(Operator):
    """Leave one operand of an `and` or an `or` out."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        """Yield the position of each operand."""
        if node.type in ("and_test", "or_test"):
            for operand in node.children[::2]:
                yield operand.start_pos, operand.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Remove the operand and one of the keywords beside it."""
        first = max(2 * index - 1, 0)
        del node.children[first : first + 2]
        return node if len(node.children) > 1 else node.children[0]

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """Return what cosmic-ray's own tests would check."""
        return (Example("x and y", " y"), Example("x and y", "x", occurrence=1))


class RemoveCall(Operator):
    """Replace a statement that is one call by `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        """Yield the position of the statement."""
        if node.type == "simple_stmt" and _is_call(node.children[0]):
            yield node.start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Replace the call; keep the indentation and the rest of the line."""
        call = node.children[0]
        node.children[0] = Keyword("pass", call.start_pos, prefix=call.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """Return what cosmic-ray's own tests would check."""
        return (Example("f(x)\n", "pass\n"),)


def _is_call(node: Any) -> bool:
    if node.type != "atom_expr":
        return False
    last = node.children[-1]
    return last.type == "trailer" and last.children[0].value == "("


def _make_operators() -> dict[str, Operator]:
    names = itertools.chain(
        (f"ReplaceComparisonOperator_{name}" for name in _COMPARISONS),
        (f"ReplaceBinaryOperator_{name}" for name in _ARITHMETIC),
        _OTHERS,
    )
    return {name: get_operator(f"core/{name}")() for name in names} | {
        "RemoveOperand": RemoveOperand(),
        "RemoveCall": RemoveCall(),
    }


OPERATORS: Final = _make_operators()
