"""Which client for GPUs JAX is asked for: the package does it when imported, unless the environment says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pensieve_jax.core.gpu_client import CLIENT_VARIABLE, launch_asynchronously


@pytest.mark.parametrize(("said", "expected"), [(None, "1"), ("0", "0"), ("1", "1")])
def test_the_environment_has_the_last_word(monkeypatch, said, expected):
    if said is None:
        monkeypatch.delenv(CLIENT_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(CLIENT_VARIABLE, said)
    launch_asynchronously()
    assert os.environ[CLIENT_VARIABLE] == expected


@pytest.mark.parametrize(("said", "expected"), [({}, True), ({CLIENT_VARIABLE: "0"}, False)])
def test_jaxlib_is_asked(said, expected):
    """By jaxlib's own reading of the variable, in a process that imports the package and nothing before."""
    code = (
        "import pensieve_jax; from jaxlib import xla_client as c; print(c.generate_pjrt_gpu_plugin_options())"
    )
    inherited = {name: value for name, value in os.environ.items() if name != CLIENT_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", code], env=inherited | said, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"'use_tfrt_gpu_client': {expected}" in done.stdout
