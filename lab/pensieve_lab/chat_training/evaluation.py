"""Evaluation of how well a model uses its history: loss and recall, with the history and without it.

Owns: the two measurements and their names.
Does not know: training.
Called by `programs.train_chat_model`.

  history loss   the loss per token of recorded replies from the fourth turn on, each once after its whole
                 conversation and once after its own user message only
  recall         the share of questions about something told earlier whose greedy answer holds it, once in the
                 conversation and once without it; for each set of questions
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import jax
import numpy as np

from pensieve_jax import ConfigError
from pensieve_jax.text import Tokenizer
from pensieve_lab.chat_training.data import Conversation
from pensieve_lab.chat_training.examples import ConversationEncoder, Example, all_batches
from pensieve_lab.chat_training.recall_cases import RecallCase, percent_by_kind
from pensieve_lab.chat_training.step import Network, Parameters, batch_loss, greedy_tokens

FIRST_TURN: Final = 4
_NUM_NEW: Final = 48  # tokens of an answer
_LENGTH_STEP: Final = 64  # prompts are padded to a multiple of it, which gives one shape for the whole set


class HistoryComparison(NamedTuple):
    """A figure of a model with the history, and of the same model without it."""

    with_history: float
    without_history: float


class Figures(NamedTuple):
    """Both measurements: nats per token, and percent of the questions of each set.

    `by_kind` has the percentage with the history and the number of cases, for each set and kind of question.
    """

    history_loss: HistoryComparison
    recall_percent: dict[str, HistoryComparison]
    by_kind: dict[str, dict[str, tuple[float, int]]]


class _Questions(NamedTuple):
    """A set of questions: prompts with and without the conversation before them, and their cases."""

    whole: list[list[int]]
    alone: list[list[int]]
    cases: Sequence[RecallCase]


class Evaluation:
    """Both measurements on one set of held-out data."""

    def __init__(
        self,
        network: Network,
        tokenizer: Tokenizer,
        dialogues: Sequence[Conversation],
        cases: Mapping[str, Sequence[RecallCase]],
        *,
        num_rows: int,
        row_len: int,
    ) -> None:
        """Encode the data, to be measured in batches of `num_rows` rows of `row_len` tokens.

        `cases` are sets of questions by name.

        Raises ConfigError if no dialogue is long enough, or a question does not fit into a row.
        """
        encoder = ConversationEncoder(tokenizer, user_weight=0.0)
        self._network, self._tokenizer, self._num_rows, self._row_len = network, tokenizer, num_rows, row_len
        self._replies = _history_examples(encoder, dialogues)
        self._questions = {name: _recall_questions(encoder, some) for name, some in cases.items()}
        needed = max(len(prompt) for some in self._questions.values() for prompt in some.whole) + _NUM_NEW
        if needed > row_len:
            raise ConfigError("--context_tokens", row_len, f"at least {needed}, for the recall questions")

    def __call__(self, parameters: Parameters) -> Figures:
        """Measure a model on all data."""
        losses = [self._loss_per_token(parameters, examples) for examples in self._replies]
        recalled, by_kind = {}, {}
        for name, questions in self._questions.items():
            recalled[name], by_kind[name] = self._recall_percent(parameters, questions)
        return Figures(HistoryComparison(*losses), recalled, by_kind)

    def _loss_per_token(self, parameters: Parameters, examples: Sequence[Example]) -> float:
        losses = [
            batch_loss(parameters, batch, network=self._network)
            for batch in all_batches(examples, num_rows=self._num_rows, row_len=self._row_len)
        ]
        nll, weight = (sum(map(float, parts)) for parts in zip(*jax.device_get(losses), strict=True))
        return nll / max(weight, 1.0)

    def _recall_percent(
        self, parameters: Parameters, questions: _Questions
    ) -> tuple[HistoryComparison, dict[str, tuple[float, int]]]:
        """Return the percentages of the whole set, and of each kind with the history."""
        shares, by_kind = [], {}
        for prompts in (questions.alone, questions.whole):
            answers = self.answers(parameters, prompts)
            right = [case.is_right(one) for case, one in zip(questions.cases, answers, strict=True)]
            shares.append(100 * sum(right) / len(right))
            by_kind = percent_by_kind(questions.cases, answers)
        return HistoryComparison(shares[1], shares[0]), by_kind

    def answers(self, parameters: Parameters, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Return greedy replies up to the end marker; no prompt may be longer than the longest question."""
        longest = max(map(len, prompts)) + _NUM_NEW
        row_len = min(-(-longest // _LENGTH_STEP) * _LENGTH_STEP, self._row_len)
        replies = []
        for some in itertools.batched(prompts, self._num_rows):
            token_ids = np.zeros((self._num_rows, row_len), np.int32)
            lengths = np.ones(self._num_rows, np.int32)  # rows without a prompt produce unused output
            for row, prompt in enumerate(some):
                token_ids[row, : len(prompt)], lengths[row] = prompt, len(prompt)
            new = greedy_tokens(parameters, token_ids, lengths, network=self._network, num_new=_NUM_NEW)
            replies += [self._text(ids) for ids in np.asarray(new)[: len(some)].tolist()]
        return replies

    def _text(self, token_ids: list[int]) -> str:
        end_id = self._tokenizer.eos_id
        return self._tokenizer.decode(list(itertools.takewhile(lambda i: i != end_id, token_ids)))


def _history_examples(
    encoder: ConversationEncoder, dialogues: Sequence[Conversation]
) -> tuple[list[Example], list[Example]]:
    """Return examples that weight only replies from turn `FIRST_TURN` on, in conversations and alone."""
    first = FIRST_TURN - 1
    long = [dialogue for dialogue in dialogues if len(dialogue.exchanges) > first]
    if not long:
        raise ConfigError("--dev_dialogues", len(dialogues), f"dialogues, some of {FIRST_TURN} turns or more")
    whole = [encoder.encode(one, [0.0] * first + [1.0] * (len(one.exchanges) - first)) for one in long]
    alone = [
        encoder.encode(Conversation((exchange,)), [1.0]) for one in long for exchange in one.exchanges[first:]
    ]
    return whole, alone


def _recall_questions(encoder: ConversationEncoder, cases: Sequence[RecallCase]) -> _Questions:
    """Return prompts as ids that end where the answer begins."""
    whole = []
    for case in cases:
        history = encoder.encode(case.history, [0.0] * len(case.history.exchanges))
        whole.append([*history.token_ids.tolist(), *encoder.turn_ids(case.question, is_first=False)])
    alone = [encoder.turn_ids(case.question, is_first=True) for case in cases]
    return _Questions(whole, alone, cases)
