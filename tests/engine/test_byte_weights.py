"""Engines whose layers keep their weights in 8 bits: answers do not depend on where the KV cache was."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from model_defs import load_model, make_mesh
from pensieve_jax import (
    LLM,
    CacheConfig,
    EngineConfig,
    HistoryError,
    RunnerConfig,
    SamplingParams,
    SchedulerConfig,
    assembly,
)
from pensieve_jax.device.dense_reference import MIN_MARGIN, DenseReference
from pensieve_jax.history import open_store
from tests.engine.real_models import STORED_MARGIN
from tests.launching import ROOT, TINY_MODEL, tiny_config

GREEDY = SamplingParams(max_tokens=9, ignore_eos=True)


def config(
    weights_dtype: str, kv_dtype: str | None, num_devices: int, compilation_cache: str
) -> EngineConfig:
    """Return pools that hold two of four conversations, in two groups of layers."""
    return EngineConfig(
        cache=CacheConfig(gpu_pages=9, cpu_pages=4, chunk_tokens=16, kv_dtype=kv_dtype),
        scheduler=SchedulerConfig(
            max_num_running=2,
            max_num_batched_tokens=32,
            token_buckets=(32,),
            max_context_tokens=112,
            max_num_rows=4,
        ),
        runner=RunnerConfig(
            weights_dtype=weights_dtype,
            tensor_parallel_size=num_devices,
            compilation_cache_dir=compilation_cache,
        ),
    )


@pytest.mark.parametrize(
    ("weights_dtype", "kv_dtype", "num_devices"),
    [
        ("int8", None, 1),
        ("int8", "int8", 1),
        pytest.param("fp8", None, 1, marks=pytest.mark.long),
        pytest.param("int8", None, 2, marks=pytest.mark.long),
    ],
)
def test_dropped_and_swapped_state_changes_nothing(
    weights_dtype: str, kv_dtype: str | None, num_devices: int, compilation_cache: str
) -> None:
    """Every turn of alternating conversations is what a dense pass over the whole of it says."""
    model = load_model(TINY_MODEL, dtype="float32", mesh=make_mesh(1), weights_dtype=weights_dtype)
    reference = DenseReference(model, min_padded_tokens=128, min_padded_outputs=16, kv_dtype=kv_dtype)
    margin = MIN_MARGIN if kv_dtype is None else STORED_MARGIN
    rng = np.random.default_rng(4)
    histories: list[list[int]] = [[] for _ in range(4)]
    made = config(weights_dtype, kv_dtype, num_devices, compilation_cache)
    recomputed = swapped = 0
    with LLM(TINY_MODEL, dtype="float32", config=made, progress=False) as llm:
        assert llm.describe()["model"]["weights_dtype"] == weights_dtype
        for _ in range(3):
            for number, history in enumerate(histories):
                prompt = rng.integers(3, 320, 20).tolist()
                (out,) = llm.generate([prompt], GREEDY, conversation_ids=[str(number)])
                replay = reference.replay_turn(history, prompt, out.token_ids, GREEDY, margin=margin)
                assert replay.possible.all()
                assert kv_dtype is not None or list(replay.token_ids) == list(out.token_ids)
                recomputed += out.usage.recomputed_tokens
                swapped += out.usage.swapped_in_tokens
                history += [*prompt, *out.token_ids]
    assert recomputed and swapped, "the pools were too large"


@pytest.mark.parametrize("planted", [False, True])
def test_a_history_of_other_weights_is_refused(
    planted: bool, llm: LLM, compilation_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a fingerprint without the format opens the history, and the model is loaded."""
    path = tmp_path / "chats.sqlite"
    open_store(path, fingerprint=llm._parts.fingerprint).close()
    made = tiny_config(compilation_cache).with_weights_dtype("int8")

    def loads(*_: object) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(assembly, "make_runner", loads)
    expected: tuple[type[Exception], str] = (HistoryError, "which was written by")
    if planted:
        of_model = assembly.model_fingerprint
        monkeypatch.setattr(
            assembly, "model_fingerprint", lambda *args, weights_dtype, **options: of_model(*args, **options)
        )
        expected = AssertionError, "the model is loaded"
    with pytest.raises(expected[0], match=expected[1]):
        LLM(TINY_MODEL, dtype="float32", config=made, history=path, progress=False)


def test_the_example_of_the_page_makes_a_configuration() -> None:
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "weights.md").read_text("utf-8"), re.DOTALL
    )
    names: dict[str, EngineConfig] = {}
    exec(compile(example, "weights.md", "exec"), names)
    made = names["smaller"]
    assert (made.runner.weights_dtype, made.cache.kv_dtype) == ("int8", "int8")
