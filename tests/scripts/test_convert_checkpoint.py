"""Conversion as a program: what it writes is tested with the models; here how it ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from model_defs import load_config, preset
from tests.launching import ROOT


def test_a_preset_is_converted(launch, tmp_path, capsys):
    target = tmp_path / "target"
    assert launch("convert_checkpoint", shared_llm=False, source="random:llama-tiny", target=target) == 0
    assert load_config(target) == preset("llama-tiny")
    assert "writing" in capsys.readouterr().err


@pytest.mark.parametrize(("source", "says"), [("random:nonsense", "preset 'nonsense' is unknown")])
def test_a_typed_error_is_one_line_and_status_2(tmp_path, source, says):
    command = [sys.executable, "scripts/convert_checkpoint.py", f"--source={source}", f"--target={tmp_path}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: UnsupportedModelError:")
    assert says in done.stderr and "Traceback" not in done.stderr
