"""Reader of a Hugging Face directory of safetensors files, tensor by tensor.

Owns the file format: an 8-byte little-endian header length, a JSON header, raw data. Owns all checks of
headers before data is read: missing files, truncation, an index that differs from the files, and the dtype of
a requested tensor. Data is memory mapped, so opening a checkpoint of any size is fast, and reading holds one
tensor at a time. Knows nothing of models.
"""

import dataclasses
import json
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from model_defs.config import read_json
from model_defs.errors import CheckpointError
from model_defs.other_formats import refuse_other_weights

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000
_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(np.uint8),  # the codes: a device may flush the lowest power to zero
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
FLOATS = ("F32", "F16", "BF16")
"""Dtypes of plain weights. The others occur in quantized checkpoints."""


_CONSTANTS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def is_constant(name: str) -> bool:
    """Return whether a tensor is a table that old exports carry along, which follows from the config."""
    return name.endswith(_CONSTANTS)


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Location of one tensor. `offset_bytes` counts from the start of the file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int

    def check_readable(self, dtypes: Collection[str] = FLOATS) -> None:
        """Raise CheckpointError unless the tensor has one of `dtypes`."""
        if self.dtype not in dtypes:
            raise CheckpointError(
                f"tensor {self.name!r} in {self.path.name} has dtype {self.dtype}; "
                f"{'one of ' * (len(dtypes) > 1)}{', '.join(dtypes)} is needed"
            )

    def read(self, dtypes: Collection[str] = FLOATS) -> np.ndarray:
        """Return the tensor as a read-only view of the file. Raises as `check_readable` does."""
        self.check_readable(dtypes)
        if self.num_bytes == 0:
            return np.empty(self.shape, _DTYPES[self.dtype])
        raw = self.read_bytes(self.num_bytes)
        return raw.view(_DTYPES[self.dtype]).reshape(self.shape)

    def read_bytes(self, num_bytes: int, begin: int = 0) -> np.ndarray:
        """Return `num_bytes` bytes from the tensor's byte `begin`, u8[num_bytes]."""
        return np.memmap(self.path, np.uint8, "r", self.offset_bytes + begin, (num_bytes,))


def open_checkpoint(directory: Path) -> dict[str, TensorEntry]:
    """Return every tensor of the directory by its name in the files; read only headers.

    Raises CheckpointError, which names the file or tensor that is missing, truncated or damaged.
    """
    if (directory / INDEX_FILE).is_file():
        return _open_sharded(directory)
    if (directory / SINGLE_FILE).is_file():
        return {entry.name: entry for entry in read_header(directory / SINGLE_FILE)}
    pickles = sorted(path.name for path in directory.glob("*.bin"))
    if pickles:
        raise CheckpointError(
            f"{directory} holds {pickles[0]}: torch pickles (.bin) are not supported, because loading one "
            f"runs code; save the model as safetensors (save_pretrained does)"
        )
    refuse_other_weights(directory)
    raise CheckpointError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")


def _open_sharded(directory: Path) -> dict[str, TensorEntry]:
    """Follow the index; index and files must name the same tensors, except for constants."""
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{INDEX_FILE} has no weight_map")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str):
            raise CheckpointError(
                f"{INDEX_FILE} places tensor {name!r} in {file_name!r:.60}, which is not a file name"
            )
    entries: dict[str, TensorEntry] = {}
    for file_name in sorted(set(weight_map.values())):
        path = directory / file_name
        # Path.is_file would raise for a name that is too long.
        if path.parent != directory or not os.path.isfile(path):
            raise CheckpointError(f"{INDEX_FILE} names the file {file_name!r}, which is not in {directory}")
        for entry in read_header(path):
            if weight_map.get(entry.name) != file_name:
                if is_constant(entry.name):
                    continue
                raise CheckpointError(
                    f"tensor {entry.name!r} is in {file_name}, but {INDEX_FILE} places it in "
                    f"{weight_map.get(entry.name)!r}"
                )
            entries[entry.name] = entry
    for name, file_name in weight_map.items():
        if name not in entries and not is_constant(name):
            raise CheckpointError(f"tensor {name!r} is missing: {INDEX_FILE} places it in {file_name}")
    return entries


def read_header(path: Path) -> list[TensorEntry]:
    """Return the tensors of one file, after checking them against its size."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= header_bytes <= min(file_bytes - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file: its header should have {header_bytes} "
                f"bytes, the file has {file_bytes}"
            )
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        return [_entry(path, name, spec, 8 + header_bytes, file_bytes) for name, spec in header.items()]
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} has a damaged safetensors header: {error!r}") from error


def _entry(path: Path, name: str, spec: dict[str, Any], data_start: int, file_bytes: int) -> TensorEntry:
    """Read one header entry, and check that its bytes are inside the file and fit its shape."""
    shape = _sizes(spec["shape"])
    begin, end = _sizes(spec["data_offsets"], 2)
    dtype = str(spec["dtype"])
    if end < begin or data_start + end > file_bytes:
        raise CheckpointError(
            f"tensor {name!r} {list(shape)} is truncated: {path.name} has {file_bytes} bytes, "
            f"{data_start + end} are needed"
        )
    if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype].itemsize != end - begin:
        raise CheckpointError(
            f"tensor {name!r} {dtype}{list(shape)} has {end - begin} bytes of data in {path.name}, "
            f"{math.prod(shape) * _DTYPES[dtype].itemsize} are needed"
        )
    return TensorEntry(name, path, dtype, shape, data_start + begin, end - begin)


def _sizes(values: Any, count: int | None = None) -> tuple[int, ...]:
    """Check a JSON list of sizes, with `count` entries if that is given; raise TypeError otherwise."""
    are_sizes = isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
    if not are_sizes or count not in (None, len(values)):
        raise TypeError(f"{values!r:.60} is not a list of sizes")
    return tuple(values)
