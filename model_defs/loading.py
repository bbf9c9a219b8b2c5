"""`load_model`: the entry point for every source of weights.

Owns the interpretation of a source string: "random:<preset>", a converted (Orbax) directory, or a Hugging
Face directory. Each kind of source has its own module.
"""

from pathlib import Path

from jax.sharding import Mesh

from model_defs.config import MODEL_CONFIG_FILE, ModelConfig, saved_weights_dtype
from model_defs.errors import CheckpointError, UnsupportedModelError
from model_defs.hf_config import load_config
from model_defs.hf_weights import hf_filler
from model_defs.multimodal import text_tensors
from model_defs.orbax_store import restore_parameters
from model_defs.parameters import Progress, fill_parameters, source_names
from model_defs.quantized import read_format
from model_defs.random_weights import random_filler
from model_defs.registry import Model, abstract_model, family, preset
from model_defs.safetensors_reader import open_checkpoint
from model_defs.weight_formats import weight_format

RANDOM_PREFIX = "random:"


def source_config(source: str | Path, max_position_embeddings: int | None = None) -> ModelConfig:
    """Return the config of `source` without loading weights, with the given context length, if any.

    A context longer than a learned position table raises UnsupportedModelError, except for random
    weights, whose table grows. Raises CheckpointError if `source` is not a model directory.
    """
    name = str(source)
    if name.startswith(RANDOM_PREFIX):
        config = preset(name.removeprefix(RANDOM_PREFIX))
    else:
        if not Path(source).is_dir():
            raise CheckpointError(f"{name!r} is neither a directory nor random:<preset>")
        config = load_config(source)
    wanted = max_position_embeddings or config.max_position_embeddings
    has_table = family(config.architecture).has_position_table and not name.startswith(RANDOM_PREFIX)
    if has_table and wanted > config.max_position_embeddings:
        raise UnsupportedModelError(
            f"max_position_embeddings={wanted} exceeds the checkpoint's table of "
            f"{config.max_position_embeddings} learned positions; lower it"
        )
    return config.with_context(wanted)


def source_weights_dtype(source: str | Path, wanted: str | None) -> str | None:
    """Return the format in which the model of `source` keeps its weights if `wanted` is asked for.

    None asks for the source's own: that of a converted directory, or else the model's dtype. Raises
    UnsupportedModelError for an unknown format, and for codes that would have to be rounded once more.
    """
    if wanted is not None:
        weight_format(wanted)
    if str(source).startswith(RANDOM_PREFIX):
        return wanted
    saved, root = None, Path(source)
    if (root / MODEL_CONFIG_FILE).is_file():
        saved = saved_weights_dtype(root)
    elif wanted is not None and read_format(root) is not None:
        raise UnsupportedModelError(
            f"weights_dtype={wanted!r} must be None for {source}, whose weights are quantized already; "
            "leave it out, or take the model that was quantized"
        )
    if saved is not None and wanted not in (None, saved):
        raise UnsupportedModelError(
            f"weights_dtype={wanted!r} must be {saved!r} or None for {source}, which has {saved!r} weights; "
            "convert the original model again"
        )
    return saved or wanted


def load_model(
    source: str | Path,
    *,
    dtype: str = "auto",
    mesh: Mesh,
    seed: int = 0,
    max_position_embeddings: int | None = None,
    weights_dtype: str | None = None,
    progress: Progress | None = None,
) -> Model:
    """Build the model of `source` with its weights on `mesh`.

    source: "random:<preset>" (seeded by `seed`), an Orbax directory of convert_checkpoint, or a Hugging
    Face directory of safetensors, whose quantized weights become plain ones.
    dtype: "float32", "bfloat16", "float16", or "auto" (the checkpoint's).
    weights_dtype: "int8" or "fp8" keeps the weights of layers in 8 bits; None keeps them as the source has
    them (`source_weights_dtype`).
    progress: called as `progress(num_done, num_total, parameter_name)`.
    Raises UnsupportedModelError, CheckpointError or ShardingError.
    """
    config = source_config(source, max_position_embeddings)
    weights_dtype = source_weights_dtype(source, weights_dtype)
    model = abstract_model(config, dtype=dtype, mesh=mesh, weights_dtype=weights_dtype)
    if str(source).startswith(RANDOM_PREFIX):
        fill_parameters(model, random_filler(seed, config), progress)
    elif (Path(source) / MODEL_CONFIG_FILE).is_file():
        restore_parameters(model, Path(source), progress)
    else:
        root, names = Path(source), source_names(model)
        # The checkpoint is checked against its own config: ours may have a shorter position table.
        entries = text_tensors(open_checkpoint(root), root)
        filler = hf_filler(entries, load_config(root), names, read_format(root))
        fill_parameters(model, filler, progress)
    return model


def random_model(
    config: ModelConfig,
    *,
    dtype: str = "auto",
    mesh: Mesh,
    seed: int = 0,
    weights_dtype: str | None = None,
) -> Model:
    """Build a model of any config with seeded random weights, for tests and benchmarks."""
    model = abstract_model(config, dtype=dtype, mesh=mesh, weights_dtype=weights_dtype)
    fill_parameters(model, random_filler(seed, config))
    return model
