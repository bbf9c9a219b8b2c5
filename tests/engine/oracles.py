"""The expected tokens of a turn, by a reference without pages, and the runner that it judges.

A bench pairs the two, so that one driver serves the fake runner and the tiny real models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from pensieve_jax.config import EngineConfig
from pensieve_jax.core.outputs import TokenLogprob
from pensieve_jax.core.prefix import SharedPrefix
from pensieve_jax.core.prompt_logprobs import PromptLogprob
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.runner import Runner
from pensieve_jax.scheduler import Request
from tests.engine.fake_runner import (
    EOS_TOKEN_IDS,
    VOCAB_SIZE,
    Continuation,
    FakeRunner,
    dense_continuation,
    dense_totals,
    logprob_of,
    score_of,
    top_of,
)
from tests.engine.fake_transfers import Delays

_BEYOND = 25  # ids foretold behind the end of a reply


@dataclass(frozen=True)
class TurnFacts:
    """Inputs that determine a turn's tokens.

    The first `num_prefix_tokens` of a first prompt are shared. The prompt replaces `replaced`, which followed
    `history`.
    """

    history: tuple[int, ...]
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    num_prefix_tokens: int = 0
    replaced: tuple[int, ...] = ()

    @property
    def keep(self) -> int | None:
        """What the turn's specification says of the history."""
        return len(self.history) if self.replaced else None

    @property
    def room(self) -> int:
        """Number of tokens that fit the context after the prompt."""
        return self.max_total_tokens - len(self.history) - len(self.prompt)

    @property
    def max_output_len(self) -> int:
        return min(self.params.max_tokens, self.room)

    @property
    def scored_tokens(self) -> tuple[tuple[int, ...], int]:
        """Return the whole context, and the position of the first token whose log-probability exists."""
        return (*self.history, *self.prompt), max(len(self.history), 1)

    def may_end(self, number: int) -> bool:
        """Tell whether the reply's `number`-th token may be its last because of its id."""
        return number > self.params.min_tokens

    def check_end(self, token_ids: Sequence[int], reason: str, eos_token_ids: Sequence[int]) -> None:
        """Assert that a reply ended at the right token, for the right reason."""
        ending_ids = self.params.ending_ids(eos_token_ids)
        ends = [n for n, token_id in enumerate(token_ids, 1) if token_id in ending_ids and self.may_end(n)]
        if reason == "stop":
            assert ends == [len(token_ids)], (ends, token_ids)
        else:
            assert reason == "length" and not ends and len(token_ids) == self.max_output_len, (reason, ends)


class Bench(Protocol):
    """A runner and its reference."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def new_runner(self, config: EngineConfig, max_context_tokens: int, delays: Delays) -> Runner:
        """Return a runner with empty pages, whose copies take as long as `delays` say, or their real time."""
        ...

    def stop_id(self, facts: TurnFacts) -> int:
        """Return an id that is likely to come in the reply."""
        ...

    def foretell(self, request: Request) -> Sequence[int]:
        """Return what is likely to be sampled after a request's prompt, also behind the end of its reply."""
        ...

    def check_tokens(self, facts: TurnFacts, token_ids: Sequence[int], *, whole: bool) -> None:
        """Assert that these are the reply's tokens, or the first of them."""
        ...

    def check_logprobs(self, facts: TurnFacts, logprobs: Sequence[TokenLogprob]) -> None:
        """Assert that these belong to the reply's tokens."""
        ...

    def check_prompt(self, facts: TurnFacts, entries: Sequence[PromptLogprob | None]) -> None:
        """Assert that these belong to the prompt's tokens."""
        ...


def unscored(facts: TurnFacts, entries: Sequence[PromptLogprob | None]) -> list[PromptLogprob]:
    """Return the entries of a prompt, except the empty one of a conversation's first token."""
    assert len(entries) == len(facts.prompt)
    assert [entry is None for entry in entries] == [not facts.history, *[False] * (len(entries) - 1)]
    found = [entry for entry in entries if entry is not None]
    tokens, first = facts.scored_tokens
    assert [entry.token_id for entry in found] == list(tokens[first:])
    return found


class FakeBench:
    """The fake runner, with its hash over a plain list of tokens as the reference."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = EOS_TOKEN_IDS

    def new_runner(self, config: EngineConfig, max_context_tokens: int, delays: Delays) -> FakeRunner:
        return FakeRunner(config, max_context_tokens, delays)

    def stop_id(self, facts: TurnFacts) -> int:
        found = self.continuation(facts)
        return found[facts.seed % len(found)]

    def foretell(self, request: Request) -> Sequence[int]:
        context, params = request.token_ids[: request.num_prompt_end], request.params
        count = request.max_total_tokens - request.num_prompt_end
        reply = dense_continuation(
            context, params, request.seed, count, lambda number: number > params.min_tokens
        ).token_ids
        endless = replace(params, ignore_eos=True, stop_token_ids=(), min_tokens=0)
        beyond = dense_continuation([*context, *reply], endless, request.seed, _BEYOND, lambda number: True)
        return (*reply, *beyond.token_ids)

    def continuation(self, facts: TurnFacts) -> list[int]:
        """Return the whole reply."""
        return _dense(facts).token_ids

    def check_tokens(self, facts: TurnFacts, token_ids: Sequence[int], *, whole: bool) -> None:
        expected = self.continuation(facts)
        if not whole:
            expected = expected[: len(token_ids)]
        assert list(token_ids) == expected, f"{list(token_ids)} sampled, {expected} expected"

    def check_logprobs(self, facts: TurnFacts, logprobs: Sequence[TokenLogprob]) -> None:
        found = _dense(facts)
        for total, token_id, entry in zip(found.totals, found.token_ids, logprobs, strict=True):
            assert entry == (token_id, logprob_of(total), top_of(total, facts.params.logprobs or 0))

    def check_prompt(self, facts: TurnFacts, entries: Sequence[PromptLogprob | None]) -> None:
        tokens, first = facts.scored_tokens
        totals = dense_totals(tokens)
        num_top = facts.params.prompt_logprobs or 0
        for position, entry in enumerate(unscored(facts, entries), first):
            total = totals[position - 1]
            expected = (tokens[position], *score_of(total, tokens[position]), top_of(total, num_top))
            assert entry == expected, f"position {position}: {entry}, not {expected}"


def _dense(facts: TurnFacts) -> Continuation:
    ids = (*facts.history, *facts.prompt)
    return dense_continuation(ids, facts.params, facts.seed, facts.max_output_len, facts.may_end)


def spec_of(facts: TurnFacts, conversation_id: str | None) -> TurnSpec:
    """Return the turn's specification as it is submitted."""
    cut = facts.num_prefix_tokens
    prefix = SharedPrefix(facts.prompt[:cut]) if cut else None
    return TurnSpec(facts.prompt[cut:], facts.params, conversation_id, prefix=prefix, keep=facts.keep)


def prompt_ids(seed: int, length: int, vocab_size: int) -> tuple[int, ...]:
    """Return a prompt of random ids."""
    return tuple(np.random.default_rng(seed).integers(0, vocab_size, length).tolist())
