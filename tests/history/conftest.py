"""Histories of either kind, for tests of their common contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve_jax.history import HistoryReader, HistoryStore, open_store

FINGERPRINT = "model:a tokenizer:b"


@pytest.fixture(params=["file", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return a new location: a path with characters that are special in URLs, or a URL."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres").url()
    return tmp_path / "a history #1?.sqlite"


@pytest.fixture(params=["file", "memory", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HistoryStore]:
    """Yield an empty history."""
    locations = {"file": lambda: tmp_path / "chats.sqlite", "memory": lambda: None}
    locations["postgres"] = lambda: request.getfixturevalue("postgres").url()
    with open_store(locations[request.param](), fingerprint=FINGERPRINT) as opened:
        yield opened


@pytest.fixture
def read_store(location: Any) -> Iterator[HistoryStore]:
    """Yield an empty history that `reader` reads."""
    with open_store(location, fingerprint=FINGERPRINT) as opened:
        yield opened


@pytest.fixture
def reader(read_store: HistoryStore, location: Any) -> Iterator[HistoryReader]:
    """Yield a reader beside the writer."""
    with HistoryReader(location, fingerprint=FINGERPRINT) as opened:
        yield opened
