"""What model_defs raises: every error says what was found, what was expected and what to change.

They are `ValueError`s as well, so a caller that knows nothing of models can catch a bad argument.
Knows nothing of JAX. Raised by config, sharding, weights and registry; caught by whoever loads a model.
"""


class ModelError(ValueError):
    """Any reason why a model cannot be built, loaded or placed on its devices."""


class UnsupportedModelError(ModelError):
    """The architecture, or an option of it, is not implemented here. The message names it."""


class CheckpointError(ModelError):
    """A checkpoint has a missing, extra, misshapen or truncated tensor or file. The message names it."""


class ShardingError(ModelError):
    """A dimension of the model does not divide by the size of the mesh axis "tp". The message names both."""
