"""Fixtures that tests of the API share; a file whose server answers by itself defines its own."""

from __future__ import annotations

import pytest

from tests.server.live import LiveServer


@pytest.fixture
def server(tmp_path):
    with LiveServer(tmp_path / "history.sqlite") as running:
        yield running


@pytest.fixture
def client(server):
    with server.client() as made:
        yield made
