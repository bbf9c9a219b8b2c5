"""Wrappers of a runner and a history: they record calls and inject faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from pensieve_jax.cache.drops import ChunkCopy
from pensieve_jax.core.errors import PensieveError
from pensieve_jax.engine.runner import Progress, Runner
from pensieve_jax.engine.transfers import Ended, Transfers
from pensieve_jax.history import ConversationInfo, ConversationRecord, Cut, HistoryStore, TurnRecord
from pensieve_jax.history.server_tables.changes import HistoryChange
from pensieve_jax.history.store import TurnKey
from pensieve_jax.scheduler import PlanLayout, StepPlan, StepResult

Fault = Callable[[], BaseException]


class _Faults(dict[str, Fault]):
    """Errors that the next call of a place raises, once; "PLACE done" raises after the call's effect."""

    def raise_at(self, place: str) -> None:
        fault = self.pop(place, None)
        if fault is not None:
            raise fault()


class ObservedTransfers:
    """Transfers that record their calls and fail on demand.

    Attributes:
        events: (name of the call, its argument or result), in order; empty calls are left out.
        num_calls: by name, all of them.
        faults: error that the next call of that name raises.
        on_completed: called with what `completed` returns; the engine schedules next.
    """

    def __init__(self, inner: Transfers, faults: _Faults) -> None:
        self.inner = inner
        self.events: list[tuple[str, tuple[Any, ...]]] = []
        self.num_calls: Counter[str] = Counter()
        self.faults = faults
        self.on_completed: Callable[[Sequence[int]], None] = lambda copy_ids: None

    def swap_out(self, copies: Sequence[ChunkCopy]) -> None:
        self._call("swap_out", copies)

    def swap_in(self, copies: Sequence[ChunkCopy]) -> None:
        self._call("swap_in", copies)

    def expedite(self, copy_ids: Collection[int]) -> None:
        self._call("expedite", copy_ids)

    def wait(self) -> None:
        self._call("wait")

    def completed(self) -> Ended:
        self.num_calls["completed"] += 1
        self.faults.raise_at("completed")
        ended = self.inner.completed()
        for name, copy_ids in zip(("completed", "lost"), ended, strict=True):
            if copy_ids:
                self.events.append((name, tuple(copy_ids)))
        self.faults.raise_at("completed done")
        self.on_completed(ended.arrived)
        return ended

    def stats(self) -> dict[str, int | float]:
        return self.inner.stats()

    def _call(self, name: str, *arguments: Collection[Any]) -> None:
        self.num_calls[name] += 1
        self.faults.raise_at(name)
        if not arguments or arguments[0]:
            self.events.append((name, tuple(*arguments)))
        getattr(self.inner, name)(*arguments)
        self.faults.raise_at(f"{name} done")


class ObservedRunner:
    """A runner that records its calls and fails on demand.

    Attributes:
        events: ("launch" | "choose" | "fetch", step id), in order.
        rows: by step, (start, end) of the tokens that every row computes.
        transfers: its transfers, observed.
        faults: error that the next call of "launch", "choose", "fetch" or one of the transfers' raises, once.
    """

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.faults = _Faults()
        self.transfers = ObservedTransfers(inner.transfers, self.faults)
        self.events: list[tuple[str, int]] = []
        self.rows: list[list[tuple[int, int]]] = []
        self.plans: list[StepPlan] = []
        self.num_resets = 0

    @property
    def layouts(self) -> Mapping[int, PlanLayout]:
        return self.inner.layouts

    @property
    def num_compilations(self) -> int:
        return self.inner.num_compilations

    def warm_up(self, progress: Progress | None = None) -> None:
        self.inner.warm_up(progress)

    def fill_tiles(self, plan: StepPlan) -> None:
        self.inner.fill_tiles(plan)

    def memory_analysis(self) -> dict[str, Any]:
        return self.inner.memory_analysis()

    def reset(self) -> None:
        self.num_resets += 1
        self.inner.reset()

    def launch(self, plan: StepPlan) -> tuple[int, Any]:
        self.faults.raise_at("launch")
        self.events.append(("launch", plan.step_id))
        num_rows = int(plan.num_rows[0])
        q_lens = (plan.cu_q_lens[1 : num_rows + 1] - plan.cu_q_lens[:num_rows]).tolist()
        kv_lens = plan.kv_lens[:num_rows].tolist()
        self.rows.append([(kv - q, kv) for q, kv in zip(q_lens, kv_lens, strict=True)])
        self.plans.append(plan)
        return plan.step_id, self.inner.launch(plan)

    def choose(self, handle: tuple[int, Any], words: np.ndarray | None) -> None:
        self.faults.raise_at("choose")
        step_id, inner_handle = handle
        self.events.append(("choose", step_id))
        self.inner.choose(inner_handle, words)

    def fetch(self, handle: tuple[int, Any]) -> StepResult:
        self.faults.raise_at("fetch")
        step_id, inner_handle = handle
        self.events.append(("fetch", step_id))
        return self.inner.fetch(inner_handle)


