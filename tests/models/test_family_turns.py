"""Greedy turns of golden models over pools that are too small.

In float32 a dense pass on one device judges every token. With a KV cache in int8, an engine that evicts gives
the tokens of one that does not.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from model_defs import load_model, make_mesh
from pensieve_jax import LLM, CacheConfig, EngineConfig, RunnerConfig, SamplingParams, SchedulerConfig
from pensieve_jax.device.dense_reference import DenseReference
from tests.models.helpers import GOLDEN, VARIANTS

NUM_CONVERSATIONS, NUM_TURNS = 4, 3
PROMPT_TOKENS, OUTPUT_TOKENS = 10, 6  # three turns fill the 48 positions of a model
PARAMS = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
TINY_POOLS = {"gpu_pages": 6, "cpu_pages": 3}  # two conversations, and one
LARGE_POOLS = {"gpu_pages": 16, "cpu_pages": 0}
IN_SHORT = {  # one of each family that no other test of the engine serves
    "olmo2_gqa",
    "qwen3_moe_raw",
    "phi3_long",
    "gpt2_tied",
    "granite_tied",
    "ministral3_growth",
    "glm4_bias",
    "smollm3_nope",
    "olmo3_window",
    "cohere2_window",
    "gemma3_ropes",
    "gemma2_window",
}


def each(in_short: set[str]) -> list[object]:
    return [pytest.param(v, marks=() if v in in_short else pytest.mark.long) for v in VARIANTS]


def serve(
    variant: str, pools: dict[str, int], *, num_devices: int = 1, kv_dtype: str | None = None
) -> tuple[list[tuple[list[int], list[int], list[int]]], Counter[str]]:
    """Return the history, prompt and reply of every turn, and where the tokens of histories were."""
    config = EngineConfig(
        # No page is reserved, so a third conversation joins and KV has to be evicted.
        cache=CacheConfig(**pools, chunk_tokens=16, reserve_fraction=0.0, kv_dtype=kv_dtype),
        scheduler=SchedulerConfig(max_num_running=4, max_num_batched_tokens=32, token_buckets=(32,)),
        runner=RunnerConfig(num_layer_groups=2, tensor_parallel_size=num_devices),
    )
    random = np.random.default_rng(0)
    histories: dict[str, list[int]] = {f"c{number}": [] for number in range(NUM_CONVERSATIONS)}
    turns, sources = [], Counter[str]()
    with LLM(str(GOLDEN / variant), dtype="float32", config=config, progress=False) as llm:
        for _ in range(NUM_TURNS):
            prompts = random.integers(4, 64, (NUM_CONVERSATIONS, PROMPT_TOKENS)).tolist()
            outputs = llm.generate(prompts, PARAMS, conversation_ids=list(histories))
            for name, prompt, output in zip(histories, prompts, outputs, strict=True):
                turns.append((list(histories[name]), prompt, list(output.token_ids)))
                histories[name] += [*prompt, *output.token_ids]
                sources["swapped in"] += output.usage.swapped_in_tokens
                sources["recomputed"] += output.usage.recomputed_tokens
    return turns, sources


@pytest.mark.parametrize("variant", each(IN_SHORT))
def test_two_devices_that_evict_equal_a_dense_pass_on_one(variant: str) -> None:
    """Layers run in two groups, so each group has one layer."""
    turns, sources = serve(variant, TINY_POOLS, num_devices=2)
    assert min(sources["swapped in"], sources["recomputed"]) > 0, sources
    reference = DenseReference(
        load_model(GOLDEN / variant, dtype="float32", mesh=make_mesh(1)), min_padded_tokens=48
    )
    for history, prompt, reply in turns:
        replay = reference.replay_turn(history, prompt, reply, PARAMS)
        assert replay.possible.all(), (history, prompt, reply, list(replay.token_ids))
    assert len({token for _, _, reply in turns for token in reply}) > 1


@pytest.mark.parametrize("variant", each(set()))
def test_eviction_changes_no_token_of_an_int8_cache(variant: str) -> None:
    evicted, sources = serve(variant, TINY_POOLS, kv_dtype="int8")
    assert min(sources["swapped in"], sources["recomputed"]) > 0, sources
    unevicted, sources = serve(variant, LARGE_POOLS, kv_dtype="int8")
    assert not any(sources.values())
    assert evicted == unevicted
