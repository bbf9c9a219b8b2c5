"""Demo of cellular batching in a minute: sentences join and leave running batches, cell by cell.

    python -m pensieve_lab.programs.demo_cells [--plot=cells.png]

A small Seq2Seq model with random weights translates sentences of different lengths that arrive while others
are being computed. The first picture has a line per sentence and a column per task: `e` if the task has its
encoder's cell, `d` for a decoder's, `.` while it waits. The second shows the same sentences padded to equal
lengths in batches of whole requests, as without cells. At the end each sentence is translated alone; the exit
status is 1 unless all words are the same.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from model_defs.recurrent import Seq2Seq
from pensieve_jax.cellular import CellRequest, CellularConfig, CellularEngine
from pensieve_jax.cellular.launches import Launch
from pensieve_jax.cellular.scheduler import CellScheduler
from pensieve_jax.commands.cost_plot import check_can_plot
from pensieve_jax.commands.engine_flags import shows_progress
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_lab.cells.baselines import Padding
from pensieve_lab.cells.pictures import draw_tasks

FLAGS = flags.FLAGS
_MAX_BATCH = 4
# Per sentence: the task before which it arrives, its words, and the words of its translation.
_SENTENCES = (
    *((0, 2, 3), (0, 3, 2), (0, 3, 5), (0, 6, 4), (2, 7, 6), (3, 3, 3), (3, 4, 2), (5, 1, 1)),
    *((9, 2, 6), (12, 5, 3), (14, 3, 3), (15, 2, 2)),
)
_VOCAB_SIZE, _FIRST_WORD = 60, 3


class SystemRun(NamedTuple):
    """Run of one system.

    Attributes:
      lines: lines of the picture, with a letter per task for each sentence.
      words: words of each translation.
      waited: tasks from each arrival to its end.
    """

    lines: list[str]
    words: list[tuple[int, ...]]
    waited: list[int]


class Stage:
    """Engine that runs one task at a time, so that time is the number of tasks."""

    def __init__(self, model: Seq2Seq, make_scheduler: Any) -> None:
        """Compile the engine's programs."""
        self._tasks: list[tuple[str, np.ndarray]] = []
        config = CellularConfig(num_rows=64, max_num_tasks=1, launches_in_flight=1)
        cells = [one._replace(max_batch=_MAX_BATCH, batch_sizes=(_MAX_BATCH,)) for one in model.cells()]
        self._model = model
        self.engine = CellularEngine(
            cells,
            model.unfold,
            config,
            make_scheduler=make_scheduler,
            observe=self._observe,
            progress=shows_progress(),
        )

    def _observe(self, launch: Launch) -> None:
        (serials,) = self.engine.requests_of(launch)
        self._tasks.append((launch.kind.name[0], serials))

    def serve(self, sentences: list[list[int]]) -> SystemRun:
        """Serve all sentences, each at its time."""
        handles: list[CellRequest] = []
        ends: dict[int, int] = {}
        self._tasks.clear()
        while len(ends) < len(sentences):
            due = [i for i, one in enumerate(_SENTENCES) if one[0] <= len(self._tasks) and i >= len(handles)]
            requests = [self._model.request(sentences[i], num_target_steps=_SENTENCES[i][2]) for i in due]
            handles += self.engine.submit_many(requests)
            self.engine.wait()
            num_run = len(self._tasks)
            ends.update((handle.serial, num_run) for handle in self.engine.step())
        begins = [begin for begin, *_ in _SENTENCES]
        spans = [(begin, ends[handle.serial]) for begin, handle in zip(begins, handles, strict=True)]
        lines = [
            _line(self._tasks, handle.serial, *span) for handle, span in zip(handles, spans, strict=True)
        ]
        return SystemRun(
            lines, [one.result().tokens for one in handles], [end - begin for begin, end in spans]
        )


def _line(tasks: list[tuple[str, np.ndarray]], serial: int, begin: int, end: int) -> str:
    letters = [name if serial in serials else "." for name, serials in tasks]
    return "".join(" " if not begin <= task < end else letter for task, letter in enumerate(letters)).rstrip()


def show(title: str, run: SystemRun) -> None:
    """Print the picture, and the answers' delays."""
    print(f"\n{title}")
    for number, ((_, source, target), line) in enumerate(zip(_SENTENCES, run.lines, strict=True), start=1):
        print(f"{number:>3} ({source} + {target})  {line}")
    num_tasks = max(map(len, run.lines))
    mean = sum(run.waited) / len(run.waited)
    print(f"{num_tasks} tasks; an answer {mean:.1f} tasks after its sentence, the longest {max(run.waited)}")


def main() -> int:
    if FLAGS.plot is not None:
        check_can_plot("--plot", Path(FLAGS.plot))
    rng = np.random.default_rng(0)
    model = Seq2Seq.random(hidden_size=64, vocab_size=_VOCAB_SIZE, seed=0)
    sentences = [rng.integers(_FIRST_WORD, _VOCAB_SIZE, words).tolist() for _, words, _ in _SENTENCES]
    cellular = Stage(model, CellScheduler)
    unpadded = cellular.serve(sentences)
    show("cell by cell: words of the sentence + of its translation, and a column for each task", unpadded)
    padded = Stage(model, functools.partial(Padding, width=100, oldest_first=True)).serve(sentences)
    show("the same in batches of whole sentences, padded to the longest", padded)
    alone = [
        cellular.engine.run([model.request(words, num_target_steps=target)])[0].tokens
        for words, (*_, target) in zip(sentences, _SENTENCES, strict=True)
    ]
    num_equal = sum(a == b == c for a, b, c in zip(unpadded.words, padded.words, alone, strict=True))
    print(f"\n{num_equal} of {len(alone)} translations equal those of the sentence alone")
    if FLAGS.plot is not None:
        draw_tasks({"cell by cell": unpadded.lines, "padded": padded.lines}, Path(FLAGS.plot))
    return 0 if num_equal == len(alone) else EXIT_FAILED


def define_flags() -> None:
    flags.DEFINE_string("plot", None, "PNG file for both pictures.")
    flags.DEFINE_boolean("progress", None, "Show progress bars. Default: on a terminal.")


if __name__ == "__main__":
    define_flags()
    run(main)
