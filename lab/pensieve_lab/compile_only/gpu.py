"""A compile-only NVIDIA H200: a device that programs are compiled for, and on which nothing can run.

Owns: where the CUDA plugin is found, and the description of the device, which stands in for a driver.
Lowering, XLA and ptxas run as on the device, so kernels that do not fit are refused here.
Does not know: what is compiled.

XLA tries no variants without a device (autotuning). So it may choose other products than on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax._src.lib import _jax, xla_client
from jax.sharding import AbstractDevice, AbstractMesh

from pensieve_jax import ConfigError

PLUGIN_VARIABLE = "PENSIEVE_CUDA_PLUGIN"
"""Environment variable with the directory of the plugin."""
_PACKAGE, _MODULE = "jax-cuda13-pjrt", "jax_plugins.xla_cuda13"
_LIBRARY = Path("jax_plugins", "xla_cuda13", "xla_cuda_plugin.so")
_NUM_CORES = 132
# What the runtime reports on an H200 with CUDA 13.0.
_TARGET = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  core_count: {_NUM_CORES} fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 151397597184
  device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a" name: "NVIDIA H200"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "NVIDIA H200"
"""


def find_plugin(directory: str | None = None) -> Path:
    """Return the library of the CUDA plugin: in `directory`, in that of the environment, or as installed.

    Raises:
      ConfigError: it is in none of these; the message says how to install it.
    """
    given = directory or os.environ.get(PLUGIN_VARIABLE)
    if given:
        found = Path(given) / _LIBRARY
    else:
        spec = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(_MODULE)
        found = Path(spec.origin).with_name(_LIBRARY.name) if spec and spec.origin else Path()
    if found.is_file():
        return found.resolve()
    limit = f"a directory that holds {_LIBRARY}, or None where {_PACKAGE} is installed"
    install = f"`pip install --no-deps --target=DIR {_PACKAGE}=={jaxlib.__version__}`"
    raise ConfigError("--cuda_plugin", given, limit, f"{install} makes one; name it in {PLUGIN_VARIABLE}")


@functools.cache
def compile_only_device(plugin: Path) -> Any:
    """Return the device, of platform "gpu". The first call decides what compilers print; see `figures`."""
    # Read by both compilers when they begin: print what ptxas says of each kernel.
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
    os.environ["TF_CPP_VMODULE"] = "subprocess_compilation=2"
    xla_client.load_pjrt_plugin_dynamically("cuda", str(plugin))
    options = {"target_config": _TARGET, "topology": "1x1x1"}
    return _jax.get_default_c_api_topology("cuda", "h200", options)._make_compile_only_devices()[0]


@contextlib.contextmanager
def targeting_h200() -> Iterator[None]:
    """Make kernels that are traced in this context ask for an H200."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=_NUM_CORES, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield
