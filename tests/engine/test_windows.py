"""Conversations of models with windows: evicted, recomputed and swapped, greedy, equal to a dense pass."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_defs import LayerKind, Model, RopeConfig, make_mesh, preset, random_model, save_parameters
from pensieve_jax import LLM, CacheConfig, EngineConfig, RunnerConfig, SamplingParams, SchedulerConfig
from pensieve_jax.device.dense_reference import MIN_MARGIN, DenseReference
from tests.engine.driver import run_scenario
from tests.engine.real_models import RealBench
from tests.engine.test_real_models import real_scenario
from tests.seeds import new_seed

OUTPUT_TOKENS = 4
CONTEXT_TOKENS = 160
GREEDY = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
# Where the turns of each conversation end, as a number of windows and of tokens beside them.
ENDS = (
    ((1, 0), (2, 0), (3, 0), (4, 0), (4, 9)),
    ((1, -1), (1, 6), (2, -1), (2, 9), (3, 1)),
    ((1, 1), (2, 1), (3, -1), (3, 5), (4, 0)),
    ((2, 0), (2, 5), (3, 0), (3, 6), (4, 1)),
)
ROPES = RopeConfig(), RopeConfig(theta=300.0)
SMALL = {"gpu_pages": 12, "cpu_pages": 5}
LARGE = {"gpu_pages": 64, "cpu_pages": 0}


def model_of(kinds: tuple[LayerKind, ...], seed: int, **fields: Any) -> Model:
    size = {"num_layers": len(kinds), "max_position_embeddings": 256}
    config = preset("qwen3-tiny", **size, layer_kinds=kinds, ropes=ROPES, eos_token_ids=(), **fields)
    return random_model(config, dtype="float32", mesh=make_mesh(1), seed=seed)


def windowed(window: int) -> Model:
    """Return a model whose layers have the window, no window, and the window without rotations."""
    return model_of((LayerKind(window=window), LayerKind(), LayerKind(window=window, rope=None)), window)


def num_near_ties(model: Model, turns: list[tuple[list[int], list[int], list[int]]]) -> int:
    """Check that every token is the choice of a dense pass; return the number of near ties."""
    reference, num = DenseReference(model, min_padded_tokens=256), 0
    for history, prompt, reply in turns:
        replay = reference.replay_turn(history, prompt, reply, GREEDY)
        is_close = replay.margins < MIN_MARGIN
        assert (is_close | (replay.token_ids == reply)).all() and replay.possible.all()
        num += int(is_close.sum())
    return num


def serve(
    source: Path, window: int, cache: dict[str, Any], num_devices: int = 1
) -> tuple[list[tuple[list[int], list[int], list[int]]], Counter[str]]:
    """Serve all turns; return (history, prompt, reply) of each, and where the histories were."""
    config = EngineConfig(
        cache=CacheConfig(chunk_tokens=16, reserve_fraction=0.0, **cache),
        scheduler=SchedulerConfig(
            max_num_running=4,
            max_num_batched_tokens=48,
            token_buckets=(48,),
            max_context_tokens=CONTEXT_TOKENS,
        ),
        runner=RunnerConfig(num_layer_groups=1, tensor_parallel_size=num_devices),
    )
    rng = np.random.default_rng(window)
    names = [f"c{number}" for number in range(len(ENDS))]
    histories: list[list[int]] = [[] for _ in names]
    turns, totals = [], Counter[str]()
    with LLM(str(source), dtype="float32", config=config, progress=False) as llm:
        for ends in zip(*ENDS, strict=True):
            prompts = []
            for (num_windows, beside), history in zip(ends, histories, strict=True):
                num_new = num_windows * window + beside - len(history) - OUTPUT_TOKENS
                prompts.append(rng.integers(3, 320, num_new).tolist())
            outputs = llm.generate(prompts, GREEDY, conversation_ids=names)
            for history, prompt, output in zip(histories, prompts, outputs, strict=True):
                turns.append((list(history), prompt, list(output.token_ids)))
                history += [*prompt, *output.token_ids]
                usage = output.usage
                totals += Counter(
                    swapped_in=usage.swapped_in_tokens,
                    recomputed=usage.recomputed_tokens,
                    reused=usage.reused_gpu_tokens,
                )
    return turns, totals


@pytest.mark.parametrize(
    ("window", "num_devices"),
    [
        (32, 1),
        pytest.param(31, 1, marks=pytest.mark.long),
        pytest.param(33, 1, marks=pytest.mark.long),
        pytest.param(32, 2, marks=pytest.mark.long),
    ],
)
def test_turns_that_end_at_the_edge_of_a_window(tmp_path: Path, window: int, num_devices: int) -> None:
    """Four conversations in pools for one of them; chunks are lost on both sides of a window's edge."""
    model = windowed(window)
    save_parameters(model, tmp_path / "model", weights_digest=f"windows of {window}")
    turns, totals = serve(tmp_path / "model", window, SMALL, num_devices)
    assert min(totals[name] for name in ("swapped_in", "recomputed", "reused")) > 100, totals
    assert not num_near_ties(model, turns), "choose another seed"


