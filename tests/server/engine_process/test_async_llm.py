"""Invalid arguments of `AsyncEngine`: the caller gets the error, and other turns are not affected."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from pensieve_jax import (
    AsyncEngine,
    CacheConfig,
    ConfigError,
    InvalidRequestError,
    PensieveError,
    SamplingParams,
)
from pensieve_jax.server.engine_process import calls
from tests.server.engine_process.fakes import FakeEngines, expected, fake_engine, run, spec

PARAMS = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
NO_IDS = (42, b"ada", ["ada"], {}, 1.5, "", "\ud800", "a\0b")


class Unknown:
    """A type that no frame can hold. Its name is the same in every process, as names of tests must be."""

    def __repr__(self) -> str:
        return "Unknown()"


def test_an_id_of_a_wrong_type_does_not_end_other_turns() -> None:
    """The engine process failed to decode it, assumed that its front end was dead, and ended all turns."""

    async def work() -> None:
        async with fake_engine() as engine:
            other = engine.submit(spec([5], conversation_id="bob", max_tokens=300))
            await other.accepted()
            for bad in NO_IDS:
                turn = engine.submit([5], PARAMS, conversation_id=bad)  # type: ignore[arg-type]
                with pytest.raises(InvalidRequestError, match="conversation_id is ") as caught:
                    await turn.result()
                assert caught.value.field == "conversation_id"
                with pytest.raises(InvalidRequestError, match="conversation_id is "):
                    engine.submit(spec([5], conversation_id=bad))  # type: ignore[arg-type]
            assert (await other.result()).finish_reason == "length"
            assert (engine.state, engine.epoch) == ("ready", 1)

    run(work())


def test_calls_with_wrong_types_are_refused_and_the_engine_keeps_running() -> None:
    junk: tuple[Any, ...] = (5, -1, 2**80, None, 1.5, True, b"x", [], {}, "\ud800", "", object(), [[]])

    async def work() -> None:
        async with fake_engine() as engine:
            await engine.submit([5, 6], PARAMS, conversation_id="a").result()
            for name in (5, None, b"stats", ["stats"], "\ud800"):
                with pytest.raises(InvalidRequestError):
                    await engine.call(name)  # type: ignore[arg-type]
            for name in calls.CALLS:
                for one in junk:
                    for arguments in ((one,), ("a", one), (one, "a"), ("a", "b", one)):
                        with contextlib.suppress(PensieveError):
                            await engine.call(name, *arguments)
                        assert (engine.state, engine.epoch) == ("ready", 1), (name, arguments)

    run(work())


def test_numpy_numbers_are_accepted_as_in_the_library() -> None:
    async def work() -> None:
        engines = FakeEngines()
        async with fake_engine(engines) as engine:
            wanted = expected(engines.harness, spec([5, 6], max_tokens=4))
            kinds = ([np.int32(5), np.int64(6)], np.array([5, 6], np.uint8), (5, np.int16(6)), range(5, 7))
            for ids in kinds:
                assert (await engine.submit(ids, PARAMS).result()).token_ids == wanted
            params = SamplingParams(max_tokens=4, temperature=np.float32(0.5), top_p=np.float64(0.5), seed=1)
            assert len((await engine.submit([5], params).result()).token_ids) == 4

    run(work())


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([2**70], "prompt[0]"),
        ([5, -(2**70)], "prompt[1]"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        ([5, Unknown()], "prompt[1]"),
        (np.array([[5]]), "prompt[0]"),
        ("\ud800", "prompt"),
        (b"text", "prompt"),
        (5, "prompt"),
        (None, "prompt"),
        ({"role": "user"}, "prompt"),
        ([{"role": "user", "content": "\ud800"}], "prompt[0].content"),
        ([{"role": "user", "content": Unknown()}], "prompt[0].content"),
        ([{"role": "user", "content": "x", "more": Unknown()}], "prompt[0]"),
        ([{"role": "user", "content": "x", "more": {1}}], "prompt[0]"),
        ([{"role": "user", "content": "x"}, 5], "prompt[1]"),
    ],
    ids=repr,
)
def test_an_invalid_prompt_is_refused_with_its_field(prompt: Any, field: str) -> None:
    async def work() -> None:
        async with fake_engine() as engine:
            turn = engine.submit(prompt, PARAMS)
            for wait in (turn.accepted, turn.result, lambda: anext(aiter(turn))):
                with pytest.raises(InvalidRequestError) as caught:
                    await wait()
                assert caught.value.field == field
            assert turn.done and turn.output is None
            await turn.cancel()
            assert engine.epoch == 1

    run(work())


@pytest.mark.parametrize(
    "arguments",
    [
        *({"config": config} for config in (5, 0, {}, CacheConfig())),
        *({"history": history} for history in (5, b"x", ["x"])),
        *({"dtype": 5}, {"synchronous": "x"}, {"progress": "x"}, {"log_format": "x"}, {"model": 5}),
    ],
    ids=repr,
)
def test_unserializable_start_arguments_are_refused(arguments: dict[str, Any]) -> None:
    """The engine's process failed to decode them, and exited with a traceback."""
    with pytest.raises(ConfigError, match=f"{next(iter(arguments))} is "):
        AsyncEngine.start(**{"model": "random:llama-tiny", **arguments})
