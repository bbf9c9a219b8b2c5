"""A real engine in a real process: answers, startup errors, and deaths of either side."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pensieve_jax
from pensieve_jax import (
    LLM,
    AsyncEngine,
    ConfigError,
    EngineConfig,
    EngineDiedError,
    HistoryLockedError,
    SamplingParams,
    UnsupportedModelError,
)
from pensieve_jax.history import SQLiteHistoryStore
from tests.server.engine_process import front
from tests.server.engine_process.fakes import TIMEOUT_S, until

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=7, ignore_eos=True, logprobs=1)


class EngineInProcess:
    """An engine in a process, its history, and the event loop that it runs on."""

    def __init__(self, history: Path, compilation_cache: str) -> None:
        self.history = history
        self.loop = asyncio.Runner()
        config = front.config(compilation_cache)
        self.engine = AsyncEngine.start(
            front.MODEL, dtype="float32", history=history, config=config, progress=False
        )
        self.run(self.engine.open())

    def run(self, work) -> object:
        return self.loop.run(asyncio.wait_for(work, TIMEOUT_S))

    def close(self) -> None:
        self.run(self.engine.close())
        self.loop.close()


@pytest.fixture(scope="module")
def process_engine(tmp_path_factory, compilation_cache: str) -> Iterator[EngineInProcess]:
    process_engine = EngineInProcess(tmp_path_factory.mktemp("process") / "chats.sqlite", compilation_cache)
    yield process_engine
    process_engine.close()


def test_turns_equal_the_librarys(process_engine: EngineInProcess, llm: LLM) -> None:
    prompts = ["Hello, I am Ada.", [5, 6, 7], [{"role": "user", "content": "Hi"}]]
    ids = [f"process-{number}" for number in range(3)]

    async def ask(again: bool) -> list:
        turns = [
            process_engine.engine.submit([9] if again else prompt, PARAMS, conversation_id=name)
            for prompt, name in zip(prompts, ids, strict=True)
        ]
        return [await turn.result() for turn in turns]

    for again in (False, True):
        ours = process_engine.run(ask(again))
        theirs = llm.generate([[9]] * 3 if again else prompts, PARAMS, conversation_ids=ids)
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine.token_ids, mine.text, mine.seed) == (other.token_ids, other.text, other.seed)
            assert mine.usage == other.usage
            assert [one.token_id for one in mine.logprobs] == [one.token_id for one in other.logprobs]


def test_the_engines_description_arrives(process_engine: EngineInProcess, llm: LLM) -> None:
    info = process_engine.engine.info
    assert (info.model_name, info.source) == (front.MODEL, front.MODEL)
    assert info.history == str(process_engine.history) and info.limits == llm.engine.limits
    description = {**llm.describe(), "compilation_cache_dir": None}
    assert {**info.description, "compilation_cache_dir": None} == json.loads(json.dumps(description))


def test_an_idle_engine_sends_heartbeats(process_engine: EngineInProcess) -> None:
    heard_s = process_engine.engine._connection.last_heard_s
    process_engine.run(until(lambda: process_engine.engine._connection.last_heard_s != heard_s))
    assert (
        process_engine.engine.last_heard_s < TIMEOUT_S and process_engine.engine.last_stats["num_steps"] > 0
    )


def test_the_engine_process_ignores_ctrl_c_and_sigterm(process_engine: EngineInProcess) -> None:
    process = process_engine.engine._handle.process
    assert os.getpgid(process.pid) != os.getpgid(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    output = process_engine.run(process_engine.engine.submit([5], PARAMS).result())
    assert len(output.token_ids) == 12


@pytest.mark.long
def test_a_killed_engine_is_restarted_and_continues_from_the_history(
    process_engine: EngineInProcess, llm: LLM
) -> None:
    async def work() -> None:
        engine = process_engine.engine
        first = await engine.submit([5, 6], PARAMS, conversation_id="killed").result()
        long = SamplingParams(max_tokens=300, ignore_eos=True)  # neither ends before the engine
        running = engine.submit([7] * 3, long, conversation_id="b")
        queued = engine.submit([7], long, conversation_id="c")
        await anext(aiter(running))
        engine._handle.kill()
        for turn in (running, queued):
            with pytest.raises(EngineDiedError, match="died"):
                await turn.result()
        await until(lambda: engine.epoch == 2)
        assert engine.state == "ready"
        names = {row["conversation_id"] for row in await engine.call("conversations")}
        assert "killed" in names and "b" not in names
        second = await engine.submit([9], PARAMS, conversation_id="killed").result()
        assert second.usage.recomputed_tokens > 0
        expected = [
            llm.generate([prompt], PARAMS, conversation_ids=["killed"])[0] for prompt in ([5, 6], [9])
        ]
        assert [first.token_ids, second.token_ids] == [one.token_ids for one in expected]

    process_engine.run(work())


@pytest.mark.long
def test_a_refused_start_gives_the_reason(
    process_engine: EngineInProcess, tmp_path: Path, compilation_cache: str
) -> None:
    config = front.config(compilation_cache)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Nothing"], "model_type": "nothing"}))
    refused: list[tuple[type[Exception], dict]] = [
        (ConfigError, {"model": "/no/such/directory"}),
        (UnsupportedModelError, {"model": str(tmp_path)}),
        (HistoryLockedError, {"model": front.MODEL, "history": process_engine.history}),
    ]

    async def start(arguments: dict) -> None:
        async with AsyncEngine.start(dtype="float32", config=config, progress=False, **arguments):
            pass

    async def start_all() -> list:
        return await asyncio.gather(*(start(arguments) for _, arguments in refused), return_exceptions=True)

    for error, (kind, _) in zip(process_engine.run(start_all()), refused, strict=True):
        assert type(error) is kind and str(error)


@pytest.mark.long
def test_an_engine_whose_history_was_removed_is_not_restarted(tmp_path: Path, compilation_cache: str) -> None:
    """Over a new file it would write turns that the front end, which reads the old one, never finds."""

    async def work() -> None:
        config, history = front.config(compilation_cache), tmp_path / "chats.sqlite"
        arguments = {"dtype": "float32", "config": config, "progress": False}
        async with AsyncEngine.start(front.MODEL, history=history, **arguments) as engine:
            for file in tmp_path.glob("chats.sqlite*"):
                file.unlink()
            engine._handle.kill()
            await until(lambda: engine.gave_up.is_set() or engine.epoch == 2)
            assert engine.is_damaged and engine.epoch == 1 and not list(tmp_path.iterdir())

    asyncio.run(asyncio.wait_for(work(), TIMEOUT_S))


@pytest.mark.long
def test_an_engine_ends_with_its_front_end(tmp_path: Path, compilation_cache: str) -> None:
    history = tmp_path / "chats.sqlite"
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", front.__file__, str(history), compilation_cache],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        engine_pid, has_jax = process.stdout.readline().split()
        assert has_jax == "False", "the front end imported JAX"
        engine = os.pidfd_open(int(engine_pid))
        process.kill()
    try:
        poll = select.poll()
        poll.register(engine, select.POLLIN)
        assert poll.poll(1e3 * TIMEOUT_S), "the engine outlived its front end"
    finally:
        os.close(engine)
    fingerprint = _fingerprint(history)
    with SQLiteHistoryStore(history, fingerprint=fingerprint) as store:
        assert [info.conversation_id for info in store.conversations()] == ["ended"]


def _fingerprint(history: Path) -> str:
    from model_defs import model_fingerprint
    from pensieve_jax.assembly import source_config
    from pensieve_jax.history import history_fingerprint
    from pensieve_jax.text import byte_tokenizer

    config = EngineConfig()
    model = source_config(front.MODEL, config.runner.max_position_embeddings)
    digest = model_fingerprint(model, front.MODEL, seed=config.runner.random_seed)
    return history_fingerprint({"model": digest}, byte_tokenizer().fingerprint)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys\nsys.modules['msgspec'] = None\nimport pensieve_jax\n"
        "try:\n    pensieve_jax.AsyncEngine\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install "pensieve-jax[server]"' in done.stdout
    assert pensieve_jax.AsyncEngine is AsyncEngine
