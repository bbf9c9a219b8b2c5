"""Effect of an 8-bit KV cache on a model: each figure belongs to its format, and outliers change no logit."""

from __future__ import annotations

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from model_defs import load_model, make_mesh
from pensieve_jax import ConfigError, SamplingParams
from pensieve_jax.device.dense_reference import DenseReference
from pensieve_jax.text import byte_tokenizer
from pensieve_lab.kv_quality.channels import balancing, magnitudes, planted, with_factors
from pensieve_lab.kv_quality.formats import EXACT, FORMATS, STORES, UNSCALED
from pensieve_lab.kv_quality.outliers import MAX_LOGIT_DIFFERENCE
from pensieve_lab.kv_quality.quality import Passes, Sums, compare, figures, logit_difference, report
from pensieve_lab.kv_quality.replies import compared, greedy_replies
from pensieve_lab.kv_quality.texts import Text, read_texts
from tests.launching import load

measure_kv_quality = load("measure_kv_quality")

SCALE = 64.0
LINE = '{{"turns": [["U", "Hi {0}."], ["A", "Hello."], ["U", "Is it {0}?"], ["A", "Yes."], ["U", "Bye"]]}}\n'


@pytest.fixture(scope="module")
def models():
    cache = {}

    def model(name):
        if name not in cache:
            cache[name] = load_model(f"random:{name}-tiny", dtype="float32", mesh=make_mesh(1))
        return cache[name]

    return model


