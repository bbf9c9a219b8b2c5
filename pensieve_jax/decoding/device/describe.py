"""The description of a model, its devices and its kernels as plain values, and how such values print.

Owns: the keys of these values, and the printed lines.
Does not know: other values that an engine describes, or how anything was chosen.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh

from model_defs import num_active_parameters, num_parameters
from model_defs.config import ModelConfig
from pallas_kernels.ragged_paged_attention import BackendChoice

_COLUMNS: Final = 110


class Description(dict[str, Any]):
    """A dict that prints as one line per value."""

    def __str__(self) -> str:
        """Return the lines, groups one after the other."""
        return "\n".join(_lines(self, ""))


def _lines(values: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Yield one line per value, aligned; a group's lines are indented below its name."""
    flat = [name for name, value in values.items() if not isinstance(value, Mapping) or "reason" in value]
    width = max(map(len, flat), default=0)
    for name, value in values.items():
        if name not in flat:
            yield f"{indent}{name}"
            yield from _lines(value, f"{indent}  ")
        else:
            start = f"{indent}{name:{width}}  "
            yield textwrap.fill(
                _shown(value), _COLUMNS, initial_indent=start, subsequent_indent=" " * len(start)
            )


def _shown(value: object) -> str:
    if isinstance(value, Mapping):  # a kernel
        return f"{value['backend']}: {value['reason']}"
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def describe_model(
    name: str,
    model: ModelConfig,
    dtype: np.dtype[Any],
    weights_bytes: int,
    weights_dtype: str | None = None,
) -> dict[str, Any]:
    """Return the keys of `model`; see `describe`."""
    sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    return {
        "name": name,
        "architecture": model.architecture,
        **{size: getattr(model, size) for size in (*sizes, "vocab_size")},
        "windows": list(model.windows),
        "num_parameters": num_parameters(model),
        "num_active_parameters": num_active_parameters(model),
        "dtype": dtype.name,
        "weights_dtype": weights_dtype or dtype.name,
        "weights_bytes": weights_bytes,
    }


def describe_devices(mesh: Mesh) -> dict[str, Any]:
    """Return the keys of `device`; see `describe`."""
    devices: list[jax.Device] = list(mesh.devices.flat)
    return {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}


def describe_choice(choice: BackendChoice | None) -> dict[str, str] | None:
    """Return the `backend` of a kernel and the `reason` for it."""
    return None if choice is None else {"backend": choice.name, "reason": choice.reason}
