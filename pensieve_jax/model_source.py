"""Resolution of a model's name, and its tokenizer, without loading the model.

Owns: the kinds of names, the download from the hub, and the choice of a source's tokenizer.
Does not know: weights, devices or JAX, so that a process without them can encode prompts.
Called by `assembly`, the server's front end, and commands.
"""

from __future__ import annotations

from pathlib import Path

import huggingface_hub

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.text import Tokenizer, byte_tokenizer, load_tokenizer

DEFAULT_MODEL = "chat"
"""Name of the small chat model in this package."""
_INCLUDED = {DEFAULT_MODEL: Path(__file__).parent / "chat_model"}
_RANDOM = "random:"
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.json")


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
    if name.startswith(_RANDOM) or Path(name).is_dir():
        return name
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


def source_tokenizer(source: str, vocab_size: int) -> Tokenizer | None:
    """Return the directory's tokenizer, or a byte tokenizer for tiny random models, or None.

    Raises ConfigError for a tokenizer with more ids than the model's `vocab_size`.
    """
    if source.startswith(_RANDOM):
        return byte_tokenizer() if source.endswith("-tiny") else None
    tokenizer = load_tokenizer(source)
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            "tokenizer vocabulary",
            tokenizer.vocab_size,
            f"at most the model's {vocab_size} ids",
            "the directory's tokenizer belongs to another model",
        )
    return tokenizer
