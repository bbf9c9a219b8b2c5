"""Fixture that tests of contexts share."""

from __future__ import annotations

import pytest

from pensieve_jax.server.context.resolver import Resolver
from pensieve_jax.server.context.turn_index import TurnIndex
from tests.server.context.scenarios import FakeSource, tokenizer


@pytest.fixture
def resolving() -> Resolver:
    """Return a resolver without durable turns."""
    return Resolver(tokenizer(), "model:1", TurnIndex(FakeSource()))
