"""The application put together: no jax in its process, every row of the API, owners apart."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from dataclasses import replace

from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.server.application import make_application
from pensieve_jax.server.http.keys import ApiKeys
from pensieve_jax.server.http.settings import ServerSettings
from tests.server.fakes import Open, say
from tests.server.stored_engine import StoredEngine


def test_the_front_has_no_jax():
    code = (
        "import sys\nsys.modules['jax'] = sys.modules['flax'] = None\n"
        "import pensieve_jax.server.application, pensieve_jax.server.listening\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_keys_guess_each_others_ids(tmp_path):
    """What is another's and what never was are told in the same words, and change nothing."""
    keys = tmp_path / "keys"
    digests = {owner: hashlib.sha256(owner.encode()).hexdigest() for owner in ("alice", "bob")}
    keys.write_text("".join(f"{owner}:{digest}\n" for owner, digest in digests.items()))
    settings = ServerSettings(api_keys_file=str(keys))

    async def scenario():
        path = tmp_path / "history.sqlite"
        engine = StoredEngine(path, VirtualClock(1_000_000.0), say("hello there"))
        engine.info = replace(engine.info, source="random:fake-tiny", history=str(path))
        app = make_application(engine, settings, ApiKeys(keys))

        async def ask(owner: str, method: str, where: str, body=None):
            client = Open(app, method, where, body, {"authorization": f"Bearer {owner}"})
            status, _, raw = await client.whole()
            return status, json.loads(raw)

        _, response = await ask("alice", "POST", "/v1/responses", {"input": "Hello"})
        _, conversation = await ask("alice", "POST", "/v1/conversations", {"items": []})
        for real, unknown, routes in (
            (
                response["id"],
                "resp_" + "0" * 32,
                ("GET {}", "DELETE {}", "GET {}/input_items", "POST {}/cancel"),
            ),
            (conversation["id"], "conv_" + "0" * 32, ("GET {}", "DELETE {}", "GET {}/items", "POST {}")),
        ):
            kind = "responses" if real.startswith("resp") else "conversations"
            for route in routes:
                method, suffix = route.split(" ", 1)
                answers = []
                for guess in (real, unknown):
                    where = f"/v1/{kind}/{suffix.format(guess)}"
                    body = {"metadata": {}} if method == "POST" else None
                    status, error = await ask("bob", method, where, body)
                    answers.append((status, json.dumps(error).replace(guess, "ID")))
                assert answers[0] == answers[1] and answers[0][0] == 404, (route, answers)
        for field, real, unknown in (
            ("previous_response_id", response["id"], "resp_" + "0" * 32),
            ("conversation", conversation["id"], "conv_" + "0" * 32),
        ):
            answers = []
            for guess in (real, unknown):
                status, error = await ask("bob", "POST", "/v1/responses", {"input": "Hi", field: guess})
                answers.append((status, json.dumps(error).replace(guess, "ID")))
            assert answers[0] == answers[1] and answers[0][0] == 404, (field, answers)
        assert (await ask("alice", "GET", f"/v1/responses/{response['id']}"))[0] == 200
        assert (await ask("alice", "GET", f"/v1/conversations/{conversation['id']}"))[0] == 200
        # The same messages are two people's, so the second finds nothing of the first.
        messages = [{"role": "user", "content": "Hello"}]
        for owner in ("alice", "bob"):
            await ask(owner, "POST", "/v1/chat/completions", {"messages": messages})
        more = [*messages, {"role": "assistant", "content": "hello there"}, *messages]
        await ask("bob", "POST", "/v1/chat/completions", {"messages": more})
        first, second, third = engine.turns[-3:]
        assert third.spec.node.parent_id == second.turn_id != first.turn_id
        engine.store.close()

    asyncio.run(scenario())
