"""Saving of a model as an Orbax directory, and restoring onto any mesh.

Owns the layout of such a directory: `params/` (Orbax, sharded arrays, nested by parameter name) and
model_config.json (the config, the digest of the weights' origin, the size and checksum of every file). The
latter is written last, so it marks a finished save. The script, not this module, copies tokenizer files.
"""

import json
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from model_defs.config import FORMAT_VERSION, MODEL_CONFIG_FILE, read_saved, saved_weights_dtype
from model_defs.errors import CheckpointError
from model_defs.parameters import (
    Filler,
    Parameter,
    Progress,
    fill_parameters,
    has_codes,
    is_kernel,
    named_parameters,
)
from model_defs.registry import Model
from model_defs.weight_formats import Kept

PARAMS_DIRECTORY = "params"
_READ_BYTES = 4 << 20


def check_target(directory: str | Path) -> None:
    """Raise CheckpointError if `directory` already holds a saved model, finished or not."""
    root = Path(directory).absolute()
    if (root / MODEL_CONFIG_FILE).exists() or (root / PARAMS_DIRECTORY).exists():
        raise CheckpointError(f"{root} already holds a saved model; choose an empty target")


def save_parameters(model: Model, directory: str | Path, *, weights_digest: str) -> None:
    """Write `model` to `directory`, which must not hold a saved model yet.

    weights_digest: `fingerprint.weights_digest` of the source; a restored model keeps it.
    Raises CheckpointError if a model is already there.
    """
    config = model.config.to_json() | {"dtype": model.compute_dtype.name}
    save_arrays(
        model, directory, config=config, weights_digest=weights_digest, weights_dtype=model.weights_dtype
    )


def save_arrays(
    model: nnx.Module,
    directory: str | Path,
    *,
    config: dict[str, Any],
    weights_digest: str,
    weights_dtype: str | None = None,
) -> None:
    """Save any module as `save_parameters` does; `config` is its config in JSON, with the dtype."""
    import orbax.checkpoint as ocp  # here, since the import takes half a second

    root = Path(directory).absolute()
    check_target(root)
    root.mkdir(parents=True, exist_ok=True)
    tree: dict[str, Any] = {}
    for name, parameter in named_parameters(model):
        _insert(tree, name, parameter.get_value())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / PARAMS_DIRECTORY, tree)
    files_bytes = _files_bytes(root)
    values = {
        "format_version": FORMAT_VERSION,
        "config": config,
        "weights_dtype": weights_dtype,
        "weights_digest": weights_digest,
        "files_bytes": files_bytes,
        "files_crc32": _files_crc32(root, files_bytes),
    }
    (root / MODEL_CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def restore_parameters(model: nnx.Module, directory: str | Path, progress: Progress | None = None) -> None:
    """Fill the abstract `model` from `directory`, cast to its dtype and placed in its sharding.

    The context length may be lower than the saved one. Where the model keeps weights in 8 bits and the
    directory does not, codes are made of the saved weights, one kernel at a time. Raises CheckpointError,
    which names parameters that are missing, extra or misshapen, or files that are missing, truncated or
    changed.
    """
    import orbax.checkpoint as ocp

    root = Path(directory).absolute()
    _check_files(root)
    if saved_weights_dtype(root) is None and has_codes(model):
        fill_parameters(model, _filler(model, root), progress)
        return
    parameters = dict(named_parameters(model))
    with ocp.StandardCheckpointer() as checkpointer:
        wanted = {name: parameter.get_value() for name, parameter in parameters.items()}
        targets: dict[str, Any] = {}
        for name, target in _checked_targets(wanted, _saved_shapes(checkpointer, root), root).items():
            _insert(targets, name, target)
        restored = _flatten(checkpointer.restore(root / PARAMS_DIRECTORY, targets))
    for done, (name, parameter) in enumerate(parameters.items(), start=1):
        parameter.set_value(_first_rows(restored.pop(name), wanted[name]))
        if progress is not None:
            progress(done, len(parameters), name)


def _filler(model: nnx.Module, root: Path) -> Filler:
    """Return a filler that restores one parameter at a time, after checking all of them."""
    import orbax.checkpoint as ocp

    wanted = {}
    for name, parameter in named_parameters(model):
        kept: Kept | None = parameter.get_metadata().get("kept")
        if kept is None or is_kernel(name):
            wanted[name] = parameter.get_value() if kept is None else kept.plain
    with ocp.StandardCheckpointer() as checkpointer:
        targets = _checked_targets(wanted, _saved_shapes(checkpointer, root), root)

    def fill(name: str, parameter: Parameter) -> jax.Array:
        item: dict[str, Any] = {}
        _insert(item, name, targets[name])
        arguments = ocp.args.PyTreeRestore(
            item=item,
            restore_args=ocp.checkpoint_utils.construct_restore_args(item),
            partial_restore=True,
        )
        with ocp.PyTreeCheckpointer() as checkpointer:
            restored = _flatten(checkpointer.restore(root / PARAMS_DIRECTORY, args=arguments))
        return _first_rows(restored[name], wanted[name])

    return fill


def _saved_shapes(checkpointer: Any, root: Path) -> dict[str, Any]:
    """Return the metadata of the saved arrays, by parameter name."""
    return _flatten(checkpointer.metadata(root / PARAMS_DIRECTORY).item_metadata.tree)


def _first_rows(value: jax.Array, wanted: Any) -> jax.Array:
    """Return `value`, or of a longer position table the rows that the model has."""
    if value.shape == wanted.shape:
        return value
    return jax.device_put(value[: wanted.shape[0]], wanted.sharding)


def _files_bytes(root: Path) -> dict[str, int]:
    """Return the size of every file below `params/`, by path."""
    paths = sorted(path for path in (root / PARAMS_DIRECTORY).rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.stat().st_size for path in paths}


def _files_crc32(root: Path, names: Iterable[str]) -> dict[str, int]:
    """Return the checksum of every file of `names`. Threads help, since `zlib` releases the GIL."""
    files = list(names)
    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, 8)) as pool:
        return dict(zip(files, pool.map(_crc32, [root / name for name in files]), strict=True))


