"""Convert a model, with its tokenizer, into an Orbax directory that loads fast and sharded.

    python scripts/convert_checkpoint.py --source path/to/hf-dir --target path/to/orbax-dir --dtype bfloat16

The source may be anything that `load_model` accepts. Weights are read on the host, one tensor at a time. The
target records the source of its weights, so that stored conversations stay valid, unless the dtype rounds the
weights. It loads like any other model directory, onto any number of devices. The exit status is 2, with one
line, if the source cannot be read, or the target cannot be written or already holds a model.
"""

import os
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import flags
from tqdm import tqdm

from model_defs import (
    CheckpointError,
    load_model,
    make_mesh,
    save_parameters,
    source_config,
    weights_digest,
)
from model_defs.orbax_store import check_target
from model_defs.registry import resolve_dtype
from pensieve_jax.commands.help import require
from pensieve_jax.commands.launch import run
from pensieve_jax.config import WEIGHTS_DTYPES
from pensieve_jax.text.loading import OTHER_VOCABULARIES, TOKENIZER_FILES

FLAGS = flags.FLAGS
COMPANIONS = ("config.json", "generation_config.json", *TOKENIZER_FILES, *OTHER_VOCABULARIES)
"""Files of a model directory that are copied with the weights."""


def convert(
    source: str,
    target: Path,
    dtype: str,
    seed: int = 0,
    max_position_embeddings: int | None = None,
    weights_dtype: str | None = None,
) -> None:
    """Load `source` in `dtype` on the host and save it to `target`, for a context of that length, if any.

    With a `weights_dtype`, the target has codes of 8 bits for the weights of layers. Raises ModelError.
    """
    check_target(target)
    if (target / "config.json").exists():  # for example, the source itself
        raise CheckpointError(f"{target} already holds a model; choose an empty target")
    config = source_config(source, max_position_embeddings)
    _make_directory(target)
    mesh = make_mesh(1, jax.local_devices(backend="cpu"))
    with tqdm(desc="reading", unit="array", disable=None) as bar:

        def progress(num_done: int, num_total: int, what: str) -> None:
            bar.total = num_total
            bar.set_postfix_str(what, refresh=False)
            bar.update(num_done - bar.n)

        model = load_model(
            source,
            dtype=dtype,
            mesh=mesh,
            seed=seed,
            max_position_embeddings=max_position_embeddings,
            weights_dtype=weights_dtype,
            progress=progress,
        )
    digest = weights_digest(source, seed=seed)
    saved_dtype = resolve_dtype(dtype, config)
    if jnp.promote_types(resolve_dtype("auto", config), saved_dtype) != saved_dtype:
        digest += f":{dtype}"  # rounded weights count as another model
    print(f"writing {target}", file=sys.stderr)
    save_parameters(model, target, weights_digest=digest)
    for pattern in COMPANIONS if Path(source).is_dir() else ():
        for path in Path(source).glob(pattern):
            shutil.copy2(path, target / path.name)


def _make_directory(target: Path) -> None:
    """Create the target before minutes of reading; raise CheckpointError if it cannot be written."""
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be created as a directory: {error}") from error
    if not os.access(target, os.W_OK):
        raise CheckpointError(f"{target} is not writable; choose another target")


def main() -> int:
    convert(
        FLAGS.source,
        Path(FLAGS.target),
        FLAGS.dtype,
        FLAGS.seed,
        FLAGS.max_position_embeddings,
        FLAGS.weights_dtype,
    )
    return 0


def define_flags() -> None:
    """Define the command-line flags."""
    flags.DEFINE_string("source", None, "Hugging Face directory, Orbax directory or random:<preset>.")
    flags.DEFINE_string("target", None, "Directory to write. It must not hold a model.")
    require("source", "target")
    flags.DEFINE_enum(
        "dtype", "auto", ["auto", "float32", "bfloat16", "float16"], "Type of weights; auto: the source's."
    )
    flags.DEFINE_enum(
        "weights_dtype",
        None,
        WEIGHTS_DTYPES,
        "Format in 8 bits of the layers' weights; default: that of the source, or else dtype.",
    )
    flags.DEFINE_integer("seed", 0, "Seed of random weights.")
    flags.DEFINE_integer(
        "max_position_embeddings",
        None,
        "Context of the converted model, in tokens; default: the source's.",
        lower_bound=1,
    )


if __name__ == "__main__":
    define_flags()
    run(main)
