"""What a cellular engine raises on purpose.

Owns: the error classes of cells and graphs.
Does not know: who raises them.
"""

from __future__ import annotations

from pensieve_jax.core.errors import InvalidFieldError, PensieveError


class CellError(InvalidFieldError):
    """A cell that cannot be batched: what it says of itself, or what it returns."""


class GraphError(InvalidFieldError):
    """A request's graph that cannot be computed; the field names the node."""


class UnfoldError(GraphError):
    """Methods of a graph that were called in an order in which they make no requests."""


class CapacityError(InvalidFieldError):
    """A request that needs more than the engine has, or comes when too many wait."""


class LaunchFailedError(PensieveError):
    """The launch that a request's cells were in has failed."""


class RequestCancelledError(PensieveError):
    """The result of a request that was cancelled was asked for."""
