"""Session set-up: four virtual CPU devices for tensor parallelism, and the `gpu` marker."""

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 4)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no GPU."""
    if not any("gpu" in item.keywords for item in items) or jax.default_backend() == "gpu":
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
