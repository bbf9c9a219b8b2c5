"""What a small chat model is trained on: recorded dialogues, and conversations made around told facts.

Owns: the mixture, and which replies of it count how much.
Does not know: files, how ids are made, or the model.
Called by: `train_chat_model`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from common.chat_training_data import Conversation
from common.chat_training_examples import ConversationEncoder, Example
from common.chat_training_facts import KINDS, wordings
from common.chat_training_recall import recall_conversation

SYSTEM_MESSAGES: Final = (
    "You are a helpful assistant.",
    "You are a friendly assistant who answers in short sentences.",
    "You help people with restaurants, music, travel and appointments.",
    "Answer briefly, and remember what the user tells you.",
)
_SYSTEM_SHARE: Final = 0.1  # of conversations that begin with one of them, so that it does no harm


class Mixture(NamedTuple):
    """How much of what.

    Attributes:
      recall_ratio: conversations around facts, for each task dialogue.
      assistant_repeats: how often each assistant conversation stands in an epoch.
      fact_weight: what replies count that acknowledge facts or answer questions about them.
      talk_weight: what replies between telling and asking count, whose dialogues are in the mixture anyway.
      seed: of everything that is drawn.
    """

    recall_ratio: float
    assistant_repeats: int
    fact_weight: float
    talk_weight: float
    seed: int


def training_examples(
    encoder: ConversationEncoder,
    tasks: Sequence[Conversation],
    assistants: Sequence[Conversation],
    mix: Mixture,
) -> Iterator[Example]:
    """An epoch, in no order that matters."""
    rng = random.Random(mix.seed)
    for conversation in (*tasks, *list(assistants) * mix.assistant_repeats):
        yield encoder.encode(_perhaps_with_system(rng, conversation), [1.0] * len(conversation.exchanges))
    for _ in range(num_recall_conversations(tasks, mix)):
        conversation, about_facts = recall_conversation(rng, tasks)
        weights = [
            mix.fact_weight if i in about_facts else mix.talk_weight
            for i in range(len(conversation.exchanges))
        ]
        yield encoder.encode(_perhaps_with_system(rng, conversation), weights)


def num_recall_conversations(tasks: Sequence[Conversation], mix: Mixture) -> int:
    """Of an epoch."""
    return round(mix.recall_ratio * len(tasks))


def vocabulary_texts(tasks: Sequence[Conversation], assistants: Sequence[Conversation]) -> Iterator[str]:
    """What a vocabulary is learned from: all messages, and the training wordings about facts, without values.

    Values stay out, so that held-out ones and those of training fall into pieces alike.
    """
    for conversation in (*tasks, *assistants):
        for exchange in conversation.exchanges:
            yield from exchange
    for kind in KINDS:
        for sentences in (wordings(kind.tells, held_out=False), wordings(kind.asks, held_out=False)):
            yield from sentences
        yield from kind.answers
    yield from SYSTEM_MESSAGES


def _perhaps_with_system(rng: random.Random, conversation: Conversation) -> Conversation:
    if rng.random() >= _SYSTEM_SHARE:
        return conversation
    return conversation._replace(system=rng.choice(SYSTEM_MESSAGES))
