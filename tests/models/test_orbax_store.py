"""Saving, restoring onto another mesh, converting, and the errors of a damaged save."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from model_defs import (
    CheckpointError,
    ModelConfig,
    UnsupportedModelError,
    load_config,
    load_model,
    make_mesh,
    model_fingerprint,
    num_parameters,
    preset,
    random_model,
    save_parameters,
)
from model_defs.orbax_store import check_target
from model_defs.parameters import named_parameters
from tests.launching import load
from tests.models.helpers import GOLDEN, dense_logits, golden

convert = load("scripts.convert_checkpoint").convert


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save llama-tiny with 4 KV heads from one device."""
    directory = tmp_path_factory.mktemp("orbax") / "model"
    model = random_model(preset("llama-tiny", num_kv_heads=4), mesh=make_mesh(1), seed=3)
    save_parameters(model, directory, weights_digest="d")
    return directory


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_restores_onto_any_mesh(saved: Path, tp: int) -> None:
    mesh = make_mesh(tp)
    expected = dict(named_parameters(random_model(load_config(saved), mesh=make_mesh(1), seed=3)))
    calls: list[tuple[int, int, str]] = []
    model = load_model(saved, mesh=mesh, progress=lambda *call: calls.append(call))
    for name, parameter in named_parameters(model):
        value = parameter.get_value()
        assert value.sharding.mesh.shape == {"tp": tp}
        np.testing.assert_array_equal(value, expected[name].get_value())
    kernel = dict(named_parameters(model))["layers.1.qkv.proj.kernel"].get_value()
    assert kernel.addressable_shards[0].data.shape == (64, 4 // tp, 3, 32)
    assert [call[0] for call in calls] == list(range(1, len(expected) + 1))


def test_restores_in_another_dtype(saved: Path) -> None:
    model = load_model(saved, dtype="bfloat16", mesh=make_mesh(1))
    assert {str(parameter.get_value().dtype) for _, parameter in named_parameters(model)} == {"bfloat16"}


def test_converted_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    source = GOLDEN / "opt_post_norm"
    shutil.copytree(source, tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    convert(str(tmp_path / "source"), tmp_path / "target", "float32")
    token_ids, expected = golden("opt_post_norm")
    config = load_config(tmp_path / "target")
    assert (config.dtype, config.eos_token_ids, config.pre_norm) == ("float32", (3,), False)
    model = load_model(tmp_path / "target", mesh=make_mesh(1))
    np.testing.assert_allclose(dense_logits(model, token_ids), expected, atol=1e-4, rtol=0)
    assert (tmp_path / "target" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    "variant",
    [
        "qwen2_tied",
        "qwen3_bias",
        "mistral_window",
        "olmo2_gqa",
        "phi3_long",
        "gpt2_tied",
        "qwen3_moe_raw",
        pytest.param("granite_tied", marks=pytest.mark.long),
        pytest.param("ministral3_growth", marks=pytest.mark.long),
        pytest.param("glm4_yarn", marks=pytest.mark.long),
        pytest.param("smollm3_window", marks=pytest.mark.long),
        pytest.param("olmo3_window", marks=pytest.mark.long),
        pytest.param("cohere2_bias", marks=pytest.mark.long),
        "gemma3_ropes",
        pytest.param("gemma2_window", marks=pytest.mark.long),
    ],
)
def test_families_survive_conversion(tmp_path: Path, variant: str) -> None:
    """A round trip keeps all of the config, onto one device and onto two."""
    convert(str(GOLDEN / variant), tmp_path / "target", "float32")
    config = load_config(tmp_path / "target")
    assert config == dataclasses.replace(load_config(GOLDEN / variant), dtype="float32")
    token_ids, expected = golden(variant)
    for tp in (1, 2):
        model = load_model(tmp_path / "target", mesh=make_mesh(tp))
        np.testing.assert_allclose(dense_logits(model, token_ids), expected, atol=1e-4, rtol=0)


def test_a_save_without_a_newer_field_loads(saved: Path, tmp_path: Path) -> None:
    """Missing fields have their defaults. Older saves have one `rope`, and a `sliding_window`."""
    older = damage(saved, tmp_path / "copy")
    values = json.loads((older / "model_config.json").read_text())
    for name in ("layer_kinds", "attention_scale", "attention_softcap", "has_sinks"):
        del values["config"][name]
    values["config"] |= {"rope": values["config"].pop("ropes")[0], "sliding_window": None}
    (older / "model_config.json").write_text(json.dumps(values))
    assert load_config(older) == load_config(saved)
    assert model_fingerprint(load_config(older), older) == model_fingerprint(load_config(saved), saved)
    load_model(older, mesh=make_mesh(1))


def test_an_older_save_with_a_window(saved: Path, tmp_path: Path) -> None:
    """It is that of all layers, unless the family gives it to some: then the save does not say which."""
    convert(str(GOLDEN / "mistral_window"), tmp_path / "source", "float32")
    for name, change in (("mistral", {}), ("qwen3", {"architecture": "qwen3"})):
        older = damage(tmp_path / "source", tmp_path / name, **change)
        values = json.loads((older / "model_config.json").read_text())
        del values["config"]["layer_kinds"]
        values["config"] |= {"rope": values["config"].pop("ropes")[0], "sliding_window": 48}
        (older / "model_config.json").write_text(json.dumps(values))
    assert load_config(tmp_path / "mistral") == load_config(tmp_path / "source")
    with pytest.raises(UnsupportedModelError, match=r"sliding_window=48 does not say which .* convert the"):
        load_config(tmp_path / "qwen3")


def test_a_save_of_an_unknown_family_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="architecture='gpt9' is not one of opt, llama"):
        load_config(damage(saved, tmp_path / "copy", architecture="gpt9"))


def test_conversion_keeps_the_fingerprint_unless_it_rounds(tmp_path: Path) -> None:
    source = GOLDEN / "llama_yarn"  # saved in bfloat16
    convert(str(source), tmp_path / "same", "auto")
    convert(str(source), tmp_path / "wider", "float32")
    convert(str(source), tmp_path / "rounded", "float16")
    paths = source, tmp_path / "same", tmp_path / "wider"
    prints = [model_fingerprint(load_config(path), path) for path in paths]
    assert prints[0] == prints[1] == prints[2]
    assert model_fingerprint(load_config(source), tmp_path / "rounded") != prints[0]


def test_a_shorter_context_takes_the_first_positions(tmp_path: Path) -> None:
    convert(str(GOLDEN / "opt_pre_norm"), tmp_path / "target", "float32")
    token_ids, expected = golden("opt_pre_norm")
    for source in (tmp_path / "target", GOLDEN / "opt_pre_norm"):
        model = load_model(source, dtype="float32", mesh=make_mesh(1), max_position_embeddings=16)
        assert model.config.max_position_embeddings == 16
        assert sum(p.get_value().size for _, p in named_parameters(model)) == num_parameters(model.config)
        np.testing.assert_allclose(dense_logits(model, token_ids[:16]), expected[:16], atol=1e-4, rtol=0)


def test_never_overwrites(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="already holds a saved model"):
        save_parameters(load_model(saved, mesh=make_mesh(1)), saved, weights_digest="d")


def damage(saved: Path, target: Path, **changes: object) -> Path:
    """Return a copy of the save whose config has other values."""
    shutil.copytree(saved, target)
    path = target / "model_config.json"
    values = json.loads(path.read_text())
    for key, value in changes.items():
        if key in values:
            values[key] = value
        else:
            values["config"][key] = value
    path.write_text(json.dumps(values))
    return target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, r"6 parameter\(s\) missing \(layers\.2\."),
        ({"num_layers": 1}, r"not part of this model \(layers\.1\."),
        ({"vocab_size": 321}, r"'embed\.table'.* has shape \[320, 64\], the config asks for \[321, 64\]"),
        ({"format_version": 99}, "format version 99"),
    ],
)
def test_disagreement_names_the_parameter(
    saved: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_model(damage(saved, tmp_path / "copy", **changes), mesh=make_mesh(1))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("norm_eps", "1e-5", "norm_eps='1e-5' must be a finite number"),
        ("norm_eps", float("nan"), "norm_eps=nan must be a finite number"),
        pytest.param("norm_eps", 10**400, "norm_eps=10+ must be a finite number", id="no float holds it"),
        ("num_layers", True, "num_layers=True must be a positive integer"),
        ("num_layers", 10**11, "num_layers=100000000000 must be at most 10000"),
        ("tie_word_embeddings", "no", "tie_word_embeddings='no' must be true or false"),
        ("bos_token_id", "x", "bos_token_id='x' must be an integer or null"),
        ("sliding_window", "x", "window='x' must be a positive integer, or null"),
        ("layer_kinds", [{"window": 0}, {}], "window=0 must be a positive integer, or null"),
        ("layer_kinds", [{}], "layer_kinds has 1 entries; it must have num_layers=2"),
        ("layer_kinds", [{"rope": 1}, {}], "rope=1 must be below 1, the number of ropes"),
        ("layer_kinds", [{"size": 1}, {}], "not a model config of this version: .*size"),
        ("ropes", [], r"ropes=\(\) must have at least one entry"),
        ("attention_softcap", 0, "attention_softcap=0 must be a finite number above 0, or null"),
        ("attention_scale", "x", "attention_scale='x' must be a finite number above 0, or null"),
        ("has_sinks", 1, "has_sinks=1 must be true or false"),
        ("eos_token_ids", ["a"], r"eos_token_ids=\('a',\) must be integers"),
        ("architecture", ["llama"], r"architecture=\['llama'\] must be a string"),
        ("ropes", [{"theta": "1e6"}], "rope.theta='1e6' must be a finite number"),
        ("ropes", [{"theta": 0}], "rope.theta=0 must be above 0"),
        ("ropes", [{"truncate": 1}], "rope.truncate=1 must be true or false"),
        ("ropes", [{"original_max_positions": 0.5}], "rope.original_max_positions=0.5 must be an integer"),
    ],
)
def test_a_value_of_another_kind_is_named_before_anything_is_read(
    saved: Path, tmp_path: Path, field: str, value: object, message: str
) -> None:
    """After editing the file, a user must get an error that names the value, not a kernel's or none."""
    with pytest.raises(UnsupportedModelError, match=message):
        load_config(damage(saved, tmp_path / "copy", **{field: value}))


