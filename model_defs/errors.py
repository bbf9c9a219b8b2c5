"""What model_defs raises: every error says what was found, what was expected and what to change.

They are `ValueError`s as well, so a caller that knows nothing of models can catch a bad argument.
Knows nothing of JAX. Raised by config, sharding, weights and registry; caught by whoever loads a model.
"""

import reprlib


class ModelError(ValueError):
    """Any reason why a model cannot be built, loaded or placed on its devices."""


class UnsupportedModelError(ModelError):
    """The architecture, or an option of it, is not implemented here. The message names it."""


class CheckpointError(ModelError):
    """A checkpoint has a missing, extra, misshapen or truncated tensor or file. The message names it."""


class ShardingError(ModelError):
    """A dimension of the model does not divide by the size of the mesh axis "tp". The message names both."""


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
