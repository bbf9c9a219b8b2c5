"""Restart schedules: a history file, and processes that generate into it until each is killed.

Owns the times of kills, the kills, and the checks of the file after each run. Does not know a model: the
caller, which has a reference, checks tokens. Called by `tests/test_kill.py`.

One thread serves all pipes; it waits on them, never for a fixed time.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pensieve_jax.history import SQLiteHistoryStore, TurnRecord
from pensieve_jax.history.lock import FileLock
from tests.kill import process
from tests.kill.process import Report, Task
from tests.kill.script import Script, TurnKey

SILENCE_LIMIT_S = 600.0  # a process that is silent for longer hangs
# "opened": compiling follows, the longest part of a start.
_MARKS = ("opened", *("step",) * 3, "committing", "halted", *("reported",) * 2, "closing")
NUM_MOMENTS = 1 + len(_MARKS)
_HISTORY_SUFFIXES = ("", "-wal", "-journal")  # read by recovery; "-shm" is rebuilt


class Moment(NamedTuple):
    """A kill `delay_s` after the `nth` mark of that name."""

    mark: str
    nth: int
    delay_s: float


def random_moments(rng: np.random.Generator) -> list[Moment]:
    """Draw `NUM_MOMENTS`: one while the file is created, then in random order over the run of a process."""
    moments = [_moment(rng, mark) for mark in _MARKS]
    return [_moment(rng, "opening"), *(moments[i] for i in rng.permutation(len(moments)))]


def _moment(rng: np.random.Generator, mark: str) -> Moment:
    """Draw the mark's occurrence, and the fraction of the following time that still passes."""
    # A process halts once; `RestartSchedule.start` tells it where.
    max_count = {"step": 60, "committing": 10, "reported": 10}.get(mark, 1)
    max_delay_s = {"opening": 0.002, "opened": 1.0, "step": 0.004, "closing": 0.002}.get(mark, 0.0)
    return Moment(mark, int(rng.integers(1, max_count, endpoint=True)), rng.uniform(0, max_delay_s))


@dataclass
class ProcessRun:
    """One process, from its start to its end, as its parent saw it.

    Attributes:
        unfinished: turns that were submitted and not reported.
        announced: groups of turns whose commit had begun; each was one step's.
        committed: turns that are in the history afterwards and were not before.
    """

    moment: Moment | None
    marks: list[str] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    unfinished: set[TurnKey] = field(default_factory=set)
    announced: list[list[TurnKey]] = field(default_factory=list)
    committed: set[TurnKey] = field(default_factory=set)

    def take(self, mark: Sequence[Any]) -> None:
        """Record a mark of the process."""
        name = mark[0]
        self.marks.append(name)
        if name == "reported":
            self.reports.append(mark[1])
            self.unfinished.remove(mark[1].key)
        elif name == "submitted":
            self.unfinished.update(mark[1])
        elif name == "committing":
            self.announced.append(mark[1])

    def is_at_commit(self) -> bool:
        """Whether a commit has begun, and not all of its turns were reported."""
        reported = {report.key for report in self.reports}
        return bool(self.announced) and not reported.issuperset(self.announced[-1])


