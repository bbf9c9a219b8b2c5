"""GET /v1/models and GET /v1/models/{model}, in vLLM's shape.

Owns: how the model is described to clients.
Does not know: models.
"""

from __future__ import annotations

from typing import Any

from pensieve_jax.server.http.replies import Reply, json_reply
from pensieve_jax.server.http.request import Call
from pensieve_jax.server.http.routes import Route
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.turns.checks import check_model


async def list_models(call: Call) -> Reply:
    """The one model."""
    return json_reply({"object": "list", "data": [_card(call.services)]})


async def get_model(call: Call) -> Reply:
    """The model of this name, or 404."""
    check_model(call.services, call.path["model"])
    return json_reply(_card(call.services))


ROUTES = [Route("GET", "/v1/models", list_models), Route("GET", "/v1/models/{model:path}", get_model)]


def _card(services: Services) -> dict[str, Any]:
    return {
        "id": services.model_name,
        "object": "model",
        "created": services.started_at,
        "owned_by": "pensieve",
        "root": services.model_name,  # a path of this machine is nobody's business
        "parent": None,
        "max_model_len": services.engine.info.limits.max_context_tokens,
    }
