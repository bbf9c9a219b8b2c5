"""What tests put around a runner and a history: a record of what happened, and faults on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pensieve_jax.engine.runner import Progress, Runner
from pensieve_jax.history import ConversationInfo, ConversationRecord, HistoryStore, Turn
from pensieve_jax.scheduler import PlanLayout, StepPlan, StepResult

Fault = Callable[[], BaseException]


class ObservedRunner:
    """A runner that records its calls and fails when told to.

    Attributes:
      events: ("dispatch" | "fetch", step id), in order.
      rows: by step, (start, end) of the tokens that every row computes.
      faults: what the next call of "dispatch" or "fetch" raises, once.
    """

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.events: list[tuple[str, int]] = []
        self.rows: list[list[tuple[int, int]]] = []
        self.plans: list[StepPlan] = []
        self.num_resets = 0
        self.faults: dict[str, Fault] = {}

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

    def dispatch(self, plan: StepPlan) -> tuple[int, Any]:
        self._raise_fault("dispatch")
        self.events.append(("dispatch", plan.step_id))
        num_rows = int(plan.num_rows[0])
        q_lens = (plan.cu_q_lens[1 : num_rows + 1] - plan.cu_q_lens[:num_rows]).tolist()
        kv_lens = plan.kv_lens[:num_rows].tolist()
        self.rows.append([(kv - q, kv) for q, kv in zip(q_lens, kv_lens, strict=True)])
        self.plans.append(plan)
        return plan.step_id, self.inner.dispatch(plan)

    def fetch(self, handle: tuple[int, Any]) -> StepResult:
        self._raise_fault("fetch")
        step_id, inner_handle = handle
        self.events.append(("fetch", step_id))
        return self.inner.fetch(inner_handle)

    def _raise_fault(self, where: str) -> None:
        fault = self.faults.pop(where, None)
        if fault is not None:
            raise fault()


class ObservedStore:
    """A history store that records commits and fails when told to.

    Attributes:
      commits: the turns of every commit that was done.
      faults: what the next "commit" raises before, or "committed" after the turns were written, once.
    """

    def __init__(self, inner: HistoryStore) -> None:
        self.inner = inner
        self.commits: list[list[Turn]] = []
        self.faults: dict[str, Fault] = {}

    def conversations(self) -> list[ConversationInfo]:
        return self.inner.conversations()

    def load(self, conversation_id: str) -> ConversationRecord:
        return self.inner.load(conversation_id)

    def commit(self, turns: Sequence[Turn]) -> None:
        self._raise_fault("commit")
        self.inner.commit(turns)
        self.commits.append(list(turns))
        self._raise_fault("committed")

    def truncate(self, conversation_id: str, num_tokens: int) -> int:
        return self.inner.truncate(conversation_id, num_tokens)

    def delete(self, conversation_id: str) -> None:
        self.inner.delete(conversation_id)

    def close(self) -> None:
        self.inner.close()

    def _raise_fault(self, where: str) -> None:
        fault = self.faults.pop(where, None)
        if fault is not None:
            raise fault()
