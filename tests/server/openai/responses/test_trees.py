"""The conversation tree of responses as `/v1/pensieve/trees/{root}` returns it, also when it is too long."""

from __future__ import annotations

import httpx2
import pytest

from pensieve_jax.history import trees
from tests.server.fakes import say
from tests.server.live import LiveServer


@pytest.fixture
def server(tmp_path):
    with LiveServer(tmp_path / "history.sqlite", say("hello there")) as running:
        yield running


def tree_of(server, response_id):
    root = response_id.removeprefix("resp_")[:16]
    return httpx2.get(f"{server.url}/pensieve/trees/{root}").json()


def test_instructions_are_listed_once(server, client):
    words = {"instructions": "be kind"}
    first = client.responses.create(input="hi", **words)
    second = client.responses.create(input="and", previous_response_id=first.id, **words)
    told = tree_of(server, first.id)
    assert told["instructions"] == ["be kind"]
    assert [(turn["id"], turn["parent"], turn["instructions"]) for turn in told["data"]] == [
        (first.id, None, 0),
        (second.id, first.id, 0),
    ]
    plain = client.responses.create(input="hi")
    told = tree_of(server, plain.id)
    assert told["instructions"] == [] and told["data"][0]["instructions"] is None


def test_a_turn_names_its_parent_even_if_the_parent_is_left_out(server, client, monkeypatch):
    """A client that edits the turn needs the id of the response to continue from."""
    first = client.responses.create(input="hi")
    second = client.responses.create(input="and", previous_response_id=first.id)
    other = client.responses.create(input="or", instructions="be brief", previous_response_id=second.id)
    monkeypatch.setattr(trees, "MAX_TREE_CHARACTERS", 1)
    for shown, parent in ((second, first), (other, second)):
        (turn,) = tree_of(server, shown.id)["data"]
        assert (turn["id"], turn["parent"]) == (shown.id, parent.id)
    again = client.responses.create(input="or else", previous_response_id=turn["parent"])
    assert again.previous_response_id == second.id
    node = server.engine.turns[-1].spec.node
    assert f"resp_{node.parent_id}" == second.id
