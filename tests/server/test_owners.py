"""Owners share no KV cache and no stored state; `test_guessed_ids` tests that its existence is hidden too."""

from __future__ import annotations

import hashlib

import pytest

from pensieve_jax.server.http.keys import ApiKeys
from tests.server.fakes import say
from tests.server.live import LiveServer


@pytest.fixture
def server(tmp_path):
    keys = tmp_path / "keys"
    lines = [f"{owner}:{hashlib.sha256(owner.encode()).hexdigest()}" for owner in ("ann", "bob")]
    keys.write_text("\n".join(lines))
    with LiveServer(tmp_path / "history.sqlite", say("hello"), keys=ApiKeys(str(keys))) as running:
        yield running


def test_keys_share_no_kv_cache(server):
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "and"},
    ]
    with server.client(api_key="ann") as ann, server.client(api_key="bob") as bob:
        ann.responses.create(input="hi")
        bob.responses.create(input=history)
        assert server.engine.turns[-1].spec.node.parent_id is None
        ann.responses.create(input=history)
        assert server.engine.turns[-1].spec.node.parent_id is not None


def test_idempotency_keys_and_retries_are_separate_per_owner(server):
    with server.client(api_key="ann") as ann, server.client(api_key="bob") as bob:
        first = ann.responses.create(input="hi", extra_headers={"Idempotency-Key": "k"})
        other = bob.responses.create(input="hi", extra_headers={"Idempotency-Key": "k"})
        assert first.id != other.id
        third = bob.responses.create(input="another", extra_headers={"Idempotency-Key": "b"})
        assert third.id not in (first.id, other.id)
