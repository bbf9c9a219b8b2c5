"""Conversion as a program: its exit status and errors; the models' tests check what it writes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from model_defs import (
    CheckpointError,
    LayerKind,
    load_config,
    load_model,
    make_mesh,
    model_fingerprint,
    preset,
)
from model_defs.parameters import named_parameters
from pensieve_jax.text.loading import TOKENIZER_FILES
from scripts import convert_checkpoint
from tests.launching import ROOT
from tests.models.helpers import GOLDEN, dense_logits


def test_a_preset_is_converted(launch, tmp_path, capsys):
    target = tmp_path / "target"
    assert (
        launch("scripts.convert_checkpoint", shared_llm=False, source="random:llama-tiny", target=target) == 0
    )
    assert load_config(target) == preset("llama-tiny")
    assert "writing" in capsys.readouterr().err


def test_a_model_with_a_window_is_converted(tmp_path):
    source = shutil.copytree(GOLDEN / "mistral_window", tmp_path / "source")
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"sliding_window": 20}))
    convert_checkpoint.convert(str(source), tmp_path / "target", "auto")
    config = load_config(tmp_path / "target")
    assert config.layer_kinds == (LayerKind(window=20),) * 2 and config == load_config(source)
    ids = np.arange(40) % 64
    models = [load_model(tmp_path / name, mesh=make_mesh(1)) for name in ("source", "target")]
    np.testing.assert_array_equal(*(dense_logits(model, ids) for model in models))


def test_every_file_of_a_tokenizer_is_copied(tmp_path):
    """Without one of them, the converted model would have no tokenizer, or another one."""
    source = shutil.copytree(GOLDEN / "llama_default", tmp_path / "source")
    files = (*TOKENIZER_FILES, "tokenizer.model", "tekken.json", "generation_config.json")
    for name in files:
        (source / name).write_text("{}")
    convert_checkpoint.convert(str(source), tmp_path / "target", "auto")
    assert {*files, "config.json"} <= {path.name for path in (tmp_path / "target").iterdir()}


def test_codes_are_stored_and_need_no_flag(tmp_path):
    """They belong to the same histories as those that a start makes of the source."""
    source, target = GOLDEN / "qwen2_tied", tmp_path / "target"
    convert_checkpoint.convert(str(source), target, "float32", weights_dtype="int8")
    made = load_model(source, dtype="float32", mesh=make_mesh(1), weights_dtype="int8")
    stored = load_model(target, mesh=make_mesh(1))
    assert stored.weights_dtype == "int8"
    for (name, one), (_, other) in zip(named_parameters(stored), named_parameters(made), strict=True):
        np.testing.assert_array_equal(np.asarray(one[...]), np.asarray(other[...]), err_msg=name)
    config = load_config(source)
    assert model_fingerprint(load_config(target), target) == model_fingerprint(
        config, source, weights_dtype="int8"
    )


@pytest.mark.parametrize("target", ["source", "file", "file/below"])
def test_an_invalid_target_is_refused_before_anything_is_read(tmp_path, monkeypatch, target):
    """Once, the source got a second model, then shutil raised; existing files were found too late."""
    source = shutil.copytree(GOLDEN / "llama_default", tmp_path / "source")
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(convert_checkpoint, "load_model", None)
    says = "already holds a model" if target == "source" else "cannot be created as a directory"
    with pytest.raises(CheckpointError, match=says):
        convert_checkpoint.convert(str(source), tmp_path / target, "auto")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("source", "says"), [("random:nonsense", "preset 'nonsense' is unknown")])
def test_a_typed_error_is_one_line_and_status_2(tmp_path, source, says):
    command = [sys.executable, "scripts/convert_checkpoint.py", f"--source={source}", f"--target={tmp_path}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: UnsupportedModelError:")
    assert says in done.stderr and "Traceback" not in done.stderr
