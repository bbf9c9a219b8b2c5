"""A conversation through the openai client survives SIGKILL of both processes.

The tokens of its turns, greedy and sampled with a seed, equal those of an engine that was never killed.
"""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest

from pensieve_jax import LLM, SamplingParams
from tests.deadlines import TIMEOUT_S
from tests.server.conftest import SIZES, engine_config
from tests.server.processes import engine_of

MESSAGES = (
    "Hi! My name is Ada. I am looking for a place to eat in San Jose.",
    "Italian please, something cheap.",
    "What is my name?",
)
NUM_TOKENS = 12
LAUNCHER = Path(__file__).parents[2] / "scripts" / "serve.py"
SAMPLINGS = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 11})


class KillableServer:
    """`pensieve serve` as users start it; killed and restarted on the same history."""

    def __init__(self, history: Path, compilation_cache: str) -> None:
        self._command = [
            *(sys.executable, str(LAUNCHER), "--dtype=float32", *SIZES),
            *(f"--history={history}", "--port=0", f"--compilation_cache_dir={compilation_cache}"),
        ]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        found = re.search(r"http://\S+", self.process.stdout.readline())
        assert found, "it did not start"
        self.client = openai.OpenAI(base_url=f"{found[0]}/v1", api_key="none", max_retries=0)

    def kill_both(self) -> None:
        front = self.process.pid
        engine = engine_of(front)
        self.client.close()
        for pid in (front, engine):
            os.kill(pid, signal.SIGKILL)
        self._reap()

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        assert self._reap() == 0

    def _reap(self) -> int:
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(TIMEOUT_S)


@pytest.fixture(scope="module")
def never_killed(compilation_cache: str) -> list[list[tuple[int, ...]]]:
    """Return, for each way of sampling, the ids of every reply."""
    with LLM("chat", dtype="float32", config=engine_config(compilation_cache)) as llm:
        return [
            [
                llm.chat(
                    [{"role": "user", "content": message}],
                    SamplingParams(max_tokens=NUM_TOKENS, **sampling),
                    conversation_id=str(number),
                ).token_ids
                for message in MESSAGES
            ]
            for number, sampling in enumerate(SAMPLINGS)
        ]


@pytest.fixture
def server(tmp_path: Path, compilation_cache: str) -> Iterator[KillableServer]:
    server = KillableServer(tmp_path / "chats.sqlite", compilation_cache)
    yield server
    server.close()


@pytest.mark.long  # starts that import JAX; api/test_real_engine.py ends its server well, and is short
def test_a_conversation_survives_both_processes(server, tmp_path, never_killed):
    last: dict[int, str] = {}
    conversation = server.client.conversations.create().id
    for turn, message in enumerate(MESSAGES):
        if turn == len(MESSAGES) - 1:
            server.kill_both()
            server.start()
        for number, sampling in enumerate(SAMPLINGS):
            extra = {"seed": sampling["seed"]} if "seed" in sampling else {}
            where = {"conversation": conversation} if number else {"previous_response_id": last.get(0)}
            response = server.client.responses.create(
                input=message,
                max_output_tokens=NUM_TOKENS,
                temperature=sampling["temperature"],
                extra_body=extra,
                **{name: value for name, value in where.items() if value is not None},
            )
            sources = response.usage.to_dict()["pensieve"]
            if (
                turn == len(MESSAGES) - 1
            ):  # nothing was in memory: all of it comes from the history, and none from the client
                assert sources["recomputed_tokens"] > 0 and sources["gpu_tokens"] == 0
                assert response.usage.input_tokens > sources["new_tokens"]
            last[number] = response.id
    items = server.client.conversations.items.list(conversation, order="asc").data
    assert [item.role for item in items] == ["user", "assistant"] * len(MESSAGES)
    for number, expected in enumerate(never_killed):
        assert replies(tmp_path / "chats.sqlite", last[number]) == expected


def replies(history: Path, response_id: str) -> list[tuple[int, ...]]:
    """Return the ids of all replies on the path to a response."""
    found: list[tuple[int, ...]] = []
    turn_id: str | None = response_id.removeprefix("resp_")
    with sqlite3.connect(f"file:{history}?mode=ro", uri=True) as connection:
        while turn_id is not None:
            turn_id, ids = connection.execute(
                "SELECT parent_id, output_ids FROM turns WHERE turn_id = ?", (turn_id,)
            ).fetchone()
            found.append(tuple(np.frombuffer(ids, np.int32).tolist()))
    connection.close()
    return found[::-1]
