"""On a GPU, with the compiled kernel: float32 tokens do not depend on where the KV cache was.

A second start, in a fresh process, compiles nothing.
"""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from model_defs import load_model, make_mesh
from pensieve_jax import (
    LLM,
    CacheConfig,
    EngineConfig,
    Output,
    RunnerConfig,
    SamplingParams,
    SchedulerConfig,
)
from pensieve_jax.device.dense_reference import DenseReference
from tests.runtime.start_process import Start, run_start

MODELS = ("random:llama-tiny", "random:opt-tiny", "random:opt-125m")
NUM_CONVERSATIONS, NUM_TURNS = 6, 4


def _turns(vocab_size: int) -> list[list[tuple[list[int], SamplingParams]]]:
    """Return [turn][conversation]: prompts of mixed lengths; half of the conversations are sampled."""
    rng = np.random.default_rng(11)
    lengths = itertools.cycle((3, 40, 97, 18, 64))
    return [
        [
            (
                rng.integers(10, vocab_size, next(lengths)).tolist(),
                SamplingParams(
                    max_tokens=24, temperature=float(i % 2), seed=100 * turn + i, ignore_eos=True, logprobs=0
                ),
            )
            for i in range(NUM_CONVERSATIONS)
        ]
        for turn in range(NUM_TURNS)
    ]


def _run(
    model: str, gpu_pages: int, cpu_pages: int = 0, *, stateful: bool
) -> tuple[list[list[tuple[int, ...]]], dict]:
    """Return token ids by turn and conversation in float32, and the engine's counters."""
    outputs, stats = _serve(model, "float32", "pallas_triton", gpu_pages, cpu_pages, stateful=stateful)
    return [[output.token_ids for output in turn] for turn in outputs], stats


def _serve(
    model: str, dtype: str, backend: str, gpu_pages: int, cpu_pages: int, *, stateful: bool
) -> tuple[list[list[Output]], dict]:
    config = EngineConfig(
        stateful=stateful,
        cache=CacheConfig(gpu_pages=gpu_pages, cpu_pages=cpu_pages),
        scheduler=SchedulerConfig(
            max_num_running=8, max_num_batched_tokens=128, max_context_tokens=1024, token_buckets=(16, 128)
        ),
        runner=RunnerConfig(attention_backend=backend, num_layer_groups=2, max_num_staged_pages=16),
    )
    with LLM(model, dtype=dtype, config=config, progress=False) as llm:
        num_compilations = llm.stats()["num_compilations"]
        outputs = []
        for turn in _turns(llm.model_config.vocab_size):
            prompts, params = zip(*turn, strict=True)
            ids = [f"c{i}" for i in range(NUM_CONVERSATIONS)]
            outputs.append(llm.generate(prompts, params, conversation_ids=ids))
        stats = llm.stats()
    assert stats["num_compilations"] == num_compilations, "a step compiled something after warm-up"
    return outputs, stats


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_stateful_equals_stateless_and_dense(model: str) -> None:
    stateful, stats = _run(model, 40, stateful=True)
    assert stats["recomputed_tokens"] > 0 and stats["reused_gpu_tokens"] > 0
    stateless, stats = _run(model, 200, stateful=False)
    assert stats["reused_gpu_tokens"] == 0
    assert stateful == stateless
    both_tiers, stats = _run(model, 40, 60, stateful=True)
    assert stats["swapped_in_tokens"] > 0 and stats["swapped_out_bytes"] > 0
    assert both_tiers == stateful

    loaded = load_model(model, dtype="float32", mesh=make_mesh(1))
    reference, turns = DenseReference(loaded), _turns(loaded.config.vocab_size)
    for i in range(NUM_CONVERSATIONS):
        history: list[int] = []
        for turn in range(NUM_TURNS):
            prompt, params = turns[turn][i]
            replay = reference.replay_turn(history, prompt, stateful[turn][i], params, seed=params.seed)
            assert tuple(replay.token_ids.tolist()) == stateful[turn][i]
            history += [*prompt, *stateful[turn][i]]


@pytest.mark.gpu
def test_bfloat16_on_the_fastest_back_end_stays_near_the_dense_model() -> None:
    """On a Hopper GPU this is Mosaic's kernel, beside Triton's; a wrong chunk changes logits by far more."""
    model = "random:opt-125m"
    outputs, stats = _serve(model, "bfloat16", "auto", 32, 8, stateful=True)
    assert stats["recomputed_tokens"] > 0 and stats["swapped_in_tokens"] > 0
    loaded = load_model(model, dtype="bfloat16", mesh=make_mesh(1))
    reference, turns = DenseReference(loaded), _turns(loaded.config.vocab_size)
    differences: list[float] = []
    for i in range(NUM_CONVERSATIONS):
        history: list[int] = []
        for turn in range(NUM_TURNS):
            prompt, params = turns[turn][i]
            output = outputs[turn][i]
            replay = reference.replay_turn(history, prompt, output.token_ids, params, seed=params.seed)
            assert output.logprobs is not None
            found = [entry.logprob for entry in output.logprobs]
            differences += np.abs(np.array(found) - replay.logprobs).tolist()
            history += [*prompt, *output.token_ids]
    assert np.percentile(differences, 99) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "dtype"), [("random:opt-125m", "bfloat16"), ("random:llama-tiny", "float32")]
)
def test_a_second_start_compiles_nothing(tmp_path: Path, model: str, dtype: str) -> None:
    """Uses this GPU's fastest back end (on a Hopper GPU Mosaic's for the first model), and Triton's."""
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process may hold most of the device's memory
    start = Start(str(tmp_path), model, dtype, buckets=(32, 128))
    first = run_start(start, **memory)
    assert first.events["compiled"] >= len(list((tmp_path / "executables").iterdir())) > 8
    second = run_start(dataclasses.replace(start, may_save=False), PYTHONHASHSEED="7", **memory)
    assert second.events == {} and second.warnings == []
    assert second.token_ids == first.token_ids
