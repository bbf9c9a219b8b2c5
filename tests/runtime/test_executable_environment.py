"""The environment that identifies executables besides their programs: each part changes with its source."""

from __future__ import annotations

import dataclasses
import os
import sys
import tomllib
from pathlib import Path

import jax
import pytest

from pensieve_jax.runtime import asynchronous_launches, executable_environment
from pensieve_jax.runtime.executable_environment import environment, source_digest


@dataclasses.dataclass(frozen=True)
class Client:
    platform: str = "gpu"
    platform_version: str = "cuda 13000"


@dataclasses.dataclass(frozen=True)
class Device:
    id: int = 0
    device_kind: str = "NVIDIA H200"
    core_count: int = 132
    compute_capability: str = "9.0"
    client: Client = Client()


def parts_changed(before, *devices):
    """Return the names of the parts that differ from `before`."""
    now = environment(devices or [Device()])
    assert now.keys() == before.keys()
    return {name for name in now if now[name] != before[name]}


@pytest.fixture
def before():
    return environment([Device()])


def test_nothing_changes_by_itself(before):
    assert parts_changed(before) == set()


@pytest.mark.parametrize(
    ("devices", "part"),
    [
        ([Device(client=Client(platform="rocm"))], "platform"),
        ([Device(client=Client(platform_version="cuda 12090"))], "platform"),
        ([Device(device_kind="NVIDIA H100")], "devices"),
        ([Device(core_count=16)], "devices"),
        ([Device(compute_capability="8.0")], "devices"),
        ([Device(id=1)], "devices"),
        ([Device(), Device(id=1)], "devices"),
    ],
)
def test_devices(before, devices, part):
    assert parts_changed(before, *devices) == {part}


def test_their_order(before):
    pair = Device(), Device(id=1)
    assert environment(pair) != environment(pair[::-1])


@pytest.mark.parametrize(
    "name",
    (
        *("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-pjrt", "nvidia-cublas"),
        *("flax", "numpy", "ml_dtypes", "jax_triton", "triton"),
    ),
)
def test_versions(before, monkeypatch, tmp_path, name):
    """A distribution is installed in a fake version, and found as all are."""
    information = tmp_path / f"{name.replace('-', '_')}-99.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    executable_environment._versions.cache_clear()
    try:
        assert parts_changed(before) == {"versions"}
    finally:
        executable_environment._versions.cache_clear()


@pytest.mark.parametrize("module", ["jax", "jaxlib"])
def test_versions_that_were_imported(before, monkeypatch, module):
    monkeypatch.setattr(sys.modules[module], "__version__", "99.0")
    assert parts_changed(before) == {"versions"}


def test_python(before, monkeypatch):
    monkeypatch.setattr(sys, "version", "3.99")
    assert parts_changed(before) == {"python"}


@pytest.mark.parametrize(("constant", "part"), [("_DRIVER", "driver"), ("_PROCESSOR", "processor")])
def test_files_of_the_machine(monkeypatch, tmp_path, constant, part):
    file = tmp_path / "information"
    monkeypatch.setattr(executable_environment, constant, file)
    changes = []
    for text in (None, "model: 1\n", "model: 2\n"):
        if text is not None:
            file.write_text(text)
        changes.append(environment([Device()])[part])
    assert len(set(changes)) == 3


def test_no_driver_matters_to_a_cpu(monkeypatch, tmp_path):
    driver = tmp_path / "driver"
    driver.write_text("580.1")
    monkeypatch.setattr(executable_environment, "_DRIVER", driver)
    assert environment(jax.devices()[:1])["driver"] == ""


@pytest.mark.parametrize("name", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_flags(before, monkeypatch, name):
    monkeypatch.setenv(name, "--xla_gpu_autotune_level=0")
    assert parts_changed(before) == {"flags"}


@pytest.mark.parametrize("form", ["{}", "--xla_gpu_load_autotune_results_from={} --xla_gpu_autotune_level=4"])
def test_files_that_flags_name(monkeypatch, tmp_path, form):
    """The contents count, of a file of flags and of one that a flag names."""
    file = tmp_path / "file"
    monkeypatch.setenv("XLA_FLAGS", form.format(file))
    seen = {environment([Device()])["flags"]}
    for text in ("--one", "--two"):
        file.write_text(text)
        seen.add(environment([Device()])["flags"])
    assert len(seen) == 3


def test_files_that_flags_of_a_file_name(monkeypatch, tmp_path):
    flags, results = tmp_path / "flags", tmp_path / "results"
    flags.write_text(f"--xla_gpu_load_autotune_results_from={results}")
    monkeypatch.setenv("XLA_FLAGS", str(flags))
    seen = set()
    for text in ("one", "two"):
        results.write_text(text)
        seen.add(environment([Device()])["flags"])
    assert len(seen) == 2


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA_TF32_OVERRIDE",
        "TRITON_DEFAULT_FP_FUSION",
        "MOSAIC_GPU_DUMP_PTX",
        asynchronous_launches.VARIABLE,
    ],
)
def test_variables(before, monkeypatch, name):
    monkeypatch.setenv(name, "2")  # not a value of any of them
    assert parts_changed(before) == {"variables"}


def test_the_location_of_caches_does_not_matter(before, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", os.devnull)
    monkeypatch.setitem(jax.config._value_holders, "jax_compilation_cache_dir", Holder("elsewhere"))
    monkeypatch.setitem(jax.config._value_holders, "jax_enable_compilation_cache", Holder(False))
    assert parts_changed(before) == set()


@dataclasses.dataclass
class Holder:
    value: object


def test_every_other_setting_of_jax(monkeypatch):
    before = executable_environment._settings()
    unused = set(executable_environment._UNUSED_SETTINGS)
    assert len(unused) == 2 and unused < jax.config.values.keys()
    for name in jax.config.values.keys() - unused:
        with monkeypatch.context() as patch:
            patch.setitem(jax.config._value_holders, name, Holder("changed"))
            assert executable_environment._settings() != before, name


def test_settings_of_this_thread(before):
    with jax.default_matmul_precision("highest"):
        assert parts_changed(before) == {"settings"}


def test_mesh_of_this_thread(before):
    with jax.set_mesh(jax.make_mesh((1,), ("tp",), devices=jax.devices()[:1])):
        assert "mesh" in parts_changed(before)


def test_source(before, monkeypatch):
    assert source_digest() == before["source"], "the source changes while this test runs"
    monkeypatch.setattr(executable_environment, "SOURCE_DIGEST", "other")
    assert parts_changed(before) == {"source"}


def test_every_source_file_counts(tmp_path, monkeypatch):
    package = tmp_path / "some_package"
    (package / "inner").mkdir(parents=True)
    code = package / "inner" / "code.py"
    for path in (package / "__init__.py", package / "inner" / "__init__.py", code):
        path.write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(executable_environment, "PACKAGES", ("some_package",))
    digests = [source_digest(), source_digest()]
    code.write_text("x = 2\n")
    digests.append(source_digest())
    code.rename(package / "inner" / "moved.py")
    digests.append(source_digest())
    (package / "inner" / "moved.py").rename(package / "moved.py")
    digests.append(source_digest())
    assert digests[0] == digests[1] and len(set(digests)) == 4


def test_every_package_counts():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    included = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {f"{package}*" for package in executable_environment.PACKAGES} == set(included)
