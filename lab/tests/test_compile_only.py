"""The compile-only H200: what is read from compilers, and with the CUDA plugin that kernels compile."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jaxlib
import pytest

from pensieve_jax import ConfigError
from pensieve_lab.compile_only import gpu
from pensieve_lab.compile_only.figures import KernelFigures, Launch, kernel_figures
from tests.launching import load

PRINTED = """
I1130 subprocess_compilation.cc:356] ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'norm_rms' for 'sm_90a'
ptxas info    : Function properties for norm_rms
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 64 bytes smem
ptxas info    : Compile time = 7.230 ms
ptxas warning : Registers are spilled to local memory in function 'decode_128_mosaic_gpu_kernel'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'decode_128_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for decode_128_mosaic_gpu_kernel
    56 bytes stack frame, 52 bytes spill stores, 72 bytes spill loads
ptxas info    : Used 255 registers, used 16 barriers, 56 bytes cumulative stack size, 1 bytes smem
ptxas info    : Compiling entry function 'norm_rms' for 'sm_90a'
ptxas info    : Function properties for norm_rms
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 64 bytes smem
"""


def has_plugin() -> bool:
    try:
        return bool(gpu.find_plugin())
    except ConfigError:
        return False


def test_each_kernel_once() -> None:
    found = kernel_figures(PRINTED, [Launch("decode_128", 2000), Launch("decode_128", 9000)])
    assert found == (
        KernelFigures("decode_128", 255, 52, 72, 56, 9000),
        KernelFigures("norm_rms", 32, 0, 0, 0, 64),
    )
    assert [one.spills for one in found] == [True, False]
    assert kernel_figures("", []) == ()


def test_without_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install: the plugin of this jaxlib."""
    install = rf"jax-cuda13-pjrt=={jaxlib.__version__}` makes one"
    with pytest.raises(ConfigError, match=install):
        gpu.find_plugin(str(tmp_path))
    monkeypatch.setenv(gpu.PLUGIN_VARIABLE, str(tmp_path))
    with pytest.raises(ConfigError, match=rf"--cuda_plugin is '{tmp_path}'"):
        gpu.find_plugin()
    library = tmp_path / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert gpu.find_plugin() == gpu.find_plugin(str(tmp_path)) == library.resolve()
    monkeypatch.delenv(gpu.PLUGIN_VARIABLE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=install):
        gpu.find_plugin()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"tokens": ""}, "--tokens is '', but must be at least one number"),
        ({"tokens": "0"}, "integers of at least 1"),
        ({"kinds": "products,norms"}, "--kinds is 'products,norms', but must be one or more of attention,"),
        ({"kinds": ""}, "--kinds is ''"),
    ],
)
def test_refusals(launch, flags: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        launch("compile_for_h200", shared_llm=False, **flags)


def test_lines_of_the_table() -> None:
    program = load("compile_for_h200")
    kernel = {"name": "a", "registers": 3, "spill_store_bytes": 0, "spill_load_bytes": 1, "shared_bytes": 5}

    def rows(**figures: object) -> list[list[object]]:
        return program.rows_of({"program": "p"} | figures)

    assert rows(kernels=[kernel], temp_bytes=7) == [["p", "a", 3, 0, 1, 5, 7]]
    assert rows(error="ValueError: no\nmore")[0][:2] == ["p", "ValueError: no"]
    assert rows(kernels=[], temp_bytes=0)[0][1] == "none of its own"


@pytest.mark.long
@pytest.mark.skipif(not has_plugin(), reason="needs the package jax-cuda13-pjrt; see lab/docs/programs.md")
def test_kernels_and_a_step_compile(tmp_path: Path) -> None:
    """In a process of its own, since the plugin stays loaded."""
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "pensieve_lab.programs.compile_for_h200", f"--json={file}"]
    command += ["--model=llama2-13b-gqa10", "--tokens=64", "--kinds=products,steps", "--num_layers=1"]
    subprocess.run(command, check=True, env=os.environ, stdout=subprocess.DEVNULL)
    found = {one["program"]: one for one in json.loads(file.read_text())["results"]["programs"]}
    (kernel,) = found["out/64"]["kernels"]
    assert kernel["name"] == "decode_matmul_64" and not kernel["spill_store_bytes"]
    assert 100_000 < kernel["shared_bytes"] <= 227 * 1024 and 40 < kernel["registers"] <= 255
    step = found["step of 64 tokens, 1 layers"]
    assert {"decode_matmul_64", "decode_matmul_gated_64", "add_and_norm_rms"} <= {
        one["name"] for one in step["kernels"]
    }
    assert 0 < step["temp_bytes"] < 2**26


@pytest.mark.long
@pytest.mark.skipif(not has_plugin(), reason="needs the package jax-cuda13-pjrt; see lab/docs/programs.md")
@pytest.mark.parametrize("weights_dtype", ["int8", "fp8"])
def test_weights_in_8_bits_compile(weights_dtype: str, tmp_path: Path) -> None:
    """No product spills, and large steps make no array of weights in 16 bits."""
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "pensieve_lab.programs.compile_for_h200", f"--json={file}"]
    command += ["--num_layers=1", f"--weights_dtype={weights_dtype}"]
    runs = ["--kinds=products", "--tokens=8,32,128", "--fail_on_spills"], ["--kinds=steps", "--tokens=512"]
    for flags in runs:
        subprocess.run([*command, *flags], check=True, env=os.environ, stdout=subprocess.DEVNULL)
    found = {one["program"]: one for one in json.loads(file.read_text())["results"]["programs"]}
    assert found["step of 512 tokens, 1 layers"]["temp_bytes"] < 5120 * 2 * 13824, "less than gate and up"
