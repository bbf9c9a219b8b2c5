"""What several handlers ask of a request.

Owns: the check of a model's name.
Does not know: schemas.
Called by: handlers.
"""

from __future__ import annotations

from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.http.services import Services


def check_model(services: Services, model: str | None) -> None:
    """Raise ApiError 404 for a model that is not the one that is served; None is that one."""
    if model is not None and model != services.model_name:
        sentence = f"There is no model {model!r} here, but {services.model_name!r}."
        raise ApiError(404, "model_not_found", sentence, param="model")
