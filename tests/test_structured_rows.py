"""Replies with forms are the same alone, in company, under pressure, after failures and after restarts.

Grammars are compiled, and a tiny model computes; `engine/test_late_rows.py` does the same with fakes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest

from pensieve_jax import (
    LLM,
    CacheConfig,
    EngineConfig,
    RunnerConfig,
    SamplingParams,
    SchedulerConfig,
    StructuredOutput,
)
from pensieve_jax.assembly import assemble
from pensieve_jax.core.errors import PensieveError, StepFailedError
from pensieve_jax.core.outputs import Output
from pensieve_jax.core.turn_node import TurnNode, new_turn_id
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine import late_rows
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.late_rows import LateRows
from pensieve_jax.history.reader import HistoryReader
from pensieve_jax.server.async_engine import EngineInfo
from pensieve_jax.server.context.resolver import Resolver
from pensieve_jax.server.context.turn_index import HistoryTurns, TurnIndex
from pensieve_jax.server.engine_process.async_llm import AsyncEngine
from pensieve_jax.server.engine_process.spawn import EngineHandle
from pensieve_jax.server.engine_process.supervisor import RestartPolicy
from pensieve_jax.server.http.services import Services
from pensieve_jax.text import ReplyReader
from tests.server.engine_process.fakes import TIMEOUT_S, Parts, ThreadHandle, until
from tests.server.fakes import Harness
from tests.server.live import LiveServer

MODEL = "random:llama-tiny"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 40}, "b": {"enum": [1, 22, 333]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS = (
    StructuredOutput.regex("[a-f]{30}[0-9]{20,30}"),
    StructuredOutput.json_schema(SCHEMA),
    StructuredOutput.choice(["yes" * 12, "no" * 20, "perhaps" * 6]),
    None,
    StructuredOutput.grammar('start: ("a" | "bc")~20 "."'),
    None,
)
NAMES = [f"c{number}" for number in range(len(FORMS))]


def config_of(gpu_pages: int, cpu_pages: int = 16, num_devices: int = 1) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(gpu_pages=gpu_pages, cpu_pages=cpu_pages, chunk_tokens=16),
        scheduler=SchedulerConfig(
            max_num_running=8, max_num_batched_tokens=64, token_buckets=(64,), max_context_tokens=256
        ),
        runner=RunnerConfig(tensor_parallel_size=num_devices),
    )


def opened(gpu_pages: int, history: Path, cpu_pages: int = 16, num_devices: int = 1) -> LLM:
    config = config_of(gpu_pages, cpu_pages, num_devices)
    return LLM(MODEL, dtype="float32", config=config, history=str(history), progress=False)


def params_of(forms: Sequence[StructuredOutput | None] = FORMS) -> list[SamplingParams]:
    return [
        SamplingParams(structured=form, temperature=1.0, seed=seed, max_tokens=70, ignore_eos=form is None)
        for seed, form in enumerate(forms)
    ]


def prompts(turn: int) -> list[str]:
    return [f"Question {turn} of {name}, and what do you say?" for name in NAMES]


def ids_of(outputs: Sequence[Output]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def one_by_one(llm: LLM, turn: int, names: Sequence[str], params: Sequence[SamplingParams]) -> list[Any]:
    return [
        llm.generate([prompt], [one], conversation_ids=[name])[0].token_ids
        for prompt, one, name in zip(prompts(turn), params, names, strict=True)
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[tuple[int, ...]]]]:
    """The ids of two turns of each conversation, which had the engine and a large cache to itself."""
    with opened(120, tmp_path_factory.mktemp("alone") / "turns.sqlite") as llm:
        yield [one_by_one(llm, turn, NAMES, params_of()) for turn in range(2)]


def check_forms(outputs: Sequence[Output]) -> None:
    assert [output.finish_reason for output in outputs if output.finish_reason != "length"].count("stop") >= 3
    if outputs[1].finish_reason == "stop":
        jsonschema.validate(json.loads(outputs[1].text), SCHEMA)
    assert outputs[2].text in FORMS[2].choices  # type: ignore[union-attr]


def check_pressure(llm: LLM, outputs: Sequence[Output], cpu_pages: int) -> None:
    """Check that rows were suspended, and that chunks came back in the way that the tiers allow."""
    stats = llm.engine.stats()
    assert sum(output.usage.num_suspensions for output in outputs) > 0
    assert stats["num_dropped_chunks"] > 0
    assert stats["recomputed_tokens"] + stats["resume_recomputed_tokens"] > 0
    num_copied_in = stats["num_swapped_in_chunks"]
    assert num_copied_in > 0 if cpu_pages else num_copied_in == 0


@pytest.mark.parametrize(
    ("cpu_pages", "num_devices"), [(16, 1), (0, 1), pytest.param(16, 2, marks=pytest.mark.long)]
)
def test_rows_in_company_under_pressure_equal_rows_alone(alone, tmp_path, cpu_pages, num_devices):
    """24 pages hold a third of the rows, so rows are suspended, and chunks are copied or dropped."""
    with opened(24, tmp_path / "turns.sqlite", cpu_pages, num_devices) as llm:
        for turn in range(2):
            outputs = llm.generate(prompts(turn), params_of(), conversation_ids=NAMES)
            assert ids_of(outputs) == alone[turn]
            check_forms(outputs)
        check_pressure(llm, outputs, cpu_pages)


def never_waits(patch: pytest.MonkeyPatch) -> None:
    """Make the mask of a step before the ids of the step before it are known."""
    patch.setattr(LateRows, "wait_for_ids", lambda self, sampling: False)


def accepts_one_id_twice(patch: pytest.MonkeyPatch) -> None:
    """Give the masks the ids of the third step again, as a step that is run again could."""
    accept, num_steps = LateRows.accept, itertools.count(1)

    def again(self: LateRows, *step: Any) -> None:
        for _ in range(2 if next(num_steps) == 3 else 1):
            accept(self, *step)

    patch.setattr(LateRows, "accept", again)


@pytest.mark.parametrize("plant", [never_waits, accepts_one_id_twice])
def test_planted_faults_change_rows(alone, tmp_path, plant, monkeypatch):
    plant(monkeypatch)
    with opened(120, tmp_path / "turns.sqlite") as llm:
        try:
            outputs = llm.generate(prompts(0), params_of(), conversation_ids=NAMES)
        except PensieveError:  # the grammar does not allow the id
            return
    assert ids_of(outputs) != alone[0]


def test_forks_and_a_restart_change_no_row(alone, tmp_path):
    path = tmp_path / "turns.sqlite"
    with opened(24, path) as llm:
        assert ids_of(llm.generate(prompts(0), params_of(), conversation_ids=NAMES)) == alone[0]
    with opened(24, path) as llm:
        forks = [f"{name}-fork" for name in NAMES]
        for name, fork in zip(NAMES, forks, strict=True):
            llm.fork(name, fork)
        outputs = llm.generate(prompts(1) * 2, params_of() * 2, conversation_ids=[*NAMES, *forks])
        assert ids_of(outputs) == alone[1] * 2


def test_rows_without_a_form_are_those_of_a_run_without_forms(alone, tmp_path):
    free = [number for number, form in enumerate(FORMS) if form is None]
    with opened(120, tmp_path / "turns.sqlite") as llm:
        beside = llm.generate(prompts(0), params_of())
        without = llm.generate(prompts(0), params_of([None] * len(FORMS)))
    for number in free:
        assert beside[number].token_ids == without[number].token_ids == alone[0][number]
        assert beside[number].text == without[number].text


def slow_masks(engine: Engine, patch: pytest.MonkeyPatch) -> list[int]:
    """Let a step have time for four masks; returns the numbers of waiting rows, one for each step so far."""
    ticks, num_waiting = itertools.count(), []
    patch.setattr(late_rows, "ROW_S", 1e9)
    rows = engine._late_rows
    rows.now_s = lambda: next(ticks) * 0.004  # three looks at the clock for each mask
    words = rows.words

    def counted(*step: Any) -> Any:
        found = words(*step)
        num_waiting.append(len(rows.waiting))
        return found

    patch.setattr(rows, "words", counted)
    return num_waiting


@pytest.mark.parametrize("gpu_pages", [24, 120])
def test_rows_that_wait_for_their_masks_equal_rows_alone(alone, tmp_path, gpu_pages, monkeypatch):
    with opened(gpu_pages, tmp_path / "turns.sqlite") as llm:
        num_waiting = slow_masks(llm.engine, monkeypatch)
        outputs = llm.generate(prompts(0) * 2, params_of(FORMS) * 2)
        assert ids_of(outputs) == alone[0] * 2
    assert sum(num_waiting) > 0


class FailingSteps:
    """An engine's runner whose calls fail at some times: "launch", "choose" or "fetch"."""

    def __init__(self, engine: Engine, place: str, at: Sequence[int]) -> None:
        self._call, self._at, self._num = getattr(engine._runner, place), frozenset(at), 0
        self.num_failed = 0
        setattr(engine._runner, place, self._called)

    def _called(self, *arguments: Any) -> Any:
        self._num += 1
        if self._num in self._at:
            self.num_failed += 1
            raise StepFailedError("the device failed")
        return self._call(*arguments)


