"""Measured texts as token ids, with the position at which a model would begin to reply.

Owns: how files are read, and the conversations used without a file.
Does not know: formats or figures.
Called by `kv_quality.flags`.

A file whose name ends in .jsonl or .jsonl.gz holds dialogues (`chat_training.data`), which are written in the
model's chat template. Any other file is plain text, which is cut into pieces. Without a file, the model
itself replies to held-out facts and built-in lines, as in `check_recall`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pensieve_jax import LLM, CacheConfig, ConfigError, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.text import Tokenizer
from pensieve_lab.chat_training.data import Conversation, Exchange, read_dialogues
from pensieve_lab.chat_training.examples import ConversationEncoder
from pensieve_lab.chat_training.recall_cases import recall_cases
from pensieve_lab.chat_training.served_recall import serve_cases, written_talks

_SUFFIXES = (".jsonl", ".jsonl.gz")
_MIN_TOKENS = 8  # shorter pieces are not meaningful


class Text(NamedTuple):
    """A measured text; its first `reply_start` tokens are a prompt that a reply may follow."""

    token_ids: np.ndarray  # i32[n]
    reply_start: int


def read_texts(path: str, tokenizer: Tokenizer, count: int, context_tokens: int) -> list[Text]:
    """Return the first `count` dialogues, or pieces of `context_tokens` tokens of a plain text.

    Raises ConfigError naming `--text`, and ChatTemplateError for dialogues without a template.
    """
    if path.endswith(_SUFFIXES):
        dialogues = itertools.islice(read_dialogues("--text", path), count)
        texts = dialogue_texts(dialogues, tokenizer, context_tokens)
    else:
        try:
            plain = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("--text", path, "a file of dialogues or of plain text", str(error)) from error
        ids = np.array(tokenizer.encode(plain, add_bos=True), np.int32)
        pieces = [ids[start : start + context_tokens] for start in range(0, len(ids), context_tokens)]
        texts = [Text(piece, len(piece) // 2) for piece in pieces[:count] if len(piece) >= _MIN_TOKENS]
    if not texts:
        raise ConfigError("--text", path, f"a file with a text of {_MIN_TOKENS} tokens or more")
    return texts


def dialogue_texts(
    dialogues: Sequence[Conversation] | itertools.islice, tokenizer: Tokenizer, context_tokens: int
) -> list[Text]:
    """Return dialogues cut at the context limit; the model replies to the last message before the cut."""
    encoder = ConversationEncoder(tokenizer, user_weight=0.0)
    texts = []
    for dialogue in dialogues:
        ids, weights = encoder.encode(dialogue, [1.0] * len(dialogue.exchanges))
        ids, weights = ids[:context_tokens], weights[:context_tokens]
        starts = np.flatnonzero(np.diff(weights) > 0) + 1  # users' tokens have weight 0
        texts.append(Text(ids, int(starts[-1]) if len(starts) else len(ids)))
    return texts


def own_dialogues(model: str, count: int, seed: int, *, progress: bool) -> list[Conversation]:
    """Return conversations of `check_recall` with the model, which is served in float32."""
    cases = recall_cases(count, written_talks(), seed)
    config = EngineConfig(
        cache=CacheConfig(gpu_pages=1024),
        scheduler=SchedulerConfig(max_num_running=16, max_num_batched_tokens=128, token_buckets=(16, 128)),
        runner=RunnerConfig(num_layer_groups=1),
    )
    with LLM(model, dtype="float32", config=config, progress=progress) as llm:
        served = serve_cases(llm, cases, progress=progress)
    said = [[*(turn.user for turn in case.history.exchanges), case.question] for case in cases]
    return [
        Conversation(tuple(Exchange(user, out.text) for user, out in zip(users, outputs, strict=True)))
        for users, outputs in zip(said, served.outputs, strict=True)
    ]
