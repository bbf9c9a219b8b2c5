"""Creation of tokenizers: from a Hugging Face model directory, or built in code for random models.

Owns: which files are read, and which takes precedence.
Does not know: the model's configuration or weights.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.text.json_files import read_json, read_text
from pensieve_jax.text.listed_tokens import ListedTokens
from pensieve_jax.text.merges_files import MERGES, VOCABULARY, read_merges
from pensieve_jax.text.tokenizer import Tokenizer, byte_characters

_log = logging.getLogger(__name__)
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
"""Files of a model directory that `load_tokenizer` reads, besides config.json."""
OTHER_VOCABULARIES: Final = (
    "tokenizer.model*",
    "tekken*.json",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "vocab.*",
    "merges.txt",
)
"""Files with a vocabulary that is not read, or not alone: SentencePiece, tekken, tiktoken, WordPiece."""
_BYTE_SPECIALS: Final = ("<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
CHAT_TEMPLATE: Final = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role not in ("system", "user", "assistant") %}
        {{- raise_exception("this template knows the roles system, user and assistant") }}
    {%- endif %}
    {{- "<|" + message.role + "|>" + message.content + "<|end|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|assistant|>" }}
{%- endif %}
"""


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer | None:
    """Return the tokenizer of a model directory, or None if it has none.

    Reads `tokenizer.json`, or else `vocab.json` with `merges.txt` (byte-level BPE, as OPT's checkpoints
    have); the tokens that `ListedTokens` finds in other files; `add_bos_token` from `tokenizer_config.json`;
    the chat template from `chat_template.jinja` or else `tokenizer_config.json`. Raises ConfigError naming a
    file that is unreadable or of another kind, or a setting that cannot be applied.
    """
    folder = Path(directory)
    path = folder / "tokenizer_config.json"
    config = read_json(path)
    defaults: dict[str, str] = {}
    resets_flags = False
    _check_options(path, config)
    if (folder / "tokenizer.json").is_file():
        backend = _backend_from_file(folder / "tokenizer.json")
        _compare_prefix(path, config.get("add_prefix_space"), backend)
    elif (folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
        backend, defaults, resets_flags = read_merges(folder, config)
    else:
        _refuse_other_vocabularies(folder)
        return None
    named = ListedTokens(folder, config, defaults).add_to(backend, resets_flags=resets_flags)
    return Tokenizer(
        backend,
        bos_token=named.pop("bos_token", None),
        eos_token=named.pop("eos_token", None),
        wants_bos=config.get("add_bos_token"),
        chat_template=_chat_template(folder, config),
        other_tokens=named,
    )


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer of 262 ids for random models: id b is byte b, then bos, eos and chat markers."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(_BYTE_SPECIALS))
    return Tokenizer(
        backend, bos_token="<bos>", eos_token="<eos>", wants_bos=True, chat_template=CHAT_TEMPLATE
    )


def _backend_from_file(path: Path) -> tokenizers.Tokenizer:
    text = read_text(path)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises this class itself for any defect of a file
        raise ConfigError(str(path), text[:40], f"a tokenizer of the tokenizers library ({error})") from error


def _refuse_other_vocabularies(folder: Path) -> None:
    """Raise ConfigError for a directory whose only vocabulary is of a kind that is not read."""
    for pattern in OTHER_VOCABULARIES:
        for path in sorted(folder.glob(pattern)):
            raise ConfigError(
                "the tokenizer's file",
                str(path),
                f"tokenizer.json, or {VOCABULARY} with {MERGES}",
                "write tokenizer.json: AutoTokenizer.from_pretrained(...).save_pretrained(...)",
            )


def _check_options(path: Path, config: dict[str, Any]) -> None:
    """Raise ConfigError, or warn, for options of tokenizer_config.json that are not applied."""
    for name in ("add_bos_token", "add_eos_token", "add_prefix_space", "split_special_tokens"):
        if not isinstance(config.get(name), bool | None):
            raise ConfigError(f"{path}: {name}", config[name], "true, false or null")
    if config.get("split_special_tokens"):
        limit = "false or null: chat templates write special tokens as text"
        raise ConfigError(f"{path}: split_special_tokens", True, limit)
    if config.get("add_eos_token"):
        _log.warning("%s sets add_eos_token, which is not applied: a reply continues its prompt", path)


def _compare_prefix(path: Path, adds_space: bool | None, backend: tokenizers.Tokenizer) -> None:
    """Warn of an `add_prefix_space` that is not what tokenizer.json does."""
    encoded = "".join(backend.encode("a", add_special_tokens=False).tokens)
    if adds_space is not None and adds_space != encoded.startswith(("\u2581", "\u0120")):
        _log.warning("%s sets add_prefix_space=%s; tokenizer.json decides, and differs", path, adds_space)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return read_text(folder / "chat_template.jinja")
    template = config.get("chat_template")
    if isinstance(template, list):
        # There are several named templates; plain chat uses the default one.
        template = {entry.get("name"): entry.get("template") for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None
