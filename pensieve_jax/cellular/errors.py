"""Errors of a cellular engine.

Owns: the error classes of cells and graphs.
Does not know: the code that raises them.
"""

from __future__ import annotations

from pensieve_jax.core.errors import InvalidFieldError, PensieveError


class CellError(InvalidFieldError):
    """A cell cannot be batched, because of its declaration or its results."""


class GraphError(InvalidFieldError):
    """A request's graph cannot be computed; the field names the node."""


class UnfoldError(GraphError):
    """Methods of a graph were called in an invalid order."""


class CapacityError(InvalidFieldError):
    """A request needs more than the engine has, or arrives when too many wait."""


class LaunchFailedError(PensieveError):
    """A launch with cells of this request failed."""


class RequestCancelledError(PensieveError):
    """The request was cancelled, so it has no result."""