@pytest.mark.parametrize("place", ["launch", "choose", "fetch"])
def test_rows_that_are_run_again_after_failed_steps_equal_rows_alone(alone, tmp_path, place):
    """Suspended rows go on by themselves, and the caller runs those again that were lost."""
    with opened(24, tmp_path / "turns.sqlite") as llm:
        runner = FailingSteps(llm.engine, place, at=(7, 40, 41, 90))
        for turn in range(2):
            left = list(range(len(NAMES)))
            while left:
                running = llm.submit(
                    [prompts(turn)[number] for number in left],
                    [params_of()[number] for number in left],
                    conversation_ids=[NAMES[number] for number in left],
                )
                while llm.engine.has_unfinished:
                    llm.step()
                for number, one in zip(tuple(left), running, strict=True):
                    if not isinstance(one.error, StepFailedError):
                        assert one.result().token_ids == alone[turn][number]
                        left.remove(number)
        assert runner.num_failed == 4


@pytest.mark.parametrize(("num_tokens", "is_slow"), [(50, False), (50, True), (64, True), (65, True)])
def test_choices_of_one_prompt_equal_rows_alone(tmp_path, num_tokens, is_slow, monkeypatch):
    """Each choice has a copy of the grammar and a seed of its own; they share the pages of the prompt."""
    params = [
        SamplingParams(
            structured=form, temperature=1.0, seed=5 + i, max_tokens=40, frequency_penalty=0.5 * (i % 2)
        )
        for i, form in enumerate(FORMS[:3] + FORMS[:1] * 3)
    ]
    prompt = list(range(40, 40 + num_tokens))

    def specs() -> list[TurnSpec]:
        first = new_turn_id()
        nodes = [TurnNode(turn_id=first), *(TurnNode(turn_id=new_turn_id(first)) for _ in params[1:])]
        return [TurnSpec(prompt, one, node=node) for one, node in zip(params, nodes, strict=True)]

    def replies(engine: Engine, turns: Sequence[TurnSpec]) -> list[tuple[int, ...]]:
        running = engine.submit(turns)
        while engine.has_unfinished:
            engine.step()
        return [turn.result().token_ids for turn in running]

    with opened(24, tmp_path / "turns.sqlite") as llm:
        expected = [replies(llm.engine, [one])[0] for one in specs()]
        num_waiting = slow_masks(llm.engine, monkeypatch) if is_slow else [1]
        together = replies(llm.engine, specs())
        assert together == expected
    assert sum(num_waiting) > 0
    assert len(set(together)) == len(params)