def _crc32(path: Path) -> int:
    """Return the checksum of one file, which may exceed the host's memory."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            value = zlib.crc32(block, value)
    return value


def _check_files(root: Path) -> None:
    """Raise CheckpointError unless all files are as saved.

    Orbax loads changed weights without an error, and other damage raises arbitrary errors of its parsers. So
    every byte is checked first. This also reads the files into the page cache.
    """
    values = read_saved(root)
    found_bytes = _files_bytes(root)
    for name, num_bytes in values["files_bytes"].items():
        if found_bytes.get(name) != num_bytes:
            state = f"has {found_bytes[name]} bytes" if name in found_bytes else "is missing"
            raise CheckpointError(f"{root / name} {state}, {num_bytes} bytes were saved; copy it again")
    saved_crc32 = values["files_crc32"]
    for name, crc32 in _files_crc32(root, values["files_bytes"]).items():
        if saved_crc32.get(name) != crc32:
            raise CheckpointError(f"{root / name} was changed after it was saved; copy it again")


def _checked_targets(
    arrays: dict[str, Any], saved: dict[str, Any], root: Path
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the restore targets of the wanted arrays: saved shapes, wanted dtypes and shardings.

    Raises CheckpointError unless parameters and shapes agree.
    """
    missing, extra = sorted(arrays.keys() - saved.keys()), sorted(saved.keys() - arrays.keys())
    if missing or extra:
        raise CheckpointError(
            f"{root}: {len(missing)} parameter(s) missing ({', '.join(missing[:8])}), "
            f"{len(extra)} not part of this model ({', '.join(extra[:8])})"
        )
    targets = {}
    for name, wanted in arrays.items():
        found = tuple(saved[name].shape)
        shortened = name == "position_table" and found[0] > wanted.shape[0] and found[1:] == wanted.shape[1:]
        if found != wanted.shape and not shortened:
            raise CheckpointError(
                f"parameter {name!r} in {root} has shape {list(found)}, "
                f"the config asks for {list(wanted.shape)}"
            )
        targets[name] = jax.ShapeDtypeStruct(found, wanted.dtype, sharding=wanted.sharding)
    return targets


def _insert(tree: dict[str, Any], name: str, value: Any) -> None:
    """Put `value` at the path `name` (joined by dots) of a nested dict."""
    *parents, leaf = name.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[leaf] = value


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a nested dict to names joined by dots, the inverse of `_insert`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
