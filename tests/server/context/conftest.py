"""What tests of contexts begin with."""

from __future__ import annotations

import pytest

from pensieve_jax.server.context.resolver import Resolver
from pensieve_jax.server.context.turn_index import TurnIndex
from tests.server.context.scenarios import FakeSource, tokenizer


@pytest.fixture
def resolving() -> Resolver:
    """Without any turns."""
    return Resolver(tokenizer(), "model:1", TurnIndex(FakeSource()))