class TinyEngines:
    """Engines of the tiny model, each in a thread of this process, one after another on one history.

    Attributes:
        prepare: called with each engine before it serves.
        handles: of all engines so far.
    """

    def __init__(self, path: Path) -> None:
        self.prepare: Callable[[Engine], None] = lambda engine: None
        self.handles: list[ThreadHandle] = []
        self._path = path

    async def begin(self) -> EngineHandle:
        self.handles.append(ThreadHandle(self._make))
        return self.handles[-1]

    def _make(self) -> Parts:
        found = assemble(
            MODEL,
            dtype="float32",
            history=self._path,
            synchronous="normal",
            config=config_of(60),
            progress=False,
        )
        self.tokenizer = found.tokenizer
        self.prepare(found.engine)
        info = EngineInfo(
            model_name=found.model_name,
            source=found.source,
            fingerprint=found.fingerprint,
            history=str(self._path),
            limits=found.engine.limits,
            max_num_running=8,
            chunk_tokens=16,
            description={},
        )
        return found.engine, found.tokenizer, info


class TinyServer(LiveServer):
    """Every route over `TinyEngines`, whose engine is started again when it dies."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.engines = TinyEngines(path)

    async def _services(self, stack: contextlib.AsyncExitStack) -> Services:
        restarts = RestartPolicy(first_delay_s=0.0)
        engine = await stack.enter_async_context(AsyncEngine(self.engines.begin, restarts=restarts))
        tokenizer = self.engines.tokenizer
        assert tokenizer is not None
        fingerprint = engine.info.fingerprint
        reader = stack.enter_context(HistoryReader(self._path, fingerprint=fingerprint))
        resolver = Resolver(tokenizer, fingerprint, TurnIndex(HistoryTurns(reader, ReplyReader(tokenizer))))
        parts: dict[str, Any] = {"tokenizer": tokenizer, "resolver": resolver, "history": reader}
        self.harness = Harness([], cast(Any, engine), **parts)
        self.harness.services.now_s = time.time
        return self.harness.services


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    with TinyServer(tmp_path_factory.mktemp("served") / "turns.sqlite") as running:
        yield running


def test_n_choices_over_http_equal_single_ones(server):
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Say it.", "max_tokens": 40}
    form = {"structured_outputs": {"regex": FORMS[0].text}}  # type: ignore[union-attr]
    with server.client() as client:
        together = client.completions.create(**asked, n=3, seed=5, extra_body=form)
        alone = [client.completions.create(**asked, seed=5 + i, extra_body=form) for i in range(3)]
    assert [choice.text for choice in together.choices] == [one.choices[0].text for one in alone]
    assert len({choice.text for choice in together.choices}) == 3


class Held:
    """Step of an engine that waits, after all steps before it have run."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.has_begun, self.may_go = threading.Event(), threading.Event()
        self._launch, self._left = engine._runner.launch, number
        engine._runner.launch = self._held  # type: ignore[method-assign]

    def _held(self, plan: Any) -> Any:
        if not self._left:
            self.has_begun.set()
            assert self.may_go.wait(TIMEOUT_S)
        self._left -= 1
        return self._launch(plan)


def test_a_background_response_that_is_run_again_equals_one_that_was_not(server):
    form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    asked: dict[str, Any] = {
        "input": "Say it.",
        "max_output_tokens": 60,
        "text": form,
        "extra_body": {"seed": 3},
    }
    held: list[Held] = []
    engines = server.engines
    with server.client() as client:
        undisturbed = client.responses.create(**asked).output_text
        engines.prepare = lambda engine: held.append(Held(engine, 12)) if not held else None
        server.on_loop(engines.handles[-1].kill)
        server.wait_for(restarted(server, 2))
        queued = client.responses.create(**asked, background=True)
        assert held[0].has_begun.wait(TIMEOUT_S)
        server.on_loop(engines.handles[-1].kill)
        held[0].may_go.set()
        *_, last = client.responses.retrieve(queued.id, stream=True)
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == undisturbed
    assert len(engines.handles) == 3
    if last.type == "response.completed":
        jsonschema.validate(json.loads(undisturbed), SCHEMA)


async def restarted(server: TinyServer, epoch: int) -> None:
    engine = cast(AsyncEngine, server.harness.engine)
    await until(lambda: engine.epoch == epoch and engine.state == "ready")
