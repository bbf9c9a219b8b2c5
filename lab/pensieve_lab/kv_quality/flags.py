"""Shared flags of both programs: texts, and scales of planted channels.

Owns: the meaning of `--text` and `--outlier_scales`.
Does not know: what is measured, or other flags.
Called by the programs of KV quality.
"""

from __future__ import annotations

import numpy as np
from absl import flags

from model_defs.registry import Model
from pensieve_jax import ConfigError, TokenizerMissingError
from pensieve_jax.commands.engine_flags import shows_progress
from pensieve_jax.model_source import source_tokenizer
from pensieve_lab.kv_quality.texts import Text, dialogue_texts, own_dialogues, read_texts

FLAGS = flags.FLAGS


def load_texts(source: str, model: Model, count: int, context_tokens: int) -> list[Text]:
    """Return `count` texts of `--text`, or talk with the model; raises ConfigError or a tokenizer's error."""
    tokenizer = source_tokenizer(source, model.config.vocab_size)
    if tokenizer is None:
        raise TokenizerMissingError
    if FLAGS.text:
        return read_texts(FLAGS.text, tokenizer, count, context_tokens)
    dialogues = own_dialogues(FLAGS.model, count, FLAGS.seed, progress=shows_progress())
    return dialogue_texts(dialogues, tokenizer, context_tokens)


def outlier_scales() -> list[float]:
    """Return the values of `--outlier_scales`; raises ConfigError."""
    try:
        scales = [float(word) for word in FLAGS.outlier_scales]
    except ValueError:
        scales = [0.0]
    if not all(0 < scale < np.inf for scale in scales):
        raise ConfigError("--outlier_scales", ",".join(FLAGS.outlier_scales), "numbers above 0")
    return scales
