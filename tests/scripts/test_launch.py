"""How launchers start and end: help, bad flags, noise, and readers that go away."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.scripts.conftest import ROOT

ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'scripts'}"}


def start(*command, **options):
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        **options,
    )


@pytest.mark.parametrize(
    "script", ["generate", "chat", "check_serving", "compare_variants", "benchmark_swaps"]
)
def test_help_shows_the_shared_flags(script):
    done = start(f"scripts/{script}.py", "--help", stdout=subprocess.PIPE)
    for flag in ("--model", "--gpu_pages", "--cpu_bytes", "--policy", "--[no]progress"):
        assert f"  {flag}: " in done.stdout


@pytest.mark.parametrize(
    ("script", "flag", "known"),
    [
        ("benchmark_scheduler", "--policy=x", "retention"),
        ("benchmark_scheduler", "--model=nope", "llama2-13b"),
        ("benchmark_scheduler", "--attention_backend=q", "pallas_triton"),
        ("benchmark_kernels", "--dtype=int8", "bfloat16"),
        ("benchmark_swaps", "--parts=x", "beside"),
        ("compare_variants", "--cpu_bytes=lots", "16GiB"),
        ("benchmark_kernels", "--backend=pallas_triton", "xla"),
        ("benchmark_kernels", "--cases=nope", "tiny"),
        ("generate", "--nope", "--help"),
        ("chat", "what", "unexpected arguments: what"),
    ],
)
def test_a_bad_flag_is_told_in_a_line(script, flag, known):
    done = start(f"scripts/{script}.py", flag, stdout=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert known in done.stderr


def test_typed_errors_are_one_line_and_status_2():
    code = "from common.launch import run; from pensieve_jax import ConfigError\n"
    code += "def main(): raise ConfigError('x', 1, 'more')\nrun(main)"
    done = start("-c", code, stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (2, "error: ConfigError: x is 1, but must be more.\n")


@pytest.mark.parametrize("flush", [True, False])
def test_a_reader_that_has_gone_ends_it_quietly(flush):
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = f"from common.launch import run; run(lambda: print('hello', flush={flush}) or 0)"
    done = start("-c", code, stdout=write_end)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(("flag", "shown"), [("--verbosity=0", True), ("--model=x", False)])
def test_what_libraries_do_is_shown_on_demand(flag, shown):
    code = "import logging; from absl import flags; flags.DEFINE_string('model', '', '')\n"
    code += "from common.launch import run; run(lambda: logging.getLogger('jax').info('found') or 0)"
    done = start("-c", code, flag, stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert ("found" in done.stderr) == shown
