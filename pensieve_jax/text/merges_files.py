"""Tokenizers of directories that have vocab.json and merges.txt, and no tokenizer.json.

Owns: the classes of transformers that can be read from these files, and how each splits text.
Does not know: tokens that other files add.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.text.json_files import read_json

VOCABULARY, MERGES = "vocab.json", "merges.txt"
_GPT2, _QWEN2 = "GPT2Tokenizer", "Qwen2Tokenizer"
_CLASS_OF_MODEL: Final = {"gpt2": _GPT2, "opt": _GPT2, "qwen2": _QWEN2, "qwen3": _QWEN2}
_WRONGLY_DECLARED: Final = ("qwen2",)
"""Model types for which transformers ignores the class that the files declare."""
_END_OF_TEXT: Final = "<|endoftext|>"
_DEFAULTS: Final = {
    _GPT2: dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END_OF_TEXT),
    _QWEN2: dict.fromkeys(("eos_token", "unk_token", "pad_token"), _END_OF_TEXT),
}
_QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
"""Qwen2's split of text into words: each digit is one."""


class MergesTokenizer(NamedTuple):
    """A tokenizer of these files.

    Attributes:
      backend: the tokenizer, without added tokens.
      defaults: the class's special tokens by name, for names that no file has.
      resets_flags: whether the class takes flags from special tokens, such as `rstrip`.
    """

    backend: tokenizers.Tokenizer
    defaults: dict[str, str]
    resets_flags: bool


def read_merges(folder: Path, config: Mapping[str, Any]) -> MergesTokenizer:
    """Return the tokenizer of `folder`.

    `config` is the content of tokenizer_config.json, whose options are checked. Raises ConfigError for
    unreadable files, and for a class that splits text in another way.
    """
    name = _class_name(folder, config)
    try:
        backend = tokenizers.Tokenizer(models.BPE.from_file(str(folder / VOCABULARY), str(folder / MERGES)))
    except Exception as error:  # the library raises this class itself for any defect of a file
        limit = f"a readable pair {VOCABULARY} and {MERGES} ({error})"
        raise ConfigError("tokenizer", str(folder), limit, "fetch the checkpoint again") from error
    prefix = config.get("add_prefix_space")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix), use_regex=name == _GPT2)
    if name == _QWEN2:
        backend.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated", invert=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:
        backend.pre_tokenizer = byte_level
    backend.decoder = decoders.ByteLevel()
    return MergesTokenizer(backend, _DEFAULTS[name], name == _QWEN2)


def _class_name(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the class that transformers takes; without any hint, GPT-2's, whose files these are."""
    model = read_json(folder / "config.json")
    model_type = model.get("model_type")
    declared = config.get("tokenizer_class") or model.get("tokenizer_class")
    if model_type in _WRONGLY_DECLARED:
        declared = None
    if declared is None:
        found = _GPT2 if model_type is None else _CLASS_OF_MODEL.get(model_type)
    else:
        found = str(declared).removesuffix("Fast")
    if found not in _DEFAULTS:
        raise ConfigError(
            f"the tokenizer's class ({folder})",
            declared or f"that of a {model_type} model",
            f"{_GPT2} or {_QWEN2}, since only these are read from {VOCABULARY} and {MERGES}",
            "save tokenizer.json beside them: AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    return found
