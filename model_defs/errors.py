"""Errors of model_defs. Each message names the found value, the expected one, and what to change.

They derive from `ValueError`, so that a caller that knows nothing of models can catch a bad argument.
Knows nothing of JAX. Raised by config, sharding, weights and registry; caught by callers that load a model.
"""


class ModelError(ValueError):
    """A model cannot be built, loaded or placed on its devices."""


class UnsupportedModelError(ModelError):
    """The architecture, or an option of it, is not implemented. The message names it."""


class CheckpointError(ModelError):
    """A checkpoint has a missing, extra, misshapen or truncated tensor or file. The message names it."""


class ShardingError(ModelError):
    """A dimension of the model is not divisible by the size of the mesh axis "tp". The message names both."""
