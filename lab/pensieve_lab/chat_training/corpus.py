"""What a small chat model is trained on: recorded dialogues, and conversations made around told facts.

Owns: the mixture, and which replies of it count how much.
Does not know: files, how ids are made, or the model.
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
_SYSTEM_SHARE: Final = 0.1  # of conversations that begin with one of them, so that it does no harm


class Weights(NamedTuple):
    """What replies count in a conversation around facts; small talk and recorded dialogues count 1.

    Attributes:
      fact: of one that acknowledges facts, or answers a question about them.
      talk: of one between telling and asking, whose dialogue is among the recorded ones anyway.
    """

    fact: float
    talk: float


class Corpus:
    """The dialogues, encoded, and conversations around facts made of them."""

    def __init__(
        self,
        encoder: ConversationEncoder,
        tasks: Sequence[Conversation],
        assistants: Sequence[Conversation],
        weights: Weights,
    ) -> None:
        """`tasks` are also the talk between telling and asking; `assistants` lend words to scraps."""
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
        """Every dialogue once."""
        rng = random.Random(seed)
        for conversation in (*self._tasks, *self._assistants):
            weights = [1.0] * len(conversation.exchanges)
            yield self._encoder.encode(_perhaps_with_system(rng, conversation), weights)

    def fresh(self, rng: random.Random) -> Example:
        """A conversation around facts."""
        conversation, roles = recall_conversation(rng, self._tasks, self._scraps)
        weights = [self._weights[role] for role in roles]
        return self._encoder.encode(_perhaps_with_system(rng, conversation), weights)


def vocabulary_texts(tasks: Sequence[Conversation], assistants: Sequence[Conversation]) -> Iterator[str]:
    """What a vocabulary is learned from: all messages, small talk, and the training wordings about facts.

    The latter are without values, so that held-out ones and those of training fall into pieces alike.
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
