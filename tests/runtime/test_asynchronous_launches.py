"""The import makes jaxlib launch from a separate thread, unless the environment sets it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import jax
import pytest

from pensieve_jax.runtime import asynchronous_launches
from pensieve_jax.runtime.asynchronous_launches import VARIABLE, ask_for_asynchronous_launches


@pytest.mark.parametrize(
    ("before", "said", "asked", "is_set"),
    [
        ("", {}, True, True),
        pytest.param("", {VARIABLE: "0"}, False, True, marks=pytest.mark.long),
        ("import jax; jax.devices()", {}, False, False),  # it is too late: nothing reads what is set now
    ],
    ids=["by itself", "environment", "too late"],
)
def test_a_process_that_imports_the_package(before, said, asked, is_set):
    """Checks jaxlib's own reading of the variable; the import alone creates no client."""
    code = f"""
{before}
import os, pensieve_jax
from jax._src import xla_bridge
from jaxlib import xla_client
options = xla_client.generate_pjrt_gpu_plugin_options()
print(options["use_tfrt_gpu_client"], {VARIABLE!r} in os.environ, xla_bridge.backends_are_initialized())
"""
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    inherited["JAX_PLATFORMS"] = "cpu"  # no second client on a GPU that tests are using
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=inherited | said, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(asked), str(is_set), str(bool(before))]


@pytest.mark.parametrize(("backend", "num_warnings"), [("gpu", 1), ("cpu", 0)])
def test_a_setting_that_is_too_late_for_a_gpu_is_logged(monkeypatch, caplog, backend, num_warnings):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(asynchronous_launches, "has_clients", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    with caplog.at_level(logging.WARNING):
        ask_for_asynchronous_launches()
    assert [VARIABLE in record.getMessage() for record in caplog.records] == [True] * num_warnings
    assert VARIABLE not in os.environ
