"""Engines elsewhere, one for each root: many replicas as the one `EngineService` of a front.

Owns: which replica is asked for what, what is known of all of them, and the turns on their way.
Does not know: Ray, HTTP, or what becomes of a turn whose replica dies (`errand`).

`epoch` stays as it is: a replica that starts anew does not know turns that were in its memory only, and says
so of each; whoever sent such a turn then begins anew from its messages. The others' turns are good.
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
from pensieve_jax.server.replicas.placement import RootNames
from pensieve_jax.server.replicas.retry import RetryingSubmission, StoredOutput, key_of
from pensieve_jax.server.replicas.stream import RoutedReply, RoutedTurn

_log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
_CANCEL_S: Final = 10.0
_SEED_BITS: Final = 63


class RoutedEngine:
    """All replicas, as an `EngineService`; see there for what its methods promise."""

    def __init__(
        self,
        replicas: Replicas,
        first: ReplicaReport,
        kept: StoredOutput,
        names: RootNames,
        *,
        answer_s: float = 30.0,
    ) -> None:
        """Of replicas one of which is ready, by what it said; `kept` finds turns in the history.

        `names` is told of every turn, so that it knows where one that begins waits least.
        """
        assert first.info is not None, "it is ready"
        self._replicas = replicas
        self._kept = kept
        self._names = names
        self._answer_s = answer_s
        self._first_info: EngineInfo = first.info
        self._reports: Sequence[ReplicaReport] = [first]
        self._heard_s = time.monotonic()
        self._is_draining = False
        self._errands: dict[asyncio.Task[None], RetryingSubmission] = {}
        self._num_local = self._num_run_again = 0

    # As EngineService

    @property
    def info(self) -> EngineInfo:
        """Of one replica, but for how many turns may run, which is what all may together."""
        most = sum(report.info.max_num_running for report in self._reports if report.info is not None)
        return replace(self._first_info, max_num_running=max(most, self._first_info.max_num_running))

    @property
    def state(self) -> EngineState:
        """Ready where one replica is; a replica that is gone is replaced by whoever runs them."""
        if self._is_draining:
            return "draining"
        return "ready" if any(report.state == "ready" for report in self._reports) else "starting"

    @property
    def epoch(self) -> int:
        """Always the same; see the module."""
        return 1

    @property
    def last_heard_s(self) -> float:
        """Seconds since any engine said anything."""
        silence_s = min((report.last_heard_s for report in self._reports), default=0.0)
        return time.monotonic() - self._heard_s + silence_s

    @property
    def last_stats(self) -> Mapping[str, Any]:
        """Counters of all replicas, added up; each one's under `replicas`."""
        return {**summed([report.stats for report in self._reports]), **self._own_stats()}

    def submit(self, spec: TurnSpec) -> RoutedTurn:
        """Queue a turn; raises EngineClosedError while none is taken."""
        return self.submit_all([spec])[0]

    def submit_all(self, specs: Sequence[TurnSpec]) -> list[RoutedTurn]:
        """Queue turns; those of one root all or none, which all of one context are."""
        if self.state != "ready":
            raise EngineClosedError(f"No replica takes turns: they are {self.state}.")
        seeded = [_seeded(spec) for spec in specs]
        keys = [key_of(spec) or secrets.token_hex(8) for spec in seeded]
        by_key: dict[str, list[int]] = {}
        for number, key in enumerate(keys):
            by_key.setdefault(key, []).append(number)
        errands = {
            key: RetryingSubmission(self._replicas, key, [seeded[number] for number in numbers], self._kept)
            for key, numbers in by_key.items()
        }
        turns: dict[int, RoutedTurn] = {}
        for key, numbers in by_key.items():
            errand = errands[key]
            self._start(errand)
            for number, reply in zip(numbers, errand.replies, strict=True):
                turns[number] = RoutedTurn(reply, self._id_of(reply), errand.cancel)
        return [turns[number] for number in range(len(specs))]

    async def apply(self, change: HistoryChange) -> None:
        """Change what the history keeps beside turns, through the replica of what is changed.

        That one knows which turns are in use. Others would do as well: what two of them change at a time is
        compared in the history.
        """
        await self._ask(_key_of_change(change), sent_change(0, change))

    async def call(self, name: str, *arguments: Any) -> Any:
        """One of `calls.CALLS` by name, of the replica that it concerns or of all of them."""
        question = Call(0, name, list(arguments))
        if name in OF_ALL:
            value = merged(name, await self._ask_all(question))
            if name == "stats":
                value |= self._own_stats()
            return value
        return await self._ask(str(arguments[0]) if arguments else "", question)

    async def drain(self, deadline_s: float) -> None:
        """Take no more turns, and wait for those on their way, or cancel them when the time is over."""
        self._is_draining = True
        if self._errands:
            await asyncio.wait(self._errands, timeout=deadline_s)
        for errand in self._errands.values():
            errand.cancel_all()
        if self._errands:
            await asyncio.wait(self._errands, timeout=_CANCEL_S)

    # What is known of the replicas

    @property
    def num_run_again(self) -> int:
        """Turns that were sent once more because their replica died."""
        return self._num_run_again + sum(errand.num_run_again for errand in self._errands.values())

    async def look(self) -> None:
        """Ask every replica how it is; raises what asking raises."""
        answers = await self._ask_all(Call(0, REPORT, []))
        reports = [decoded_replica_report(value) for value, error in answers if error is None]
        self._reports = reports
        if reports:
            self._heard_s = time.monotonic()
        take_turns = {report.replica: report.state == "ready" for report in reports}
        self._names.see(take_turns, self._first_info, self.last_stats)

    async def watch(self) -> None:
        """Look once a second, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except PensieveError as error:
                _log.warning("the replicas do not say how they are: %s", error)

    # Inside

    def _own_stats(self) -> dict[str, Any]:
        """What only a front of several replicas can tell."""
        by_replica = {report.replica: report.stats for report in self._reports}
        return {"num_turns_run_again": self.num_run_again, BY_REPLICA: by_replica}

    def _start(self, errand: RetryingSubmission) -> None:
        self._names.sent(errand.key, errand.replies)
        task = _apart(errand.run())
        self._errands[task] = errand
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        errand = self._errands.pop(task)
        self._names.ended(errand.replies)
        self._num_run_again += errand.num_run_again
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a turn ended in a way that nobody expected", exc_info=error)

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
                return await _apart(asked)
        except TimeoutError:
            if not limit.expired():
                raise
            sentence = f"A replica has not answered within {self._answer_s:g} s; it may still do so."
            raise EngineDiedError(sentence) from None


def _apart[T](work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that is no child of a request: what Ray runs for a request ends with its client."""
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())


def _seeded(spec: TurnSpec) -> TurnSpec:
    """With a seed: whichever replica runs it, and however often, it is the same turn."""
    if spec.params.seed is not None:
        return spec
    return replace(spec, params=replace(spec.params, seed=secrets.randbits(_SEED_BITS)))


def _key_of_change(change: HistoryChange) -> str:
    """The root of the response that is changed, or the name of the conversation."""
    draft = getattr(change, "draft", None)
    response_id = getattr(change if draft is None else draft, "response_id", None)
    if response_id is not None:
        return root_of(response_id.removeprefix("resp_"))
    return getattr(change, "conversation_id", "expire")
