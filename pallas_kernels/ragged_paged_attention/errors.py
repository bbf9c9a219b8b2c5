"""Errors of the attention package: an argument that no back end, or not the chosen one, can serve.

Owns: the one error type. Does not know: what any back end serves.
"""

from __future__ import annotations


class AttentionArgumentError(ValueError):
    """An argument is outside what the kernel serves.

    Attributes:
      field: name of the argument.
      value: what was given.
      limit: what is accepted, and what to change.
    """

    def __init__(self, field: str, value: object, limit: str) -> None:
        """Keeps the three parts apart, so that a caller can show or test them."""
        super().__init__(f"{field} = {value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit
