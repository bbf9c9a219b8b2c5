"""Reproduces one figure of a paper: simulated on a device profile, or from committed measurements.

    python -m pensieve_lab.programs.reproduce --experiment=fig10b --plot=fig10b.png
    python -m pensieve_lab.programs.reproduce --experiment=traces --traces=mooncake:conversation_trace.jsonl

Experiments: fig3 and fig4 (single steps), fig10a to fig10d, fig11, fig13 and thesis3.15 (latency over
throughput), fig11-measured and fig12 (open loops, the kernel: from committed measurements), fig14 (eviction
policies), fig15 (think times; the thesis's 3.16 too), fig10b-long (10b after a longer warm-up), thesis3.10
(the conversations themselves; 3.11 too), and traces and oracle, which compare eviction policies on your
recorded traces, with each other and with one that knows the future. Scheduler, cache and policies are the
engine's own under a virtual clock. A step and a copy take the time in the profile of `--device`: `a100` is
the paper's machine, from published figures of the hardware, and `h200` is based on measurements. Every point
is simulated once per seed of `--seeds`, `--num_processes` at a time, and stored in `--keep` if that is given;
the same seeds give the same figures. `--small` is a version on little memory that takes seconds. A flag that
does not affect an experiment, such as seeds without a simulated workload, is refused. Tables come first, then
one JSON document (see `--json`) as the last line.

Of BatchMaker, the thesis's chapter 2: cells2.3 (a step by batch size), cells2.5 (which request is in which
task), cells2.7, cells2.8 and cells2.11 (LSTM), cells2.9 (queueing), cells2.10 (lengths), cells2.13 (Seq2Seq
on several devices), cells2.14 and cells2.15 (trees). All run under the same virtual clock with the cell times
of the thesis's V100, and 2.3 also shows committed measurements. Figures 2.4, 2.6 and 2.12 are drawings.

Of Baton: baton-table1 and baton-table2 (duration of its methods in steps and seconds), baton6, baton7
and baton8 (queries, tokens and KV cache over time), with the engine's own loop and the costs of
Llama-2-7B on an H200.

`lab/docs/paper_and_we.md` has the results beside the paper's, and `programs.refresh_pages` writes its tables.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from absl import flags

from pensieve_jax import ConfigError
from pensieve_jax.commands.cost_plot import check_can_plot
from pensieve_jax.commands.engine_flags import shows_progress
from pensieve_jax.commands.help import require
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import (
    define_document_flag,
    json_line,
    print_document,
    table,
)
from pensieve_lab.common.list_flags import seeds
from pensieve_lab.experiments.machines import DEVICES, load_profile
from pensieve_lab.experiments.panels import draw_panels
from pensieve_lab.experiments.pool import measure_all
from pensieve_lab.experiments.registry import EXPERIMENTS
from pensieve_lab.experiments.settings import Experiment, Findings, Settings, TraceFile

FLAGS = flags.FLAGS


_FLAGS_OF_SOME = ("device", "seeds", "small", "traces", "num_processes", "keep")
_KEPT = ("seeds", "small")  # recorded in the document if the experiment uses them


def settings(experiment: Experiment) -> Settings:
    """Parse the flags; raises ConfigError, also for flags that the experiment does not use."""
    for name in _FLAGS_OF_SOME:
        if FLAGS[name].present and name not in experiment.flags:
            value = FLAGS[name].value
            shown = ",".join(value) if isinstance(value, list) else value
            limit = f"left out: --experiment={experiment.name} does not use it"
            raise ConfigError(f"--{name}", shown, limit)
    return Settings(
        device=FLAGS.device,
        seeds=seeds("--seeds", FLAGS.seeds),
        small=FLAGS.small,
        traces=_traces(),
    )


def _traces() -> tuple[TraceFile, ...]:
    found = []
    for word in FLAGS.traces:
        format, colon, name = word.partition(":")
        if not colon or not Path(name).exists():
            raise ConfigError("--traces", word, "FORMAT:FILE with a file that exists")
        found.append(TraceFile(Path(name), format))
    return tuple(found)


def report(experiment: Experiment, asked: Settings, findings: Findings) -> None:
    """Print the tables, draw the plot, and print the JSON line."""
    for one in findings.tables:
        print(f"{one.title}\n{table(one.columns, one.rows)}", end="\n\n")
    print(f"The paper: {experiment.paper}")
    origin = _origin(findings, small=asked.small)
    print(f"{experiment.name}, {experiment.title}: {origin}")
    if FLAGS.plot is not None:
        draw_panels(findings.panels, f"{experiment.title}: {origin}", Path(FLAGS.plot))
    document = {
        "experiment": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "simulated": findings.is_simulated or bool(findings.profiles),
        "profiles": _profiles(findings, asked),
        **{name: getattr(asked, name) for name in _KEPT if name in experiment.flags},
        **findings.results,
    }
    print_document(json_line("reproduction", document, units=findings.units, device=origin))


def _origin(findings: Findings, *, small: bool) -> str:
    """Describe the figure's origin, for readers who see only the figure."""
    version = ", a small version" if small else ""
    if not findings.profiles:
        return f"{findings.origin}{version}"
    return f"simulated on {', '.join(dict.fromkeys(findings.profiles))}{version}"