def test_a_window_of_too_many_layers_is_refused() -> None:
    """The older form has no entry for each layer, and is not expanded first."""
    values = preset("qwen3-tiny").to_json() | {"num_layers": 10**11, "sliding_window": 8}
    values.pop("layer_kinds")
    with pytest.raises(UnsupportedModelError, match="num_layers=100000000000 must be at most 10000"):
        ModelConfig.from_json(values)


def test_missing_or_damaged_data(saved: Path, tmp_path: Path) -> None:
    broken = damage(saved, tmp_path / "copy")
    data = next(path for path in (broken / "params").rglob("d/*") if path.is_file())
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"{data.name} has {len(whole) - 1} bytes, {len(whole)} bytes"):
        load_model(broken, mesh=make_mesh(1))
    data.unlink()
    with pytest.raises(CheckpointError, match=rf"{data.name} is missing"):
        load_model(broken, mesh=make_mesh(1))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("config", None, r"model_config\.json: 'config' is missing, but must be dict"),
        ("weights_digest", None, r"model_config\.json: 'weights_digest' is missing"),
        ("files_bytes", None, r"model_config\.json: 'files_bytes' is missing"),
        ("files_crc32", None, r"model_config\.json: 'files_crc32' is missing"),
        ("format_version", None, r"model_config\.json: 'format_version' is missing"),
        ("config", [1], r"model_config\.json: 'config' is \[1\], but must be dict"),
        ("weights_digest", 7, r"model_config\.json: 'weights_digest' is 7, but must be str"),
    ],
)
def test_a_config_file_without_its_keys(
    saved: Path, tmp_path: Path, key: str, value: object, message: str
) -> None:
    """The loader or the fingerprint may read it first."""
    broken = damage(saved, tmp_path / "copy")
    values = json.loads((broken / "model_config.json").read_text())
    config = load_config(broken)
    if value is None:
        del values[key]
    else:
        values[key] = value
    (broken / "model_config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message):
        load_model(broken, mesh=make_mesh(1))
    with pytest.raises(CheckpointError, match=message):
        model_fingerprint(config, broken)


@pytest.mark.parametrize("text", ["{}", "[]", "", "{", "\xff"])
def test_an_invalid_config_file_is_refused(saved: Path, tmp_path: Path, text: str) -> None:
    broken = damage(saved, tmp_path / "copy")
    (broken / "model_config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"model_config\.json"):
        load_config(broken)


def test_a_changed_byte_in_any_file(saved: Path, tmp_path: Path) -> None:
    """Sizes agree; Orbax would accept changed weights, and fail on the rest with an untyped error."""
    broken = damage(saved, tmp_path / "copy")
    files = [
        path for path in sorted((broken / "params").rglob("*")) if path.stat().st_size and path.is_file()
    ]
    assert len(files) > 5
    for path in files:
        whole = path.read_bytes()
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        with pytest.raises(CheckpointError, match=rf"{path.name} was changed after it was saved"):
            load_model(broken, mesh=make_mesh(1))
        path.write_bytes(whole)
    load_model(broken, mesh=make_mesh(1))


def test_jax_is_left_with_its_devices() -> None:
    assert len(jax.devices()) >= 4  # otherwise the mesh tests above test nothing


@pytest.mark.parametrize("name", ["model_config.json", "params"])
def test_a_folder_with_a_part_of_a_saved_model_is_no_target(tmp_path, name):
    check_target(tmp_path)
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match="already holds a saved model"):
        check_target(tmp_path)
