"""The `logprobs` object of Completions: four columns with an entry for each token.

Owns: the columns, and that the likely tokens have the chosen one among them, as in OpenAI's API.
Does not know: which tokens a response shows, or where they stand in its text.
Called by `openai.completions`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pensieve_jax.core.outputs import TokenLogprob
from pensieve_jax.core.prompt_logprobs import PromptLogprob
from pensieve_jax.text.token_texts import TokenTexts


class LogprobColumns:
    """The columns of one choice, or of one piece of a stream."""

    def __init__(self, texts: TokenTexts) -> None:
        """Start without tokens; `texts` has their names."""
        self._texts = texts
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(
        self,
        token_ids: Sequence[int],
        entries: Iterable[PromptLogprob | None],
        offsets: Iterable[int],
        num_top: int,
    ) -> None:
        """Add the tokens of an echoed prompt, each with `num_top` likely ones."""
        for token_id, entry in zip(token_ids, entries, strict=True):
            if entry is None:  # no tokens are before it
                self._tokens.append(self._texts.name(token_id))
                self._logprobs.append(None)
                self._tops.append(None)
            else:
                self._add(token_id, entry.logprob, dict(itertools.islice(entry.top.items(), num_top)))
        self._offsets += offsets

    def add_reply(self, entries: Iterable[TokenLogprob], offsets: Iterable[int]) -> None:
        """Add tokens of a reply."""
        for entry in entries:
            self._add(entry.token_id, entry.logprob, entry.top)
        self._offsets += offsets

    def written(self) -> dict[str, Any]:
        """Return the columns by their names in the response."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }

    def _add(self, token_id: int, logprob: float, top: Mapping[int, float]) -> None:
        keys = self._texts.keys(token_id, top)
        self._tokens.append(keys[token_id])
        self._logprobs.append(logprob)
        with_chosen = {**top, token_id: top.get(token_id, logprob)}
        self._tops.append({keys[likely_id]: value for likely_id, value in with_chosen.items()})