def _profiles(findings: Findings, asked: Settings) -> dict[str, Any]:
    """Return the origin of the times of steps and copies."""
    found = {}
    for name in findings.profiles:
        profile = load_profile(asked.device, name.partition("_")[2])
        found[name] = {
            "model": profile.model,
            "device": profile.device,
            "source": profile.source,
            "provenance": profile.provenance,
        }
    return found


def main() -> int:
    experiment = EXPERIMENTS[FLAGS.experiment]
    asked = settings(experiment)
    if FLAGS.num_processes < 1:
        raise ConfigError("--num_processes", FLAGS.num_processes, "at least 1")
    if FLAGS.plot is not None:
        check_can_plot("--plot", Path(FLAGS.plot))
    keep = _keep()
    if "small" in experiment.flags and not FLAGS.small and FLAGS.progress is not False:
        # Not every experiment has points for a bar to count.
        print(f"{experiment.name}: this may take minutes; --small takes seconds", file=sys.stderr)
    measured = measure_all(
        experiment.points(asked),
        num_processes=FLAGS.num_processes,
        keep=keep,
        title=experiment.name,
        shown=shows_progress(),
    )
    report(experiment, asked, experiment.findings(asked, measured))
    return 0


def _keep() -> Path | None:
    if FLAGS.keep is None:
        return None
    directory = Path(FLAGS.keep)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        limit = "a directory, which is made if it is missing"
        raise ConfigError("--keep", FLAGS.keep, limit, error.strerror or str(error)) from error
    return directory


def define_flags() -> None:
    flags.DEFINE_enum("experiment", None, list(EXPERIMENTS), "Figure to reproduce.")
    require("experiment")
    flags.DEFINE_enum("device", "a100", list(DEVICES), "Device whose profiles are simulated.")
    flags.DEFINE_list(
        "seeds", ["0", "1", "2", "3", "4"], "Seeds of workloads; every point is simulated for each."
    )
    flags.DEFINE_bool("small", False, "Run a version that takes seconds, on little memory.")
    flags.DEFINE_integer("num_processes", os.cpu_count() or 1, "Number of points simulated at a time.")
    flags.DEFINE_string(
        "keep",
        None,
        "Directory for the figures of points: an interrupted run resumes where it stopped. "
        "A point counts as done if trace, code and libraries are the same.",
    )
    flags.DEFINE_list("traces", [], "Recorded traces for --experiment=traces and oracle: FORMAT:FILE, ...")
    flags.DEFINE_string("plot", None, "File for the figure, e.g. fig10b.png; needs matplotlib.")
    flags.DEFINE_bool("progress", None, "Show a progress bar; default: on a terminal.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
