"""Resolution of a model's name, and its tokenizer, without loading the model.

Owns: the kinds of names, the download from the hub, and the choice of a source's tokenizer.
Does not know: weights, devices or JAX, so that a process without them can encode prompts.
Called by `assembly`, the server's front end, and commands.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.text import Tokenizer, byte_tokenizer, load_tokenizer
from pensieve_jax.text.loading import OTHER_VOCABULARIES, TOKENIZER_FILES

if TYPE_CHECKING:  # importing model_defs imports JAX
    from model_defs import ModelConfig

DEFAULT_MODEL = "chat"
"""Name of the small chat model in this package."""
_INCLUDED = {DEFAULT_MODEL: Path(__file__).parent / "chat_model"}
_PURPOSE = (
    "A small model that comes with the server, for trying it. It talks about restaurants, hotels, music, "
    "flights, movies and the weather, and often errs."
)
_RANDOM = "random:"
# A directory with one of these is read by `model_defs`, whose errors name the formats that are not supported.
_MODEL_SUFFIXES = frozenset((".json", ".safetensors", ".gguf", ".bin", ".pt", ".pth"))
# With files that are refused, so that a start without a tokenizer names them.
_HUB_PATTERNS = ("*.json", "*.safetensors", *TOKENIZER_FILES, *OTHER_VOCABULARIES)


def resolve_model(model: str | Path) -> str:
    """Return the local directory of a model, or the name itself for `random:<preset>`.

    `DEFAULT_MODEL` is a directory in this package; `./chat` names another one. A hub name is downloaded.
    Raises ConfigError if there is no such directory and the hub lacks the model or cannot be reached.
    """
    expected = "'chat', a model directory, a hub name such as 'org/model', or 'random:<preset>'"
    if not isinstance(model, str | Path) or model == "":  # Path("") would be the current directory
        raise ConfigError("model", model, expected)
    name = str(model)
    if model in _INCLUDED:
        return str(_INCLUDED[name])
    if name.startswith(_RANDOM):
        return name
    if Path(name).is_dir():
        if not any(file.suffix in _MODEL_SUFFIXES for file in Path(name).iterdir()):
            raise ConfigError("model", name, expected, "the directory has no config.json and no weights")
        return name
    if Path(name).is_file():
        hint = "it is a file; give the directory that holds the model's safetensors"
        gguf = "GGUF is not supported; give a directory of the model's safetensors"
        raise ConfigError("model", name, expected, gguf if name.endswith(".gguf") else hint)
    if name.startswith(("/", ".", "~")):
        raise ConfigError("model", name, expected, "there is no such directory")
    try:
        return huggingface_hub.snapshot_download(name, allow_patterns=list(_HUB_PATTERNS))
    except huggingface_hub.errors.HFValidationError as error:
        raise ConfigError(
            "model", name, expected, "there is no such directory, and it is not a valid hub name"
        ) from error
    except OSError as error:
        # The hub's client raises OSError if it is offline, and for unknown and forbidden models.
        answer = "; ".join(line.strip().rstrip(".") for line in str(error).splitlines() if line.strip())
        raise ConfigError("model", model, expected, f"the hub answered: {answer}") from error


def included_purpose(source: str) -> str | None:
    """Return what a model of this package is for, or None if the source is another one."""
    return _PURPOSE if source in map(str, _INCLUDED.values()) else None


def source_tokenizer(source: str, vocab_size: int) -> Tokenizer | None:
    """Return the directory's tokenizer, or a byte tokenizer for tiny random models, or None.

    A tokenizer may have added tokens, such as one for padding, beyond the model's `vocab_size`. A prompt that
    contains one is refused. Raises ConfigError if other ids exceed it, or those of bos or eos.
    """
    if source.startswith(_RANDOM):
        return byte_tokenizer() if source.endswith("-tiny") else None
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        return None
    if tokenizer.base_vocab_size > vocab_size:
        raise ConfigError(
            "tokenizer vocabulary",
            tokenizer.base_vocab_size,
            f"at most the model's {vocab_size} ids",
            "the directory's tokenizer belongs to another model",
        )
    for name, token_id in {"eos_token": tokenizer.eos_id, "bos_token": tokenizer.first_id}.items():
        if token_id is not None and token_id >= vocab_size:
            raise ConfigError(
                f"the tokenizer's {name}",
                f"{tokenizer.token_text(token_id)} (id {token_id})",
                f"an id below {vocab_size}, the size of the model's vocabulary",
                "name another token in tokenizer_config.json, or resize the model's embedding",
            )
    return tokenizer


def with_tokenizer_end(config: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """Return the config with the tokenizer's end-of-sequence id among those that end a reply.

    The configs of a fine-tuned chat model may name only the base model's id, which the chat never samples.
    """
    if tokenizer is None or tokenizer.eos_id is None or tokenizer.eos_id in config.eos_token_ids:
        return config
    return dataclasses.replace(config, eos_token_ids=(*config.eos_token_ids, tokenizer.eos_id))
