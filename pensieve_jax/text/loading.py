"""Creation of tokenizers: from a Hugging Face model directory, or built in code for random models.

Owns: which files are read, and which takes precedence.
Does not know: the model's configuration or weights.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.text.tokenizer import Tokenizer

_BYTE_SPECIALS: Final = ("<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
_TOKEN_NAMES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
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
    have); `tokenizer_config.json` and `special_tokens_map.json` for named special tokens and
    `add_bos_token`; the chat template from `chat_template.jinja` or else `tokenizer_config.json`. Raises
    ConfigError naming the unreadable file.
    """
    folder = Path(directory)
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = _read_json(folder / "special_tokens_map.json")
    if (folder / "tokenizer.json").is_file():
        backend = _backend_from_file(folder / "tokenizer.json")
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = _backend_from_merges(folder, bool(config.get("add_prefix_space", False)))
    else:
        return None
    # Besides bos and eos, add the special tokens that files list apart from the vocabulary (pad, unk).
    listed = [_content(token) for token in special_tokens.values()]
    known = [token for token in listed if token and backend.token_to_id(token) is not None]
    backend.add_special_tokens(known)
    named = {name: _content(config.get(name, special_tokens.get(name))) for name in _TOKEN_NAMES}
    return Tokenizer(
        backend,
        bos_token=named.pop("bos_token"),
        eos_token=named.pop("eos_token"),
        wants_bos=config.get("add_bos_token"),
        chat_template=_chat_template(folder, config),
        other_tokens={name: token for name, token in named.items() if token is not None},
    )


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer of 262 ids for random models: id b is byte b, then bos, eos and chat markers."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(_BYTE_SPECIALS))
    return Tokenizer(
        backend, bos_token="<bos>", eos_token="<eos>", wants_bos=True, chat_template=CHAT_TEMPLATE
    )


def _byte_characters() -> list[str]:
    """Return each byte's printable stand-in in byte-level vocabularies: itself, or one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


def _backend_from_file(path: Path) -> tokenizers.Tokenizer:
    text = _read_text(path)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises this class itself for any defect of a file
        raise ConfigError(str(path), text[:40], f"a tokenizer of the tokenizers library ({error})") from error


def _backend_from_merges(folder: Path, add_prefix_space: bool) -> tokenizers.Tokenizer:
    try:
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # for the same reason
        limit = f"a readable pair vocab.json and merges.txt ({error})"
        raise ConfigError("tokenizer", str(folder), limit, "fetch the checkpoint again") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    return backend


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return _read_text(folder / "chat_template.jinja")
    template = config.get("chat_template")
    if isinstance(template, list):
        # There are several named templates; plain chat uses the default one.
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _content(token: Any) -> str | None:
    """Return a token's text; in a configuration a token is its text or an object that contains it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), "unreadable", f"JSON ({error})", "fetch the checkpoint again") from error
    if not isinstance(value, dict):
        raise ConfigError(str(path), value, "a JSON object", "fetch the checkpoint again")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            str(path), "unreadable", f"a UTF-8 text file ({error})", "fetch the checkpoint again"
        ) from error