@pytest.mark.long
def test_random_kinds_of_layers(tmp_path: Path) -> None:
    """Any windows and rotations, with and without a softcap and sinks."""
    draw = random.Random(new_seed())
    for number in range(4):
        windows = draw.choice([(None, draw.randint(1, 70)), (draw.randint(1, 30), draw.randint(31, 70))])
        kinds = tuple(
            LayerKind(window=draw.choice(windows), rope=draw.choice((0, 1, None)))
            for _ in range(draw.randint(2, 4))
        )
        scores = draw.choice([{}, {"attention_softcap": 3.0, "has_sinks": True}])
        print(kinds, scores)
        model = model_of(kinds, number, **scores)
        save_parameters(model, tmp_path / str(number), weights_digest=str(number))
        turns, totals = serve(tmp_path / str(number), 32, SMALL)
        assert totals["recomputed"] > 100, totals
        assert num_near_ties(model, turns) <= 2


def test_a_preset_with_windows_is_served() -> None:
    config = EngineConfig(
        cache=CacheConfig(gpu_pages=8, cpu_pages=0, chunk_tokens=16),
        scheduler=SchedulerConfig(max_num_running=2, max_num_batched_tokens=32, token_buckets=(32,)),
        runner=RunnerConfig(num_layer_groups=1, max_position_embeddings=128),
    )
    with LLM("random:mistral-window-tiny", config=config, progress=False) as llm:
        assert llm.describe()["model"]["windows"] == [32]
        (output,) = llm.generate(["a conversation that is longer than the window of its layers"], GREEDY)
        assert len(output.token_ids) == OUTPUT_TOKENS


@pytest.mark.long
def test_an_8_bit_kv_cache_evicted_equals_unevicted(tmp_path: Path) -> None:
    save_parameters(windowed(32), tmp_path / "model", weights_digest="windows of 32")
    small, totals = serve(tmp_path / "model", 32, SMALL | {"kv_dtype": "int8"})
    large, others = serve(tmp_path / "model", 32, LARGE | {"kv_dtype": "int8"})
    assert small == large
    assert min(totals[name] for name in ("swapped_in", "recomputed")) > 100 and not others["recomputed"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3-window-tiny", "mistral-window-tiny"])
def test_random_scenarios_with_windows_equal_the_dense_reference(name: str) -> None:
    bench, totals = RealBench(name), Counter[str]()
    for seed in range(4):
        print(f"run_scenario(real_scenario({seed}), RealBench({name!r}))")
        totals += run_scenario(real_scenario(seed), bench).totals
    assert min(totals[each] for each in ("swapped_in_tokens", "recomputed_tokens")) > 60, totals
    assert len(bench.uncertain) <= 2, bench.uncertain
