"""Rows of the table of routes.

Owns: what is said of a route. Does not know: any route.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pensieve_jax.server.http.replies import Reply
from pensieve_jax.server.http.request import Call

type Handler = Callable[[Call], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path.

    Attributes:
      method: GET, POST or DELETE. A GET answers HEAD as well.
      path: with parameters in braces, as in "/v1/responses/{response_id}".
      handler: gets the request and returns the answer, or raises.
      needs_key: False answers those without a key, where there are keys.
      has_body: a POST that may come without one is asked for its content type only where it has one.
    """

    method: str
    path: str
    handler: Handler
    needs_key: bool = True
    has_body: bool = True
