"""Presents several replicas as the one `EngineService` of a front end, and routes each turn by its root.

Owns: the choice of the replica for each request, the status of all replicas, and the turns in flight.
Does not know: Ray, HTTP, or the recovery of a turn whose replica dies, which is in `retry`.

`epoch` never changes. A replica that restarts loses the turns that were only in its memory, and reports each
of them as unknown. The caller of such a turn then rebuilds the context from its messages. Turns on other
replicas are unaffected.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pensieve_jax.core.errors import EngineClosedError, EngineDiedError, PensieveError
from pensieve_jax.core.turn_node import root_of
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.history.server_tables.changes import HistoryChange
from pensieve_jax.server.async_engine import EngineInfo, EngineState
from pensieve_jax.server.engine_process.messages import Call, received_error, sent_change
from pensieve_jax.server.replicas.links import (
    REPORT,
    ReplicaReport,
    Replicas,
    decoded_answer,
    decoded_replica_report,
    encoded,
)
from pensieve_jax.server.replicas.merging import BY_REPLICA, OF_ALL, merged, summed
from pensieve_jax.server.replicas.placement import RootPlacer
from pensieve_jax.server.replicas.retry import RetryingSubmission, StoredOutput, key_of
from pensieve_jax.server.replicas.stream import RoutedReply, RoutedTurn

_log = logging.getLogger(__name__)

POLL_S: Final = 1.0
_CANCEL_S: Final = 10.0
_SEED_BITS: Final = 63


class RoutedEngine:
    """All replicas as one `EngineService`; see there for the contracts of its methods."""

    def __init__(
        self,
        replicas: Replicas,
        first: ReplicaReport,
        stored: StoredOutput,
        placer: RootPlacer,
        *,
        answer_s: float = 30.0,
    ) -> None:
        """Use `replicas`; at least the one with the report `first` is ready.

        Args:
          replicas: the interface to the replicas.
          first: the report of a ready replica.
          stored: finds the outputs of turns in the history.
          placer: gets every turn that is sent or ends, so that it knows the loads for new roots.
          answer_s: how long a call or a change may take.
        """
        assert first.info is not None, "it is ready"
        self._replicas = replicas
        self._stored = stored
        self._placer = placer
        self._answer_s = answer_s
        self._first_info: EngineInfo = first.info
        self._reports: Sequence[ReplicaReport] = [first]
        self._heard_s = time.monotonic()
        self._is_draining = False
        self._submissions: dict[asyncio.Task[None], RetryingSubmission] = {}
        self._num_local = self._num_run_again = 0

    # As EngineService

    @property
    def info(self) -> EngineInfo:
        """Description of one replica, but with `max_num_running` summed over all replicas."""
        most = sum(report.info.max_num_running for report in self._reports if report.info is not None)
        return replace(self._first_info, max_num_running=max(most, self._first_info.max_num_running))

    @property
    def state(self) -> EngineState:
        """State of the engine: "ready" if at least one replica is. Serve replaces lost replicas."""
        if self._is_draining:
            return "draining"
        return "ready" if any(report.state == "ready" for report in self._reports) else "starting"

    @property
    def epoch(self) -> int:
        """Constant epoch; see the module's docstring."""
        return 1

    @property
    def memory_in_words(self) -> list[str]:
        """A line about the KV cache of each replica that has an engine, in the order of the replicas."""
        infos = [report.info for report in self._reports if report.info is not None]
        return [info.description["cache"]["summary"] for info in infos]

    @property
    def last_heard_s(self) -> float:
        """Seconds since the latest message of any engine."""
        silence_s = min((report.last_heard_s for report in self._reports), default=0.0)
        return time.monotonic() - self._heard_s + silence_s

    @property
    def last_stats(self) -> Mapping[str, Any]:
        """Sums of the counters of all replicas, and each replica's state and counters under "replicas"."""
        return {**summed([report.stats for report in self._reports]), **self._own_stats()}

    def submit(self, spec: TurnSpec) -> RoutedTurn:
        """Queue a turn; raises EngineClosedError while no replica is ready."""
        return self.submit_all([spec])[0]

    def submit_all(self, specs: Sequence[TurnSpec]) -> list[RoutedTurn]:
        """Queue turns. Turns of one root, which includes all of one context, are queued all or none."""
        if self.state != "ready":
            raise EngineClosedError(f"No replica accepts turns: they are {self.state}.")
        seeded = [_seeded(spec) for spec in specs]
        keys = [key_of(spec) or secrets.token_hex(8) for spec in seeded]
        by_key: dict[str, list[int]] = {}
        for number, key in enumerate(keys):
            by_key.setdefault(key, []).append(number)
        submissions = {
            key: RetryingSubmission(self._replicas, key, [seeded[number] for number in numbers], self._stored)
            for key, numbers in by_key.items()
        }
        turns: dict[int, RoutedTurn] = {}
        for key, numbers in by_key.items():
            submission = submissions[key]
            self._start(submission)
            for number, reply in zip(numbers, submission.replies, strict=True):
                turns[number] = RoutedTurn(reply, self._id_of(reply), submission.cancel)
        return [turns[number] for number in range(len(specs))]

    async def apply(self, change: HistoryChange) -> None:
        """Change the history's tables other than turns, through the replica that owns the changed object.

        That replica knows which turns are in use. Any other would be correct too, because the history detects
        concurrent changes by two replicas.
        """
        await self._ask(_key_of_change(change), sent_change(0, change))

    async def call(self, name: str, *arguments: Any) -> Any:
        """Call one of `calls.CALLS` by name, on the replica that it concerns or on all replicas."""
        question = Call(0, name, list(arguments))
        if name in OF_ALL:
            value = merged(name, await self._ask_all(question))
            if name == "stats":
                value |= self._own_stats()
            return value
        return await self._ask(str(arguments[0]) if arguments else "", question)

    async def drain(self, deadline_s: float) -> None:
        """Accept no more turns and wait for those in flight; cancel them after `deadline_s` seconds."""
        self._is_draining = True
        if self._submissions:
            await asyncio.wait(self._submissions, timeout=deadline_s)
        for submission in self._submissions.values():
            submission.cancel_all()
        if self._submissions:
            await asyncio.wait(self._submissions, timeout=_CANCEL_S)

    # Status of the replicas

    @property
    def num_run_again(self) -> int:
        """Number of turns that were sent again because their replica died."""
        return self._num_run_again + sum(
            submission.num_run_again for submission in self._submissions.values()
        )

    async def refresh(self) -> None:
        """Fetch the reports of all replicas; raises the errors of the call."""
        answers = await self._ask_all(Call(0, REPORT, []))
        reports = [decoded_replica_report(value) for value, error in answers if error is None]
        self._reports = reports
        if reports:
            self._heard_s = time.monotonic()
        take_turns = {report.replica: report.state == "ready" for report in reports}
        self._placer.update(take_turns, self._first_info, self.last_stats)

    async def watch(self) -> None:
        """Fetch the reports once a second until this coroutine is cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.refresh()
            except PensieveError as error:
                _log.warning("the reports of the replicas could not be fetched: %s", error)

    # Private methods

    def _own_stats(self) -> dict[str, Any]:
        """Return the counters that only the front end of several replicas has."""
        by_replica = {report.replica: {"state": report.state, **report.stats} for report in self._reports}
        return {"num_turns_run_again": self.num_run_again, BY_REPLICA: by_replica}

    def _start(self, submission: RetryingSubmission) -> None:
        self._placer.sent(submission.key, submission.replies)
        task = _start_outside_request(submission.run())
        self._submissions[task] = submission
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        submission = self._submissions.pop(task)
        self._placer.ended(submission.replies)
        self._num_run_again += submission.num_run_again
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a turn ended with an unexpected error", exc_info=error)

    def _id_of(self, reply: RoutedReply) -> str:
        if reply.spec.node is not None:
            return reply.spec.node.turn_id
        self._num_local += 1
        return f"turn-{self._num_local}"

    async def _ask(self, key: str, question: Any) -> Any:
        answer = decoded_answer(await self._in_time(self._replicas.ask(key, encoded(question))))
        if answer.error is not None:
            raise received_error(answer.error)
        return answer.value

    async def _ask_all(self, question: Any) -> list[tuple[Any, Exception | None]]:
        answers = map(decoded_answer, await self._in_time(self._replicas.ask_all(encoded(question))))
        return [
            (answer.value, None if answer.error is None else received_error(answer.error))
            for answer in answers
        ]

    async def _in_time(self, asked: Any) -> Any:
        limit = asyncio.timeout(self._answer_s)
        try:
            async with limit:
                return await _start_outside_request(asked)
        except TimeoutError:
            if not limit.expired():
                raise
            sentence = f"A replica has not answered within {self._answer_s:g} s; it may still do the work."
            raise EngineDiedError(sentence) from None


def _start_outside_request[T](work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run a coroutine as a task outside the context of a request.

    Ray cancels the calls that belong to a request when its client disconnects.
    """
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())


def _seeded(spec: TurnSpec) -> TurnSpec:
    """Return the turn with a seed, so that every replica and every retry samples the same reply."""
    if spec.params.seed is not None:
        return spec
    return replace(spec, params=replace(spec.params, seed=secrets.randbits(_SEED_BITS)))


def _key_of_change(change: HistoryChange) -> str:
    """Return the root of the response that is changed, or the name of the conversation."""
    draft = getattr(change, "draft", None)
    response_id = getattr(change if draft is None else draft, "response_id", None)
    if response_id is not None:
        return root_of(response_id.removeprefix("resp_"))
    return getattr(change, "conversation_id", "expire")
