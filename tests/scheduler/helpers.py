"""Requests over a cache, and steps whose ids arrive at once or one step late."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pensieve_jax.cache import AnalyticCostModel, CostModel, PageTable
from pensieve_jax.config import SchedulerConfig
from pensieve_jax.core.conversation import PENDING_TOKEN, Conversation
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.scheduler import Request, Scheduler, SchedulerOutput, make_prompt_order
from tests.cache.helpers import CHUNK, Cache
from tests.scheduler.priority import check_priority

# A second for each token, whatever is before it, and a hundredth for each pair.
COSTS = AnalyticCostModel(CHUNK, num_weights=0.5, attention_width=0.0025, flop_per_s=1.0)


def page_table(requests: Iterable[Request]) -> PageTable:
    """Return a table with the pages of these requests, as the cache has them while they run."""
    table = PageTable()
    for sequence in dict.fromkeys(request.sequence for request in requests):
        sequence.row = table.open([chunk.page for chunk in sequence.chunks])
    return table


class SchedulerHarness:
    """A scheduler over a cache.

    Attributes:
      steps: [(request's name, start, end, samples)] of every step.
    """

    def __init__(
        self,
        num_pages: int = 40,
        cpu_pages: int = 0,
        *,
        max_num_running: int = 4,
        max_num_batched_tokens: int = 64,
        max_num_rows: int | None = None,
        prompt_steps: int = 0,
        token_buckets: tuple[int, ...] | None = None,
        unified: bool = True,
        prompt_order: str = "arrival",
        target_tpot_ms: float | None = None,
        cost_model: CostModel = COSTS,
        **cache: Any,
    ) -> None:
        self.cache = Cache(num_pages, cpu_pages, **cache)
        config = SchedulerConfig(
            max_num_running=max_num_running,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_rows=max_num_rows,
            prompt_steps=prompt_steps,
            token_buckets=token_buckets,
            unified=unified,
            prompt_order=prompt_order,
            target_tpot_ms=target_tpot_ms,
        )
        order = make_prompt_order(config, CHUNK, cost_model, self.cache.clock)
        self.scheduler = Scheduler(config, self.cache.manager, order)
        self.steps: list[list[tuple[str, int, int, bool]]] = []
        self._num_requests = 0
        self.sequences: dict[str, tuple[Conversation, object]] = {}

    def conversation(self, name: str, history_len: int, *holes: int) -> None:
        """Create a conversation whose history is in the cache, except its last token and these chunks."""
        sequence = self.cache.idle(name, history_len - 1)
        self.cache.drop(sequence, *holes)
        conversation = Conversation(name, list(range(history_len)))
        conversation.num_turns, conversation.num_history_tokens = 1, history_len
        conversation.num_computed_tokens = history_len - 1
        self.sequences[name] = (conversation, sequence)

    def add(self, name: str, prompt_len: int, max_tokens: int = 4, **params: object) -> Request:
        """Add a turn of a new or a known conversation."""
        known = self.sequences.get(name)
        conversation, sequence = known or (Conversation(name), self.cache.manager.open(name))
        conversation.token_ids += range(500, 500 + prompt_len)
        request = Request(
            self._num_requests,
            conversation,
            sequence,
            SamplingParams(max_tokens=max_tokens, **params),
            seed=7,
            ending_ids=(),
            max_context_tokens=10_000,
        )
        self._num_requests += 1
        self.scheduler.add(request)
        return request

    def step(self) -> SchedulerOutput:
        """Schedule a step, and deliver the ids of the previous one."""
        pending = [
            request
            for request in (*self.scheduler.running, *self.scheduler.waiting)
            if request.token_ids[-1] == PENDING_TOKEN
        ]
        output = self.scheduler.schedule()
        for request in pending:
            request.token_ids[request.token_ids.index(PENDING_TOKEN)] = 9
        self.cache.check()
        self.scheduler.check_integrity()
        check_priority(self.scheduler, self.cache.manager, output)
        self.steps.append([(g.request.conversation.conversation_id, *g[1:4]) for g in output.grants])
        assert output.num_tokens == sum(g.end - g.start for g in output.grants)
        return output


__all__ = ["CHUNK", "SchedulerHarness"]
