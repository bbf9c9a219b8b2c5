"""Replies with forms through `LLM`, on a tiny model: alone, in company, under pressure, restarted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
from pensieve_jax.core.outputs import Output

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


def opened(pages: int, history: Path, num_devices: int = 1) -> LLM:
    config = EngineConfig(
        cache=CacheConfig(gpu_pages=pages, cpu_pages=16, chunk_tokens=16),
        scheduler=SchedulerConfig(
            max_num_running=8, max_num_batched_tokens=64, token_buckets=(64,), max_context_tokens=256
        ),
        runner=RunnerConfig(tensor_parallel_size=num_devices),
    )
    return LLM("random:llama-tiny", dtype="float32", config=config, history=str(history), progress=False)


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


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.long)])
def test_rows_in_company_under_pressure_equal_rows_alone(alone, tmp_path, num_devices):
    """24 pages hold a third of the rows, so rows are suspended, and chunks are swapped and dropped."""
    with opened(24, tmp_path / "turns.sqlite", num_devices) as llm:
        for turn in range(2):
            outputs = llm.generate(prompts(turn), params_of(), conversation_ids=NAMES)
            assert ids_of(outputs) == alone[turn]
            check_forms(outputs)
            assert sum(output.usage.num_suspensions for output in outputs) > 0
        assert sum(o.usage.swapped_in_tokens + o.usage.recomputed_tokens for o in outputs) > 0


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
