"""Training data of a small chat model: recorded dialogues, and conversations generated around told facts.

Owns: the mixture, and the loss weight of each reply.
Does not know: files, how ids are made, or the model.
Called by `programs.train_chat_model`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from pensieve_lab.chat_training import corrections, small_talk
from pensieve_lab.chat_training.data import Conversation
from pensieve_lab.chat_training.examples import ConversationEncoder, Example
from pensieve_lab.chat_training.grammar import Scraps
from pensieve_lab.chat_training.kinds import KINDS
from pensieve_lab.chat_training.recall import Role, recall_conversation

SYSTEM_MESSAGES: Final = (
    "You are a helpful assistant.",
    "You are a friendly assistant who answers in short sentences.",
    "You help people with restaurants, music, travel and appointments.",
    "Answer briefly, and remember what the user tells you.",
)
# share of conversations that begin with one of them, so that a system message does no harm
_SYSTEM_SHARE: Final = 0.1


class Weights(NamedTuple):
    """Loss weights of replies around facts; small talk and recorded dialogues have weight 1.

    Attributes:
      fact: weight of a reply that acknowledges facts, or answers a question about them.
      talk: weight of a reply between telling and asking, whose dialogue is among the recorded ones anyway.
    """

    fact: float
    talk: float


class Corpus:
    """Encoded dialogues, and conversations around facts made from them."""

    def __init__(
        self,
        encoder: ConversationEncoder,
        tasks: Sequence[Conversation],
        assistants: Sequence[Conversation],
        weights: Weights,
    ) -> None:
        """Encode the dialogues; `tasks` also give talk between facts, and `assistants` words for scraps."""
        self._encoder, self._tasks, self._assistants = encoder, tasks, assistants
        texts = (text for one in assistants for exchange in one.exchanges for text in exchange)
        self._scraps = Scraps(texts)
        self._weights = {
            Role.FACT: weights.fact,
            Role.REQUEST: 1.0,
            Role.TALK: weights.talk,
            Role.SMALL_TALK: 1.0,
        }

    def recorded(self, seed: int) -> Iterator[Example]:
        """Yield every recorded dialogue once."""
        rng = random.Random(seed)
        for conversation in (*self._tasks, *self._assistants):
            weights = [1.0] * len(conversation.exchanges)
            yield self._encoder.encode(_perhaps_with_system(rng, conversation), weights)

    def fresh(self, rng: random.Random) -> Example:
        """Return a new conversation around facts."""
        conversation, roles = recall_conversation(rng, self._tasks, self._scraps)
        weights = [self._weights[role] for role in roles]
        return self._encoder.encode(_perhaps_with_system(rng, conversation), weights)


def vocabulary_texts(tasks: Sequence[Conversation], assistants: Sequence[Conversation]) -> Iterator[str]:
    """Yield the texts for the vocabulary: messages, small talk, and training wordings of facts.

    The wordings come without values, so that held-out and training values are split into tokens alike.
    """
    for conversation in (*tasks, *assistants):
        for exchange in conversation.exchanges:
            yield from exchange
    for kind in KINDS:
        yield from kind.training_texts()
        yield from corrections.training_texts(kind)
    for exchange in small_talk.training_exchanges():
        yield from exchange
    yield from SYSTEM_MESSAGES


def _perhaps_with_system(rng: random.Random, conversation: Conversation) -> Conversation:
    if rng.random() >= _SYSTEM_SHARE:
        return conversation
    return conversation._replace(system=rng.choice(SYSTEM_MESSAGES))
