"""Restart schedules: a history file, and processes that generate into it until each is killed.

Owns the times of kills, the kills, and the checks of the file after each death. Does not know a model: the
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

SILENCE_LIMIT_S = 120.0  # a process that is silent for longer hangs
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
    """Draw `NUM_MOMENTS`: one while the file is created, then in random order over the life of a process."""
    moments = [_moment(rng, mark) for mark in _MARKS]
    return [_moment(rng, "opening"), *(moments[i] for i in rng.permutation(len(moments)))]


def _moment(rng: np.random.Generator, mark: str) -> Moment:
    """Draw the mark's occurrence, and the fraction of the following time that still passes."""
    # A process halts once; `Life.start` tells it where.
    max_count = {"step": 60, "committing": 10, "reported": 10}.get(mark, 1)
    max_delay_s = {"opening": 0.002, "opened": 1.0, "step": 0.004, "closing": 0.002}.get(mark, 0.0)
    return Moment(mark, int(rng.integers(1, max_count, endpoint=True)), rng.uniform(0, max_delay_s))


@dataclass
class Death:
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


class Life:
    """Consecutive processes on one history file.

    Attributes:
        deaths: of the processes so far.
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
        self.deaths: list[Death] = []
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
        if len(self.deaths) == len(self._moments):
            return False
        moment = self._moments[len(self.deaths)]
        self.deaths.append(Death(moment))
        if moment is None:
            how = "once"
        elif moment.mark == "closing":
            how = "close"
        else:
            how = "generate" if len(self.deaths) % 3 == 0 else "step"
        halts = moment is not None and moment.mark == "halted"
        row = int(self._rng.integers(1, 15, endpoint=True)) if halts else None
        task = Task(str(self._path), str(self._compilation_cache_dir), self.script, how, row)
        self._process, self.pipe = start_process(self._context, task)
        return True

    def take(self) -> bool:
        """Read one mark; return False if the process is dead and was checked."""
        assert self.pipe is not None
        death = self.deaths[-1]
        try:
            mark = self.pipe.recv()
        except EOFError:
            self._reap()
            return False
        death.take(mark)
        moment = death.moment
        is_moment = moment is not None and (mark[0], death.marks.count(mark[0])) == moment[:2]
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
        exit_code, death = self._process.exitcode, self.deaths[-1]
        self._process.close()
        self._process = self.pipe = self.kill_at_s = None
        expected = 0 if death.moment is None else -signal.SIGKILL
        assert exit_code == expected, f"exit status {exit_code} after {death.marks[-3:]}; see stderr"
        self._check(death)

    def _check(self, death: Death) -> None:
        """Check the file after a death: all reported turns, whole steps, and nothing else."""
        FileLock(self._path).release()  # raises if a process still held it
        before, self.turns = self.turns, self._read()
        assert before.items() <= self.turns.items(), "an earlier turn is gone or another one"
        self.script.check_prefix(self.turns)
        death.committed = self.turns.keys() - before.keys()
        for report in death.reports:
            stored = self.turns.get(report.key)
            assert stored is not None, f"{report.key} was reported and is gone"
            assert (stored.output_token_ids, stored.seed) == (report.token_ids, report.seed), report.key
        for key in death.committed:
            stored, scripted = self.turns[key], self.script.turn(key)
            assert stored.prompt_token_ids == scripted.prompt_ids, f"{key} has another prompt"
            assert len(stored.output_token_ids) == scripted.params.max_tokens, f"{key} is half a turn"
            assert scripted.params.seed in (None, stored.seed), f"{key} has another seed"
        for group in death.announced[:-1]:
            assert death.committed.issuperset(group), f"a step was lost before a later one: {group}"
        if death.announced:  # the last commit may have happened or not, but as a whole
            last = death.announced[-1]
            possible = (0,) if "halted" in death.marks else (0, len(last))
            assert len(death.committed.intersection(last)) in possible, f"{last} is there in part"
        assert death.committed <= {key for group in death.announced for key in group}

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


def live(lives: Sequence[Life], *, num_at_once: int) -> None:
    """Run all schedules to their ends, `num_at_once` processes at a time."""
    to_come = iter(lives)
    running = _start(to_come, num_at_once)
    try:
        while running:
            for life in _ready(running):
                if not life.take() and not life.start():
                    running.remove(life)
                    running += _start(to_come, 1)
            for life in running:
                life.kill_if_due()
    finally:
        for life in running:
            life.kill()


def _start(lives: Iterator[Life], count: int) -> list[Life]:
    return [life for life in itertools.islice(lives, count) if life.start()]


def _ready(running: Sequence[Life]) -> list[Life]:
    """Return those whose process has sent a mark or died, or whose kill is due."""
    now_s = time.monotonic()
    due_s = [life.kill_at_s for life in running if life.kill_at_s is not None]
    timeout_s = max(min(due_s) - now_s, 0.0) if due_s else SILENCE_LIMIT_S
    pipes = wait([life.pipe for life in running if life.pipe is not None], timeout_s)
    assert pipes or due_s, f"no word for {SILENCE_LIMIT_S} seconds"
    return [life for life in running if life.pipe in pipes]
