"""A response whose client waits for it.

Owns: that its turn runs, becomes a response, and leaves no trace where its client goes first.
Does not know: requests, or how an answer is written.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any

from pensieve_jax.core.outputs import Output
from pensieve_jax.server.async_engine import AsyncTurn
from pensieve_jax.server.http.errors import renamed_fields
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.openai.responses.events import turn_events
from pensieve_jax.server.openai.responses.plan import ENGINE_FIELDS, ResponsePlan
from pensieve_jax.server.openai.responses.response import ResponseHead, finished_response
from pensieve_jax.server.openai.responses.retries import IdempotencyStore
from pensieve_jax.server.turns.checks import commit_context
from pensieve_jax.server.turns.run import RunningTurns, TimedTurn, run_turns, start_turns
from pensieve_jax.server.turns.sampling import completion_usage


class ForegroundResponse:
    """One response; whoever started it calls `close`, whatever happens."""

    def __init__(
        self,
        services: Services,
        plan: ResponsePlan,
        repeats: IdempotencyStore,
        unlock: Callable[[], None],
        counts: dict[str, Any],
    ) -> None:
        """Of a plan; `unlock` is called at the end, and `counts` of its request get those of its tokens."""
        self._counts = counts
        self._services = services
        self._plan = plan
        self._repeats = repeats
        self._unlock = unlock
        self._running: RunningTurns | None = None
        self._is_finished = False
        self._is_delivered = False

    @property
    def head(self) -> ResponseHead:
        """What is known of it, once it has started."""
        assert self._plan.head is not None
        return self._plan.head

    @property
    def turn(self) -> TimedTurn:
        """Its turn, once it has started."""
        assert self._running is not None
        return self._running.turns[0]

    async def start(self) -> None:
        """Wait for a place, and until the engine has its turn; raises ApiError and what the engine raises."""
        plan, services = self._plan, self._services

        async def start() -> Sequence[AsyncTurn]:
            _, turns = await start_turns(
                services.engine,
                plan.context.find,
                plan.specs,
                run_cpu=partial(services.run_cpu, plan.owner, plan.context.thought),
            )
            return turns

        with renamed_fields(ENGINE_FIELDS):
            self._running = await run_turns(
                services,
                plan.owner,
                start,
                num_tokens=plan.context.num_characters // 4,
                max_tokens=plan.body.max_output_tokens,
            )

    async def whole(self) -> dict[str, Any]:
        """Wait for the response object."""
        with renamed_fields(ENGINE_FIELDS):
            output = await self.turn.result()
        return self.finish(output)

    def stream(self) -> AsyncGenerator[bytes]:
        """Return the events of the response while its turn runs."""
        return turn_events(
            self.head, self.turn, self._services.token_texts, finish=self.finish, delivered=self.delivered
        )

    def finish(self, output: Output) -> dict[str, Any]:
        """The turn has ended, and is committed where it is stored: its response object."""
        self._is_finished = True
        self._commit(output)
        self._counts |= completion_usage([output.usage])
        # The same time that a later request for it reads from the history.
        ended_at_s = self._services.now_s() if output.ended_at_s is None else output.ended_at_s
        return finished_response(self.head, output, ended_at_s, self._services.token_texts)

    def delivered(self) -> None:
        """Its client has got it, or whoever writes it calls `missed` otherwise."""
        self._is_delivered = True

    def missed(self) -> None:
        """Its client left before it was written."""
        plan = self._plan
        if plan.draft is not None and plan.key is None:  # who has a key asks for it by that
            now_s = self._services.now_s()
            self._repeats.missed(plan.owner, plan.body_sha256, self.head.response_id, now_s)

    async def close(self) -> None:
        """End what runs, and remember where nobody was told what may have been committed."""
        try:
            if self._running is not None:
                await self._running.close()
            if self._plan.head is not None:  # the engine may have got its turn, whatever it said of it
                self._note_end(None if self._running is None else self.turn.output)
        finally:
            self._unlock()

    def _note_end(self, output: Output | None) -> None:
        if output is not None and output.finish_reason != "cancelled" and not self._is_finished:
            self._commit(output)
        if not self._is_delivered:
            # It may have been committed all the same: while its client left, or before its engine died.
            self.missed()

    def _commit(self, output: Output) -> None:
        assert self._plan.resolved is not None
        commit_context(self._services, self._plan.resolved, output)
