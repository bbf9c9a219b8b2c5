"""What recurrent models raise of requests, beside what all of `model_defs` raises.

Owns: that error.
Does not know: JAX, or models.
"""

import reprlib

from model_defs.errors import ModelError


class RequestError(ModelError):
    """A request that a recurrent model cannot compute: `<field> is <value>, but must be <limit>.`

    Attributes:
      field: dotted or indexed name, which also names the node of a tree.
      value: what was found.
      limit: what would be accepted, in words.
    """

    def __init__(self, field: str, value: object, limit: str) -> None:
        """`limit` completes the words "must be"."""
        self.field, self.value, self.limit = field, value, limit
        super().__init__(f"{field} is {reprlib.repr(value)}, but must be {limit}.")
