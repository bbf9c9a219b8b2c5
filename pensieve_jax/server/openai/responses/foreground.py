"""A foreground response, for which its client waits.

Owns: running its turn, making the response object, and cancelling the turn if the client leaves first.
Does not know: requests, or how a response is sent. Called by `ResponseCreation`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any

from pensieve_jax.core.outputs import Output
from pensieve_jax.server.async_engine import AsyncTurn
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.openai.responses.events import turn_events
from pensieve_jax.server.openai.responses.pieces import ReplyPieces
from pensieve_jax.server.openai.responses.plan import ResponsePlan
from pensieve_jax.server.openai.responses.response import ResponseHead, finished_response
from pensieve_jax.server.openai.responses.retries import IdempotencyStore
from pensieve_jax.server.turns.checks import commit_context
from pensieve_jax.server.turns.run import RunningTurns, TimedTurn, run_turns, start_turns, takes_long
from pensieve_jax.server.turns.sampling import completion_usage
from pensieve_jax.server.workers import run_cpu
from pensieve_jax.text.replies import shown_marks


class ForegroundResponse:
    """One foreground response. The caller must call `close` on every path."""

    def __init__(
        self,
        services: Services,
        plan: ResponsePlan,
        idempotency: IdempotencyStore,
        unlock: Callable[[], None],
        counts: dict[str, Any],
    ) -> None:
        """Prepare the response of a plan.

        `unlock` is called at the end. The token counts are added to `counts`, which the request's log shows.
        """
        self._counts = counts
        self._services = services
        self._plan = plan
        self._idempotency = idempotency
        self._unlock = unlock
        self._running: RunningTurns | None = None
        self._is_finished = False
        self._is_delivered = False

    @property
    def head(self) -> ResponseHead:
        """The head of the response, once it has started."""
        assert self._plan.head is not None
        return self._plan.head

    @property
    def turn(self) -> TimedTurn:
        """The turn of the response, once it has started."""
        assert self._running is not None
        return self._running.turns[0]

    async def start(self) -> None:
        """Wait for a ticket and for the engine to accept the turn; raise ApiError and the engine's errors."""
        plan, services = self._plan, self._services

        async def start() -> Sequence[AsyncTurn]:
            _, turns = await start_turns(
                services.engine,
                plan.context.find,
                plan.specs,
                run_cpu=partial(services.run_cpu, plan.owner, plan.context.estimate),
            )
            return turns

        with plan.errors.renamed():
            self._running = await run_turns(
                services,
                plan.owner,
                start,
                num_tokens=plan.context.num_characters // 4,
                max_tokens=plan.body.max_output_tokens,
            )

    async def whole(self) -> dict[str, Any]:
        """Wait for the turn to end, and return the response object."""
        with self._plan.errors.renamed():
            output = await self.turn.result()
        return await self.finish(output)

    def stream(self) -> AsyncGenerator[bytes]:
        """Return the events of the response while its turn runs."""
        services = self._services
        return turn_events(
            self.head,
            self.turn,
            ReplyPieces(services.tokenizer, shown_marks(self.head.template_input)),
            services.token_texts,
            finish=self.finish,
            delivered=self.delivered,
        )

    async def finish(self, output: Output) -> dict[str, Any]:
        """Record the ended turn, which is committed if it is stored, and return the response object."""
        self._is_finished = True
        await self._commit(output)
        self._counts |= completion_usage([output.usage])
        # Use the engine's time, so that a later GET, which reads the history, returns the same one.
        ended_at_s = self._services.now_s() if output.ended_at_s is None else output.ended_at_s
        return await run_cpu(
            self._plan.owner,
            takes_long([output]),
            finished_response,
            self.head,
            output,
            ended_at_s,
            self._services.token_texts,
        )

    def charge_unread(self) -> None:
        """Charge what the client of the stream has not read; see `RunningTurns`."""
        assert self._running is not None
        self._running.charge_unread()

    def delivered(self) -> None:
        """Mark the response as delivered; if sending it fails later, `mark_undelivered` must be called."""
        self._is_delivered = True

    def mark_undelivered(self) -> None:
        """Remember that the client left before the response was sent, so that a retry gets it."""
        plan = self._plan
        if plan.draft is not None and plan.key is None:  # with a key, a retry finds it by the key
            now_s = self._services.now_s()
            self._idempotency.add_undelivered(plan.owner, plan.body_sha256, self.head.response_id, now_s)

    async def close(self) -> None:
        """Cancel the turn if it runs, and remember a response that may be committed but was not delivered."""
        try:
            if self._running is not None:
                await self._running.close()
            if self._plan.head is not None:  # the engine may have the turn, even if `start` failed
                await self._note_end(None if self._running is None else self.turn.output)
        finally:
            self._unlock()

    async def _note_end(self, output: Output | None) -> None:
        if output is not None and output.finish_reason != "cancelled" and not self._is_finished:
            await self._commit(output)
        if not self._is_delivered:
            # It may be committed nevertheless: while its client left, or before the engine died.
            self.mark_undelivered()

    async def _commit(self, output: Output) -> None:
        assert self._plan.resolved is not None
        await commit_context(self._services, self._plan.resolved, output)
