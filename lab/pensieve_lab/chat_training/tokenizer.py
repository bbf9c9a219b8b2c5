"""The small chat model's tokenizer: byte-level BPE with the markers of the project's chat template.

Owns: the markers, how the vocabulary is learned, and its files.
Does not know: conversations or the model.
Called by `programs.train_chat_model`.

Every digit is a token of its own, so that the model copies a told number or time digit by digit instead of
recalling it among learned tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pensieve_jax.text import CHAT_TEMPLATE

BEGIN: Final = "<|begin|>"
END: Final = "<|end|>"
MARKERS: Final = (BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>")
MIN_VOCAB_SIZE: Final = len(MARKERS) + 256
FILES: Final = ("tokenizer.json", "tokenizer_config.json")


def learn_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Learn a tokenizer of at most `vocab_size` ids (at least `MIN_VOCAB_SIZE`): markers, then bytes."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def save_tokenizer(backend: tokenizers.Tokenizer, directory: Path, max_tokens: int) -> None:
    """Write the files of a Hugging Face tokenizer for a model of `max_tokens` positions."""
    vocabulary_file, config_file = FILES
    backend.save(str(directory / vocabulary_file))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (directory / config_file).write_text(text, encoding="utf-8")
