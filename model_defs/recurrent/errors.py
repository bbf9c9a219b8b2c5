"""Error of invalid requests to recurrent models. All other errors are those of `model_defs.errors`.

Owns: this error.
Does not know: JAX, or models.
"""

import reprlib

from model_defs.errors import ModelError


class RequestError(ModelError):
    """A recurrent model cannot compute a request: `<field> is <value>, but must be <limit>.`

    Attributes:
      field: dotted or indexed name, which also names the node of a tree.
      value: the rejected value.
      limit: description of valid values.
    """

    def __init__(self, field: str, value: object, limit: str) -> None:
        """Compose the message; `limit` completes the words "must be"."""
        self.field, self.value, self.limit = field, value, limit
        super().__init__(f"{field} is {reprlib.repr(value)}, but must be {limit}.")