class RestartSchedule:
    """Consecutive processes on one history file.

    Attributes:
        runs: of the processes so far.
        turns: content of the history, all of it checked against the script and the reports.
    """

    def __init__(
        self,
        context: ForkServerContext,
        path: Path,
        compilation_cache_dir: Path,
        fingerprint: str,
        *,
        seed: int,
    ) -> None:
        """Create it without a file or a process. One process more than is killed runs to its own end."""
        self.script = Script(seed)
        self.runs: list[ProcessRun] = []
        self.turns: dict[TurnKey, TurnRecord] = {}
        self._context = context
        self._path = path
        self._compilation_cache_dir = compilation_cache_dir
        self._fingerprint = fingerprint
        self._rng = np.random.default_rng(seed)
        self._moments: list[Moment | None] = [*random_moments(self._rng), None]
        self._process: BaseProcess | None = None
        self.pipe: Connection | None = None
        self.kill_at_s: float | None = None  # on the monotonic clock

    def start(self) -> bool:
        """Start the next process; return False after the last one."""
        if len(self.runs) == len(self._moments):
            return False
        moment = self._moments[len(self.runs)]
        self.runs.append(ProcessRun(moment))
        if moment is None:
            how = "once"
        elif moment.mark == "closing":
            how = "close"
        else:
            how = "generate" if len(self.runs) % 3 == 0 else "step"
        halts = moment is not None and moment.mark == "halted"
        row = int(self._rng.integers(1, 15, endpoint=True)) if halts else None
        task = Task(str(self._path), str(self._compilation_cache_dir), self.script, how, row)
        self._process, self.pipe = start_process(self._context, task)
        return True

    def take(self) -> bool:
        """Read one mark; return False if the process is dead and was checked."""
        assert self.pipe is not None
        run = self.runs[-1]
        try:
            mark = self.pipe.recv()
        except EOFError:
            self._reap()
            return False
        run.take(mark)
        moment = run.moment
        is_moment = moment is not None and (mark[0], run.marks.count(mark[0])) == moment[:2]
        if moment is not None and is_moment:
            self.kill_at_s = time.monotonic() + moment.delay_s
        return True

    def kill_if_due(self) -> None:
        """Send SIGKILL once, when it is due."""
        if self.kill_at_s is not None and time.monotonic() >= self.kill_at_s:
            self.kill_at_s = None
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL if a process is alive; what it had written is still read."""
        if self._process is not None:
            self._process.kill()

    def _reap(self) -> None:
        assert self._process is not None and self.pipe is not None
        self.pipe.close()
        self._process.join()  # reaped: no zombie stays
        exit_code, run = self._process.exitcode, self.runs[-1]
        self._process.close()
        self._process = self.pipe = self.kill_at_s = None
        expected = 0 if run.moment is None else -signal.SIGKILL
        assert exit_code == expected, f"exit status {exit_code} after {run.marks[-3:]}; see stderr"
        self._check(run)

    def _check(self, run: ProcessRun) -> None:
        """Check the file after a run: all reported turns, whole steps, and nothing else."""
        FileLock(self._path).release()  # raises if a process still held it
        before, self.turns = self.turns, self._read()
        assert before.items() <= self.turns.items(), "an earlier turn is gone or another one"
        self.script.check_prefix(self.turns)
        run.committed = self.turns.keys() - before.keys()
        for report in run.reports:
            stored = self.turns.get(report.key)
            assert stored is not None, f"{report.key} was reported and is gone"
            assert (stored.output_token_ids, stored.seed) == (report.token_ids, report.seed), report.key
        for key in run.committed:
            stored, scripted = self.turns[key], self.script.turn(key)
            assert stored.prompt_token_ids == scripted.prompt_ids, f"{key} has another prompt"
            assert len(stored.output_token_ids) == scripted.params.max_tokens, f"{key} is half a turn"
            assert scripted.params.seed in (None, stored.seed), f"{key} has another seed"
        for group in run.announced[:-1]:
            assert run.committed.issuperset(group), f"a step was lost before a later one: {group}"
        if run.announced:  # the last commit may have happened or not, but as a whole
            last = run.announced[-1]
            possible = (0,) if "halted" in run.marks else (0, len(last))
            assert len(run.committed.intersection(last)) in possible, f"{last} is there in part"
        assert run.committed <= {key for group in run.announced for key in group}

    def _read(self) -> dict[TurnKey, TurnRecord]:
        """Read all turns of the history; half the time from a copy, so the next process recovers the file."""
        path = self._path
        if self._rng.random() < 0.5:
            path = path.with_name("copy.sqlite")
            for suffix in _HISTORY_SUFFIXES:
                source, target = (at.with_name(at.name + suffix) for at in (self._path, path))
                target.unlink(missing_ok=True)
                if source.exists():
                    shutil.copy(source, target)
        with SQLiteHistoryStore(path, fingerprint=self._fingerprint) as store:
            records = [store.load(info.conversation_id) for info in store.conversations()]
        return {
            TurnKey(turn.conversation_id, turn.turn_index): turn
            for record in records
            for turn in record.turns
        }


def start_process(context: ForkServerContext, task: Task) -> tuple[BaseProcess, Connection]:
    """A process and the pipe that it tells its marks into."""
    reader, writer = context.Pipe(duplex=False)
    started = context.Process(target=process.run, args=(task, writer), daemon=True)
    started.start()
    writer.close()  # the process has the only other end: the pipe closes when it dies
    return started, reader


def run_schedules(schedules: Sequence[RestartSchedule], *, num_at_once: int) -> None:
    """Run all schedules to their ends, `num_at_once` processes at a time."""
    to_come = iter(schedules)
    running = _start(to_come, num_at_once)
    try:
        while running:
            for schedule in _ready(running):
                if not schedule.take() and not schedule.start():
                    running.remove(schedule)
                    running += _start(to_come, 1)
            for schedule in running:
                schedule.kill_if_due()
    finally:
        for schedule in running:
            schedule.kill()


def _start(schedules: Iterator[RestartSchedule], count: int) -> list[RestartSchedule]:
    return [schedule for schedule in itertools.islice(schedules, count) if schedule.start()]


def _ready(running: Sequence[RestartSchedule]) -> list[RestartSchedule]:
    """Return those whose process has sent a mark or died, or whose kill is due."""
    now_s = time.monotonic()
    due_s = [schedule.kill_at_s for schedule in running if schedule.kill_at_s is not None]
    timeout_s = max(min(due_s) - now_s, 0.0) if due_s else SILENCE_LIMIT_S
    pipes = wait([schedule.pipe for schedule in running if schedule.pipe is not None], timeout_s)
    assert pipes or due_s, f"no word for {SILENCE_LIMIT_S} seconds"
    return [schedule for schedule in running if schedule.pipe in pipes]
