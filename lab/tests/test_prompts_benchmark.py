"""The benchmark of prompt variants: lists cover the work, are laid out for the program, and are predicted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.tile_lists import KV_BEGIN, KV_END
from pallas_kernels.ragged_paged_attention.tile_specs import NUM_FIELDS
from pensieve_jax import ConfigError
from pensieve_lab.kernels import prompt_variants
from tests.launching import load

SCRIPT: Any = load("benchmark_prompts")


def rows_of(q_len: int, kv_len: int) -> tuple[np.ndarray, ...]:
    kv_lens, cu_q_lens = np.array([kv_len], np.int32), np.array([0, q_len], np.int32)
    return kv_lens, np.zeros((1, 689), np.int32), cu_q_lens, np.array([1], np.int32)


@pytest.mark.parametrize(
    ("q_len", "kv_len", "is_faster"), [(512, 8512, True), (1024, 21024, True), (2048, 2048, False)]
)
def test_predictions_follow_the_rule(q_len: int, kv_len: int, is_faster: bool) -> None:
    kernel, rows = prompt_variants.KERNELS["bf16"], rows_of(q_len, kv_len)
    spec = prompt_variants.spec_of(kernel, num_tokens=q_len, max_num_seqs=1)
    times = {}
    for name in prompt_variants.CUTS:
        tiles = prompt_variants.tiles_of(kernel, spec, name, rows)
        first = spec.tiles_offset(1)
        table = tiles[first : first + NUM_FIELDS * tiles[1]].reshape(-1, NUM_FIELDS)
        num_keys = (table[:, KV_END] - table[:, KV_BEGIN]).sum()
        assert num_keys == sum(range(kv_len - q_len + 32, kv_len + 1, 32))
        times[name] = prompt_variants.predicted_us(kernel, spec, tiles)
    assert times["rounds"] < 0.9 * times["uniform"] if is_faster else times["rounds"] == times["uniform"]


def test_every_kernel_has_a_spec() -> None:
    for kernel in prompt_variants.KERNELS.values():
        spec = prompt_variants.spec_of(kernel, num_tokens=512, max_num_seqs=1)
        assert replace(spec.blocks.classes[-1], fills_rounds=False) == kernel.classes[-1]


@pytest.mark.parametrize(("flag", "value"), [("kernels", "bf17"), ("cuts", "none"), ("cases", "p1")])
def test_unknown_names_are_refused(launch, flag, value):
    with pytest.raises(ConfigError, match=rf"--{flag}.*{value}"):
        launch("benchmark_prompts", shared_llm=False, **{flag: value})


@pytest.mark.long
def test_a_run_reports_all_variants(launch, monkeypatch, capsys):
    """Without a GPU, with XLA in place of the kernels."""

    def function_of(spec: Any) -> Any:
        def attend(q: jax.Array, pool: jax.Array, _tiles: jax.Array, *rows: jax.Array) -> jax.Array:
            return ragged_paged_attention(
                q, pool, *rows, sm_scale=128**-0.5, backend="xla", kv_dtype=spec.kv_dtype
            )

        return attend

    monkeypatch.setattr(SCRIPT, "function_of", function_of)
    monkeypatch.setattr(
        SCRIPT, "_BUCKETS", {(64, 1): {"few": ((64, 700),)}, (32, 4): {"d2": ((1, 300),) * 2}}
    )
    monkeypatch.setattr(SCRIPT, "_MAX_PAGES", 30)
    monkeypatch.setattr(SCRIPT, "_LARGEST", ((64, 960),))
    kernels = "bf16,int8,int8_scratch"
    assert not launch("benchmark_prompts", shared_llm=False, kernels=kernels, target_ms=0.01, repeats=1)
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = document["results"]["measurements"]
    assert all(one.get("is_right", True) for one in found)
    assert {(one["case"], one["kernel"]) for one in found} == {
        (case, kernel) for case in ("few", "d2") for kernel in ("bf16", "int8", "int8_scratch")
    }
    assert all("us" in one or "same_as" in one for one in found)