@pytest.fixture(scope="module")
def texts():
    random = np.random.default_rng(0)
    return [Text(random.integers(0, 256, length).astype(np.int32), length // 2) for length in (100, 60, 90)]


def divergences(model, texts, formats=FORMATS):
    found = compare(Passes(model), texts, formats, lambda: None)
    return {name: figures(sums)["divergence"] for name, sums in found.items()}


def test_formats_are_not_mixed_up(models, texts):
    """Each error is several times the one before; planted outliers distinguish e4m3's two formats."""
    found = divergences(models("llama"), texts)
    assert 0 < 5 * found["bfloat16"] < found["int8"] < found["float8_e4m3fn"] / 5
    assert found["float8_e4m3fn"] != found[UNSCALED]


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_a_format_is_what_the_engine_is_checked_against(models, texts, kv_dtype):
    ids = texts[0].token_ids
    expected = DenseReference(models("llama"), kv_dtype=kv_dtype).logits(ids)
    passes = Passes(models("llama"))
    others = {name: np.abs(passes.logits(ids, name)[: len(ids)] - expected).max() for name in STORES}
    assert others.pop(kv_dtype) < 1e-4 < 1e-3 < min(others.values())


def test_e4m3_without_scales_saturates_and_others_do_not():
    row = jnp.array([1e4, -1e4, 500.0, 3.0])
    assert STORES[UNSCALED](row).tolist() == [448, -448, 448, 3]
    for name in set(STORES) - {UNSCALED}:
        assert STORES[name](row)[0] == pytest.approx(1e4, rel=0.05)


FAMILIES, PARTS = ["llama", "qwen3", "qwen2", "opt"], ["values", "keys"]


@pytest.mark.parametrize(
    ("part", "family"),
    [
        pytest.param(part, family, marks=pytest.mark.long if (i + j) % 2 else ())
        for i, family in enumerate(FAMILIES)
        for j, part in enumerate(PARTS)
    ],
)
def test_planted_outliers_change_keys_or_values_and_no_logit(models, texts, family, part):
    model = models(family)
    factors = planted(model, part, SCALE, seed=1)
    assert (factors.keys == factors.keys[:, :1]).all() or family != "qwen3"  # its norms have one scale
    changed = with_factors(model, factors)
    assert logit_difference(Passes(model), Passes(changed), texts[:1]) <= MAX_LOGIT_DIFFERENCE
    before, after = (magnitudes(one, [texts[0].token_ids]) for one in (model, changed))
    ratios = {
        name: getattr(after, name) / np.maximum(getattr(before, name), 1e-30) for name in before._fields
    }
    for name, ratio in ratios.items():
        num_expected = (2 if name == "keys" else 1) if name == part else 0
        assert ((ratio > SCALE / 2).sum(axis=-1) == num_expected).all()


def test_half_a_rotary_pair_is_another_function(models, texts):
    """This shows that the check of the logits can fail."""
    model = models("llama")
    factors = planted(model, "keys", SCALE, seed=1)
    factors.keys[..., model.config.head_dim // 2 :] = 1
    changed = with_factors(model, factors)
    assert logit_difference(Passes(model), Passes(changed), texts[:1]) > 10 * MAX_LOGIT_DIFFERENCE


@pytest.mark.parametrize("part", ["keys", "values"])
def test_an_outlier_takes_the_bits_of_the_others_and_balancing_gives_them_back(models, texts, part):
    model = models("llama")
    changed = with_factors(model, planted(model, part, SCALE, seed=0))
    even = with_factors(changed, balancing(changed, magnitudes(changed, [texts[0].token_ids])))
    plain, broken, mended = (divergences(one, texts[1:], ("int8",))["int8"] for one in (model, changed, even))
    assert broken > 20 * plain and mended < 3 * plain
    floats = [divergences(one, texts[1:], ("float8_e4m3fn",))["float8_e4m3fn"] for one in (model, changed)]
    assert floats[1] < 3 * floats[0]  # their steps shrink with the number


def test_large_outliers_are_cut_off_without_scales(models, texts):
    model = models("llama")
    changed = with_factors(model, planted(model, "values", 2.0**14, seed=0))
    found = divergences(changed, texts[:1], ("float8_e4m3fn", UNSCALED))
    assert found[UNSCALED] > 3 * found["float8_e4m3fn"]


def test_figures_of_sums():
    sums = Sums(*np.array([[2, 3.0, 2.0, 0.4, 1, 0.5, 0.7], [2, 1.0, 2.0, 0.2, 2, 0.5, 0.6]]).T)
    assert figures(sums) == pytest.approx(
        {
            "perplexity": math.e,
            "more_nats": 0,
            "divergence": 0.15,
            "top_equal_percent": 75,
            "rms_difference": 0.5,
            "max_difference": 0.7,
        }
    )
    low, high = report(sums, seed=0)["interval"]["more_nats"]
    assert low == pytest.approx(-0.5) and high == pytest.approx(0.5)


@pytest.mark.long
def test_replies_are_what_a_dense_model_would_say(models, texts):
    model = models("llama")
    prompts = [text.token_ids[: text.reply_start] for text in texts]
    replies = greedy_replies(model, prompts, EXACT, 12)
    reference = DenseReference(model)
    for prompt, reply in zip(prompts, replies, strict=True):
        params = SamplingParams(max_tokens=12)
        assert reference.replay_turn([], prompt, reply, params).token_ids.tolist() == reply
        assert len(reply) == 12 or reply[-1] in model.config.eos_token_ids
    assert greedy_replies(model, prompts, "int8", 12) != greedy_replies(model, prompts, UNSCALED, 12)


def test_replies_are_compared_to_their_end():
    found = compared([[1, 2, 3, 4], [5, 6]], [[1, 2, 3, 4], [5, 6, 7, 8]])
    assert found == {"num_identical": 1, "identical_percent": 50, "until_first_difference_percent": 75}


def test_a_reply_begins_behind_the_last_message_that_has_one(tmp_path):
    path = tmp_path / "said.jsonl"
    path.write_text(LINE.format("a") + LINE.format("b"), encoding="utf-8")
    tokenizer = byte_tokenizer()
    (text,) = read_texts(str(path), tokenizer, 1, 512)
    assert tokenizer.decode(text.token_ids[text.reply_start :].tolist()).startswith("Yes.")
    assert "Hi a." in tokenizer.decode(text.token_ids.tolist())
    (short,) = read_texts(str(path), tokenizer, 1, text.reply_start - 2)
    assert tokenizer.decode(short.token_ids[short.reply_start :].tolist()).startswith("Hello.")


def test_a_plain_text_is_cut_into_pieces(tmp_path):
    path = tmp_path / "said.txt"
    path.write_text("0123456789" * 5, encoding="utf-8")
    pieces = read_texts(str(path), byte_tokenizer(), 9, 20)
    assert [len(piece.token_ids) for piece in pieces] == [20, 20, 11]
    with pytest.raises(ConfigError, match="--text"):
        read_texts(str(tmp_path / "missing.txt"), byte_tokenizer(), 9, 20)


def plain(tmp_path, num_characters):
    path = tmp_path / "plain.txt"
    path.write_text("".join(chr(97 + i * i % 26) for i in range(num_characters)), encoding="utf-8")
    return path


@pytest.mark.long
def test_the_document_has_every_format(launch, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "pensieve_lab.kv_quality.replies._AT_ONCE", 8
    )  # five texts; the other rows are padding
    flags = {"text": plain(tmp_path, 900), "context_tokens": 100, "num_seeds": 1, "reply_tokens": 5}
    picture = tmp_path / "kv.png"
    status = launch(
        "measure_kv_quality", shared_llm=False, outlier_scales=64, num_outlier_texts=1, plot=picture, **flags
    )
    *lines, last = capsys.readouterr().out.splitlines()
    results = json.loads(last)["results"]
    assert status == 0 and picture.stat().st_size
    assert set(results["formats"]) == {EXACT, *FORMATS} and set(results["replies"]) == set(FORMATS)
    assert results["num_texts"] == 5 and results["num_tokens"] == 5 * 99
    assert len(results["outliers"]) == 3 and results["max_logit_difference"] <= MAX_LOGIT_DIFFERENCE
    means = {(row["part"], row["scale"]): row["int8"][0] for row in results["mean_outliers"]}
    assert min(means["keys", 64], means["values", 64]) > 20 * means["keys", 1] > 0
    assert any(line.startswith("float8_e4m3fn_unscaled") for line in lines)


@pytest.mark.long
def test_without_a_text_the_model_is_talked_to(launch, capsys):
    flags = {
        "num_texts": 2,
        "context_tokens": 100,
        "num_replies": 1,
        "reply_tokens": 4,
        "num_outlier_texts": 1,
        "outlier_scales": "",
    }
    assert launch("measure_kv_quality", shared_llm=False, **flags) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert results["num_texts"] == 2 and results["replies"]["int8"]["num"] == 1
    assert [row["part"] for row in results["outliers"]] == [None]


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--text", {"context_tokens": 100}),  # calibration leaves nothing to measure
        ("--context_tokens", {"context_tokens": 4096}),
        ("--outlier_scales", {"outlier_scales": "4,-1"}),
        ("--plot", {"plot": "/no/such/directory/kv.png"}),
    ],
)
def test_what_cannot_be_measured(launch, tmp_path, flag, values):
    with pytest.raises(ConfigError, match=flag):
        launch("measure_kv_quality", shared_llm=False, text=plain(tmp_path, 300), **values)


def test_a_changed_function_is_a_failure(launch, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("pensieve_lab.kv_quality.outliers.logit_difference", lambda *_: 0.1)
    flags = {"text": plain(tmp_path, 500), "context_tokens": 100, "num_seeds": 1, "num_replies": 0}
    assert launch("measure_kv_quality", shared_llm=False, outlier_scales=4, **flags) == 1
    assert "missed: planted outliers change float32 logits" in capsys.readouterr().out
