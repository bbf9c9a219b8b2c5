"""The served model in the form of Anthropic's API.

Owns: the description of the model, and the page that lists it.
Does not know: requests. `server.operations` has the routes, which both APIs share.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from pensieve_jax.server.http.services import Services

VERSION_HEADER: Final = "anthropic-version"
"""A header that only clients of Anthropic's API send."""


def model_info(services: Services) -> dict[str, Any]:
    """Return the description of the served model."""
    max_context_tokens = services.engine.info.limits.max_context_tokens
    return {
        "type": "model",
        "id": services.model_name,
        "display_name": services.model_name,
        "created_at": datetime.fromtimestamp(services.started_at, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": max_context_tokens,
        "max_tokens": max_context_tokens,
    }


def model_page(services: Services) -> dict[str, Any]:
    """Return the page that lists the served model."""
    name = services.model_name
    return {"data": [model_info(services)], "has_more": False, "first_id": name, "last_id": name}
