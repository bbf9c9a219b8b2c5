"""Conversion as a program: its exit status and errors; the models' tests check what it writes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from model_defs import CheckpointError, load_config, preset
from scripts import convert_checkpoint
from tests.launching import ROOT
from tests.models.helpers import GOLDEN


def test_a_preset_is_converted(launch, tmp_path, capsys):
    target = tmp_path / "target"
    assert (
        launch("scripts.convert_checkpoint", shared_llm=False, source="random:llama-tiny", target=target) == 0
    )
    assert load_config(target) == preset("llama-tiny")
    assert "writing" in capsys.readouterr().err


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
