"""The assembled application: its process does not import jax, and owners are separate."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from dataclasses import replace

import pytest

from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.server.app import make_application
from pensieve_jax.server.http.keys import ApiKeys
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.text import byte_tokenizer
from tests.server.fakes import Open, say
from tests.server.stored_engine import StoredEngine


def test_the_front_end_does_not_import_jax():
    code = (
        "import sys\nsys.modules['jax'] = sys.modules['flax'] = None\n"
        "import pensieve_jax.server.app, pensieve_jax.server.main\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"chat_template.jinja": "{% if %}"}, "The chat template is not valid Jinja (Expected an expression"),
        ({}, "The tokenizer has no chat template"),
        (None, "The model has no tokenizer"),
    ],
    ids=["broken", "missing", "no tokenizer"],
)
def test_a_start_says_that_messages_will_be_refused(tmp_path, caplog, files, reason):
    if files is not None:
        byte_tokenizer()._backend.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text("{}")
        for name, text in files.items():
            (tmp_path / name).write_text(text)
    path = tmp_path / "history.sqlite"
    engine = StoredEngine(path, VirtualClock(1_000_000.0), say("hello there"))
    engine.info = replace(engine.info, source=str(tmp_path), history=str(path))
    make_application(engine, ServerSettings(), ApiKeys(None))
    engine.store.close()
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith(f"requests with messages are refused: {reason}")


def test_the_application_that_chooses_among_engines_names_new_roots(tmp_path):
    async def scenario():
        path = tmp_path / "history.sqlite"
        engine = StoredEngine(path, VirtualClock(1_000_000.0), say("hello there"))
        engine.info = replace(engine.info, source="random:fake-tiny", history=str(path))
        app = make_application(engine, ServerSettings(), ApiKeys(None), root_for=lambda num_tokens: "0" * 16)
        chat = {"messages": [{"role": "user", "content": "Hello"}]}
        for path, body in (("chat/completions", chat), ("completions", {"prompt": "Hello"})):
            assert (await Open(app, "POST", f"/v1/{path}", body, {}).whole())[0] == 200
        assert [turn.turn_id[:16] for turn in engine.turns] == ["0" * 16] * 2
        engine.store.close()

    asyncio.run(scenario())


def test_the_same_messages_of_two_owners_are_separate(tmp_path):
    keys = tmp_path / "keys"
    digests = {owner: hashlib.sha256(owner.encode()).hexdigest() for owner in ("alice", "bob")}
    keys.write_text("".join(f"{owner}:{digest}\n" for owner, digest in digests.items()))
    settings = ServerSettings(api_keys_file=str(keys))

    async def scenario():
        path = tmp_path / "history.sqlite"
        engine = StoredEngine(path, VirtualClock(1_000_000.0), say("hello there"))
        engine.info = replace(engine.info, source="random:fake-tiny", history=str(path))
        app = make_application(engine, settings, ApiKeys(keys))

        async def say_to_it(owner: str, messages):
            headers = {"authorization": f"Bearer {owner}"}
            client = Open(app, "POST", "/v1/chat/completions", {"messages": messages}, headers)
            assert (await client.whole())[0] == 200

        messages = [{"role": "user", "content": "Hello"}]
        for owner in ("alice", "bob"):
            await say_to_it(owner, messages)
        more = [*messages, {"role": "assistant", "content": "hello there"}, *messages]
        await say_to_it("bob", more)
        first, second, third = engine.turns[-3:]
        assert third.spec.node.parent_id == second.turn_id != first.turn_id
        engine.store.close()

    asyncio.run(scenario())