class ObservedStore:
    """A history store that records commits and fails on demand.

    Attributes:
        commits: the turns of every successful commit.
        num_loads: number of whole conversations read.
        faults: error that the next "commit" raises before, or "committed" after the turns were written, once.
    """

    def __init__(self, inner: HistoryStore) -> None:
        self.inner = inner
        self.commits: list[list[TurnRecord]] = []
        self.num_loads = 0
        self.faults = _Faults()

    @property
    def is_shared(self) -> bool:
        return self.inner.is_shared

    @property
    def is_damaged(self) -> bool:
        return self.inner.is_damaged

    @property
    def lock_wait_s(self) -> float:
        return self.inner.lock_wait_s

    @lock_wait_s.setter
    def lock_wait_s(self, seconds: float) -> None:
        self.inner.lock_wait_s = seconds

    def head(self, conversation_id: str) -> str | None:
        return self.inner.head(conversation_id)

    def conversations(self) -> list[ConversationInfo]:
        return self.inner.conversations()

    def idle(self, before_s: float | None, num_kept: int | None, busy: Collection[str] = ()) -> list[str]:
        return self.inner.idle(before_s, num_kept, busy)

    def info(self, conversation_id: str) -> ConversationInfo:
        return self.inner.info(conversation_id)

    def load(self, conversation_id: str) -> ConversationRecord:
        self.num_loads += 1
        return self.inner.load(conversation_id)

    def load_turn(self, owner: str, turn_id: str) -> ConversationRecord:
        self.num_loads += 1
        return self.inner.load_turn(owner, turn_id)

    def has_turn(self, owner: str, turn_id: str) -> bool:
        return self.inner.has_turn(owner, turn_id)

    def commit(
        self,
        turns: Sequence[TurnRecord],
        attachments: Sequence[object] = (),
        in_use: Collection[str] = (),
    ) -> Mapping[int, PensieveError]:
        self.faults.raise_at("commit")
        refused = self.inner.commit(turns, attachments, in_use)
        self.commits.append([turn for position, turn in enumerate(turns) if position not in refused])
        self.faults.raise_at("committed")
        return refused

    def apply(self, change: HistoryChange, in_use: Collection[str] = ()) -> Sequence[TurnKey]:
        return self.inner.apply(change, in_use)

    def fork(
        self,
        conversation_id: str,
        new_conversation_id: str,
        num_tokens: int | None = None,
        *,
        at_s: float | None = None,
    ) -> Cut:
        return self.inner.fork(conversation_id, new_conversation_id, num_tokens, at_s=at_s)

    def truncate(self, conversation_id: str, num_tokens: int) -> Cut:
        return self.inner.truncate(conversation_id, num_tokens)

    def truncate_turns(self, conversation_id: str, num_turns: int) -> Cut:
        return self.inner.truncate_turns(conversation_id, num_turns)

    def delete(self, conversation_id: str) -> None:
        self.inner.delete(conversation_id)

    def note(self, name: str) -> str | None:
        return self.inner.note(name)

    def keep_note(self, name: str, text: str | None) -> None:
        self.inner.keep_note(name, text)

    def close(self) -> None:
        self.inner.close()
