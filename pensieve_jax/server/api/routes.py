"""The table of routes.

Owns: which modules' rows a server has. Does not know: what is in them.
"""

from __future__ import annotations

from pensieve_jax.server import page
from pensieve_jax.server.api import health, models, state, tokens
from pensieve_jax.server.openai import chat, completions

MODULES = (chat, completions, models, tokens, health, state, page)
ROUTES = tuple(route for module in MODULES for route in module.ROUTES)
