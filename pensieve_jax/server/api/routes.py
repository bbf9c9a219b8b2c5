"""The table of routes.

Owns: which modules' rows a server has. Does not know: what is in them.
Called by: whoever starts a server.
"""

from __future__ import annotations

from pensieve_jax.server.api import chat, completions, health, models, tokens

ROUTES = (*chat.ROUTES, *completions.ROUTES, *models.ROUTES, *tokens.ROUTES, *health.ROUTES)
