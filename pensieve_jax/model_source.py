"""What a model's name stands for, and the tokenizer that goes with it, without loading the model.

Owns: which names there are, fetching one from the hub, and which tokenizer a source has.
Does not know: weights, devices or JAX, so that a process without them can encode prompts.
"""

from __future__ import annotations

from pathlib import Path

import huggingface_hub

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.text import Tokenizer, byte_tokenizer, load_tokenizer

DEFAULT_MODEL = "chat"
"""The small chat model that comes with this package."""
_INCLUDED = {DEFAULT_MODEL: Path(__file__).parent / "chat_model"}
_RANDOM = "random:"
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.json")


def resolve_model(model: str | Path) -> str:
    """What a model's name stands for: a local directory, or `random:<preset>`, which stays as it is.

    `DEFAULT_MODEL` is the directory in this package (`./chat` is one of that name elsewhere); a hub name is
    fetched. Raises ConfigError where there is no such directory and the hub has no such model or cannot be
    reached.
    """
    expected = "'chat', a model directory, a hub name such as 'org/model', or 'random:<preset>'"
    if not isinstance(model, str | Path) or model == "":  # which Path takes for the directory one is in
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
            "model", name, expected, "there is no such directory, and no hub name is like it"
        ) from error
    except OSError as error:
        # Offline, unknown and forbidden are all OSErrors of the hub's client.
        answer = "; ".join(line.strip().rstrip(".") for line in str(error).splitlines() if line.strip())
        raise ConfigError("model", model, expected, f"the hub answered: {answer}") from error


def source_tokenizer(source: str, vocab_size: int) -> Tokenizer | None:
    """The directory's own; bytes for random models that have room for them; else none.

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
