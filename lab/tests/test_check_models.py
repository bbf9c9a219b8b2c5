"""One model of each family that random scenarios leave out: its logits, and greedy turns on tiny pools."""

from __future__ import annotations

import json

import numpy as np
import pytest

from model_defs import head_norms
from pensieve_jax import ConfigError
from tests.launching import load

check_models = load("check_models")
VARIANTS = {
    "qwen2_tied": "qwen2",
    "qwen3_bias": "qwen3",
    "mistral_gqa": "mistral",
    "mistral_short_window": "mistral",
    "phi3_long": "phi3",
    "gpt2_tied": "gpt2",
    "granite_tied": "granite",
    "ministral3_growth": "ministral3",
    "seed_oss_gqa": "seed_oss",
    "olmo2_gqa": "olmo2",
    "glm4_bias": "glm4",
    "smollm3_nope": "smollm3",
    "olmo3_window": "olmo3",
    "cohere2_window": "cohere2",
    "gemma3_window": "gemma3",
    "gemma2_window": "gemma2",
    "qwen3_moe_gqa": "qwen3_moe",
    "mixtral_gqa": "mixtral",
}


@pytest.mark.long
def test_turns_that_lose_state_equal_the_dense_reference(launch, capsys):
    status = launch("check_models", shared_llm=False, variants=",".join(VARIANTS))
    lines = capsys.readouterr().out.splitlines()
    assert status == 0, "\n".join(lines)
    results = json.loads(lines[-1])["results"]["variants"]
    assert {result["variant"]: result["family"] for result in results} == VARIANTS
    num_tokens = check_models.NUM_CONVERSATIONS * check_models.NUM_TURNS * check_models.OUTPUT_TOKENS
    for result in results:
        assert result["num_tokens"] == result["num_equal_tokens"] == num_tokens
        assert min(result["swapped_in_tokens"], result["recomputed_tokens"]) > 32
        assert lines[2:-1] and any(result["variant"] in line for line in lines[2:-1])


@pytest.mark.long
def test_a_model_that_is_wrong_is_found(launch, capsys, monkeypatch):
    """Norms of queries and keys do nothing: engine and reference agree, but transformers differs."""
    monkeypatch.setattr(head_norms.HeadNorm, "__call__", lambda self, x: x)
    assert launch("check_models", shared_llm=False, variants="qwen3_gqa") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "missed: qwen3_gqa: logits differ by more than 0.0001"
    (result,) = json.loads(lines[-1])["results"]["variants"]
    assert result["max_logit_difference"] > 0.1 and result["num_wrong_tokens"] == 0


def test_wrong_tokens_and_kept_state_are_missed_targets():
    served = check_models.TokenCounts(72, 70, 1, 75, 0, 46)
    result = {"variant": "v", "max_logit_difference": np.nan, **served._asdict()}
    assert check_models.missed_targets([result]) == [
        "v: logits differ by more than 0.0001",
        "v: 1 tokens are not the dense reference's",
        "v: no KV was swapped in, or none was recomputed",
    ]


def test_a_variant_that_is_not_there(launch):
    with pytest.raises(ConfigError, match="--variants"):
        launch("check_models", shared_llm=False, variants="qwen9")
