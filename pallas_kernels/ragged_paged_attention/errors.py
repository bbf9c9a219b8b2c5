"""Error of the attention package: no back end, or not the selected one, supports an argument.

Owns: the error type. Does not know: the limits of any back end.
"""

from __future__ import annotations


class AttentionArgumentError(ValueError):
    """An argument is not supported.

    Attributes:
      field: name of the argument.
      value: the given value.
      limit: accepted values, and what to change.
    """

    def __init__(self, field: str, value: object, limit: str) -> None:
        """Store the three parts separately, so that a caller can show or test them."""
        super().__init__(f"{field} = {value!r}: {limit}")
        self.field = field
        self.value = value
        self.limit = limit
