"""Fixtures that tests of the API share; a file whose server answers by itself defines its own."""

from __future__ import annotations

from typing import Any

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


@pytest.fixture
def post(server):
    with server.client(_strict_response_validation=False) as client:

        def send(path: str, body: Any = None, method: str = "POST") -> tuple[int, dict[str, Any], Any]:
            response = client._client.request(method, f"{server.url}{path}", json=body)
            return response.status_code, response.json(), response.headers

        yield send
