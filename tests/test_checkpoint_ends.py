"""Which ids end a reply of a model directory: those of both configs, and the tokenizer's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from model_defs import UnsupportedModelError, load_model, make_mesh, source_config
from pensieve_jax import (
    LLM,
    CacheConfig,
    ConfigError,
    EngineConfig,
    InvalidRequestError,
    SamplingParams,
    SchedulerConfig,
)
from pensieve_jax.device.dense_reference import DenseReference
from pensieve_jax.model_source import source_tokenizer, with_tokenizer_end
from pensieve_jax.rebatching import PaddedLLM, RebatchingConfig
from tests.models.helpers import GOLDEN

VOCAB_SIZE = 64
PROMPT = [9, 8, 7]


def write_tokenizer(directory: Path, *added: str, **config: Any) -> None:
    """Write a tokenizer whose word `w<i>` has id i, with `added` tokens behind."""
    backend = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    backend.add_special_tokens(list(added))
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a tiny model whose configs name id 3 as its end."""
    return Path(shutil.copytree(GOLDEN / "llama_default", tmp_path / "model"))


def greedy_reply(directory: Path, num_tokens: int) -> list[int]:
    """Return the most likely tokens, whether or not they end a reply."""
    reference = DenseReference(load_model(directory, dtype="float32", mesh=make_mesh(1)))
    ids = list(PROMPT)
    for _ in range(num_tokens):
        ids.append(int(reference.logits(ids)[-1].argmax()))
    return ids[len(PROMPT) :]


def test_the_tokenizers_own_end_ends_a_reply_in_both_engines(directory: Path) -> None:
    reply = greedy_reply(directory, 8)
    end = next(i for i, token_id in enumerate(reply) if token_id not in reply[:i] and i >= 2)
    assert 3 not in reply[: end + 1], "the configs' own end would end the reply first"
    write_tokenizer(directory, "<pad>", eos_token=f"w{reply[end]}")
    params = SamplingParams(max_tokens=8)
    config = EngineConfig(
        cache=CacheConfig(gpu_pages=4, chunk_tokens=16),
        scheduler=SchedulerConfig(max_num_running=2, max_num_batched_tokens=32, token_buckets=(32,)),
    )
    with LLM(directory, config=config, progress=False) as llm:
        output = llm.generate([PROMPT], params)[0]
        later = llm.generate([PROMPT], SamplingParams(max_tokens=8, min_tokens=8))[0]
        with pytest.raises(
            InvalidRequestError, match=r"prompt\[0\] is 64, but must be an integer from 0 to 63"
        ):
            llm.generate(["<pad>"], params)
        limits = llm.engine.limits
        assert llm.model_config.eos_token_ids == limits.eos_token_ids == (3, reply[end])
    assert (output.finish_reason, list(output.token_ids)) == ("stop", reply[: end + 1])
    padded = RebatchingConfig(max_batch=1, kv_bytes=10**5, lengths=(32,), prefill_batch=1, host_bytes=10**5)
    with PaddedLLM(directory, config=padded, progress=False) as llm:
        output = llm.generate([PROMPT], params)[0]
        with pytest.raises(InvalidRequestError, match=r"\[0\] is 64"):
            llm.generate(["<pad>"], params)
    assert (output.finish_reason, list(output.token_ids)) == ("stop", reply[: end + 1])
    reference = DenseReference(
        load_model(directory, dtype="float32", mesh=make_mesh(1)), eos_token_ids=limits.eos_token_ids
    )
    assert reply[end] not in later.token_ids and len(later.token_ids) == 8
    replay = reference.replay_turn([], PROMPT, later.token_ids, SamplingParams(max_tokens=8, min_tokens=8))
    np.testing.assert_array_equal(replay.token_ids, later.token_ids)


def test_the_union_has_each_end_once(directory: Path) -> None:
    write_tokenizer(directory, eos_token="w3")
    config = source_config(directory)
    tokenizer = source_tokenizer(str(directory), VOCAB_SIZE)
    assert with_tokenizer_end(config, tokenizer).eos_token_ids == config.eos_token_ids == (3,)
    assert with_tokenizer_end(config, None) == config
    write_tokenizer(directory)
    assert with_tokenizer_end(config, source_tokenizer(str(directory), VOCAB_SIZE)) == config


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [-1, VOCAB_SIZE, [3, -1], [3, VOCAB_SIZE], True, "3", 3.0, [[3]]])
def test_an_end_that_no_reply_can_contain_is_refused(directory: Path, file: str, value: Any) -> None:
    """Such a reply would run to its limit, with nothing said."""
    values = json.loads((directory / "config.json").read_text()) if file == "config.json" else {}
    (directory / file).write_text(json.dumps(values | {"eos_token_id": value}))
    with pytest.raises(UnsupportedModelError, match=rf"{file}: eos_token_id=.* from 0 to 63, the vocabulary"):
        source_config(directory)


def test_added_tokens_may_have_ids_without_rows(directory: Path) -> None:
    """Fine-tuning adds a token for padding, which no prompt contains, and leaves the embedding as it is."""
    write_tokenizer(directory, "<pad>", "<more>", pad_token="<pad>", eos_token="w3")
    tokenizer = source_tokenizer(str(directory), VOCAB_SIZE)
    assert tokenizer is not None and tokenizer.vocab_size == VOCAB_SIZE + 2
    assert tokenizer.encode("<pad>", add_bos=True) == [VOCAB_SIZE]
    with pytest.raises(ConfigError, match="tokenizer vocabulary is 64, but must be at most the model's 63"):
        source_tokenizer(str(directory), VOCAB_SIZE - 1)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"eos_token": "<end>"}, "eos_token"),
        ({"bos_token": "<end>", "add_bos_token": True}, "bos_token"),
        ({"bos_token": "<end>", "add_bos_token": False}, None),
    ],
)
def test_ends_without_rows_are_refused(directory: Path, config: dict[str, Any], name: str | None) -> None:
    """Every prompt would begin with such a bos; no reply can end with such an eos."""
    write_tokenizer(directory, "<end>", **config)
    if name is None:
        assert source_tokenizer(str(directory), VOCAB_SIZE) is not None
        return
    with pytest.raises(ConfigError, match=rf"the tokenizer's {name} is .*<end> \(id 64\).* an id below 64"):
        source_tokenizer(str(directory), VOCAB_SIZE)
