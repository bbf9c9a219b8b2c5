"""What a compiled program depends on besides itself: versions, devices, settings, flags and source.

Owns: the named list of these dependencies, and how each is read.
Does not know: programs (`program`), or files (`executable_store`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jaxlib

from pensieve_jax.runtime.asynchronous_launches import VARIABLE as LAUNCHES_VARIABLE

PACKAGES = ("pensieve_jax", "model_defs", "pallas_kernels")
"""The packages that programs are traced from."""
# Distributions that trace, lower or compile. The CUDA libraries and JAX's plugins are distributions of their
# own, and not the same ones everywhere.
_DISTRIBUTIONS = ("flax", "ml-dtypes", "numpy")
_DISTRIBUTION_PREFIXES = ("jax", "nvidia-", "triton")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_VARIABLES = (LAUNCHES_VARIABLE, "NVIDIA_TF32_OVERRIDE")
_VARIABLE_PREFIXES = ("MOSAIC_GPU_", "TRITON_")
_UNUSED_VARIABLE = "TRITON_CACHE_DIR"  # the place of compiled files does not change them
_UNUSED_SETTINGS = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")  # for the same reason
_DRIVER = Path("/proc/driver/nvidia/version")
_PROCESSOR = Path("/proc/cpuinfo")


def environment(devices: Sequence[jax.Device]) -> dict[str, str]:
    """Return all dependencies of programs that run on `devices` and are lowered now, on this thread."""
    client = devices[0].client
    return {
        "python": sys.version,
        "versions": repr([("jax", jax.__version__), ("jaxlib", jaxlib.__version__), *_versions()]),
        "platform": f"{client.platform} {client.platform_version}",
        "devices": repr([_device(device) for device in devices]),
        "driver": _DRIVER.read_text() if client.platform != "cpu" and _DRIVER.is_file() else "",
        # Code compiled for one processor may not run on another; such code also launches the kernels.
        "processor": _processor(),
        "flags": repr([(name, _flags(os.environ.get(name, ""))) for name in _FLAGS]),
        "variables": repr(_variables()),
        "settings": repr(_settings()),
        "mesh": repr(jax.sharding.get_abstract_mesh()),
        "source": SOURCE_DIGEST,
    }


def source_digest() -> str:
    """Return a digest of all source of `PACKAGES`, as it is on disk now."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations
        for root in spec.submodule_search_locations:
            # With strings: this runs for every stored program, and `Path` objects take three times as long.
            for folder, folders, names in os.walk(root):
                folders[:] = sorted(inner for inner in folders if inner != "__pycache__")
                for name in sorted(name for name in names if name.endswith(".py")):
                    path = os.path.join(folder, name)
                    with open(path, "rb") as file:
                        content = hashlib.sha256(file.read()).hexdigest()
                    digest.update(f"{package}{path.removeprefix(root)} {content}\n".encode())
    return digest.hexdigest()


SOURCE_DIGEST = source_digest()
"""Digest of the imported source; the source on disk may change while the process runs."""


@functools.cache
def _versions() -> list[tuple[str, str]]:
    found = set()
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name in _DISTRIBUTIONS or name.startswith(_DISTRIBUTION_PREFIXES):
            found.add((name, distribution.version))
    return sorted(found)


def _device(device: jax.Device) -> tuple[object, ...]:
    """Return what identifies a device. Slices of one GPU share its kind; only GPUs have the last three."""
    attributes = ("compute_capability", "core_count", "shared_memory_per_block_optin")
    return device.id, device.device_kind, *(getattr(device, name, None) for name in attributes)


def _flags(words: str) -> list[str]:
    """Return the flags, those of a file given in their place, and digests of the files that they name."""
    if not words.lstrip().startswith("-") and os.path.isfile(words.strip()):
        words = f"{words} {Path(words.strip()).read_text()}"
    named = [word.partition("=")[2] for word in words.split()]
    files = [Path(name) for name in named if os.path.isfile(name)]
    return [words, *(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)]


def _variables() -> list[tuple[str, str]]:
    return sorted(
        (name, value)
        for name, value in os.environ.items()
        if (name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES)) and name != _UNUSED_VARIABLE
    )


def _settings() -> list[tuple[str, str]]:
    """Return JAX's settings on this thread."""
    values = jax.config.values.items()
    return sorted((name, repr(value)) for name, value in values if name not in _UNUSED_SETTINGS)


def _processor() -> str:
    if not _PROCESSOR.is_file():
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    lines = set(_PROCESSOR.read_text().splitlines())
    features = sorted(line for line in lines if line.startswith(("flags", "Features", "model")))
    return repr((platform.machine(), features))
