"""A drafter for tests: it knows what the model will sample, and is wrong as often as it should be."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import pytest

from pensieve_jax.engine import engine as engine_module
from pensieve_jax.engine.drafting import HistoryDrafter
from pensieve_jax.engine.engine import Engine
from pensieve_jax.scheduler import Request
from tests.engine.oracles import Bench

Continuation = Callable[[Request], Sequence[int]]
"""Returns the ids that the model samples after a request's prompt, also behind the end of its reply."""


class OracleDrafter(HistoryDrafter):
    """Drafts with the ids that come, up to a place from which they are wrong.

    Attributes:
        num_accepted: tokens of drafts that became the request's.
    """

    def __init__(
        self, max_num_tokens: int, *, continuation: Continuation, vocab_size: int, seed: int
    ) -> None:
        super().__init__(max_num_tokens)
        self.num_accepted: Counter[Request] = Counter()
        self._random = random.Random(seed)
        self._continuation = continuation
        self._max_num, self._vocab_size = max_num_tokens, vocab_size

    def pays(self, running: Collection[Request], num_waiting: int) -> bool:
        super().pays(running, num_waiting)  # as a check that it works in any state
        return self._random.random() < 0.8

    def draft(self, request: Request, limit: int) -> Sequence[int]:
        super().draft(request, limit)
        num = self._random.randint(0, min(limit, self._max_num))
        if request not in self._rows or not num:
            return ()
        begin = len(request.token_ids) - request.num_prompt_end
        drafted = list(self._continuation(request)[begin : begin + num])
        num_right = self._random.choice((0, 1, num // 2, num, num))
        wrong = range(num_right, len(drafted))
        for place in wrong[: self._random.choice((1, None))]:
            drafted[place] = (drafted[place] + self._random.randint(1, 3)) % self._vocab_size
        return drafted

    def accept(self, request: Request, position: int, token_ids: Sequence[int]) -> None:
        super().accept(request, position, token_ids)
        self.num_accepted[request] += len(token_ids) - 1


def num_accepted_of(engine: Engine, request: Request) -> int:
    """Return how many tokens of drafts became a request's."""
    drafter = engine._drafter
    return drafter.num_accepted[request] if isinstance(drafter, OracleDrafter) else 0


def plant_oracle(patch: pytest.MonkeyPatch, bench: Bench, seed: int) -> None:
    """Make every engine draft with what the bench expects."""
    make = functools.partial(
        OracleDrafter,
        continuation=functools.cache(bench.foretell),
        vocab_size=bench.vocab_size,
        seed=seed,
    )
    patch.setattr(engine_module, "HistoryDrafter", make)
