"""Tables 1 and 2 of Baton: the methods' steps and seconds, with the paper's numbers.

Owns: what is compared.
Does not know: how a run is made.
Called by `experiments.baton`.

Seconds are from another device than the paper's, so methods are compared by ratios. The ratio of steps shows
what the policy saves; the rest of a ratio of seconds is due to prefills, padding and longer rings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pensieve_jax.commands.engine_flags import shows_progress
from pensieve_lab.experiments import baton_runs
from pensieve_lab.experiments.claims import all_claims
from pensieve_lab.experiments.panels import Panel
from pensieve_lab.experiments.seeds import Spread, spread
from pensieve_lab.experiments.settings import Findings, Settings, Table
from pensieve_lab.rebatching.methods import BATON, BATON_PD, BENCHMARK, OF_THE_TABLES, PD

_IN_CLAIMS = {BENCHMARK: "benchmark", PD: "pd", BATON: "baton", BATON_PD: "baton-pd"}
_ROWS_OF_TABLE1 = {4: True, 8: False}
"""Maps the batch size to whether sequences are doubled."""
_BATCHES_OF_TABLE2 = (2, 4, 6, 8, 10)
_METHODS_OF_TABLE2 = (BENCHMARK, BATON, BATON_PD)

type Runs = Mapping[tuple[int, str], Sequence[Mapping[str, Any]]]


def table1(asked: Settings, _: object) -> Findings:
    """Compare four methods on the set with long queries."""
    jobs = [
        job
        for batch, doubled in _ROWS_OF_TABLE1.items()
        for job in baton_runs.jobs_of("table 1", doubled, batch, OF_THE_TABLES, asked)
    ]
    rows, runs = _measure(jobs, asked)
    lines = [
        [
            f"{batch}{', doubled' if doubled else ''}",
            name,
            round(_mean(runs[batch, name], "steps")),
            f"{_mean(runs[batch, name], 'seconds'):.1f}",
            round(_claim(f"baton-table1-{_IN_CLAIMS[name]}-{batch}")),
            f"{100 * _mean(runs[batch, name], 'idle_row_share'):.1f}",
        ]
        for batch, doubled in _ROWS_OF_TABLE1.items()
        for name in OF_THE_TABLES
    ]
    return Findings(
        tables=[
            Table(
                title="Table 1: completion of 120 queries",
                columns=["batch", "method", "steps", "seconds", "paper, s", "idle rows, %"],
                rows=lines,
            ),
            _gains_of_table1(runs),
        ],
        panels=[
            Panel(
                title=title,
                x_label="batch size",
                y_label=f"{what}, Benchmark over method",
                curves={
                    name: [
                        (batch, _ratio(runs, batch, BENCHMARK, name, key).mean) for batch in _ROWS_OF_TABLE1
                    ]
                    for name in OF_THE_TABLES
                }
                | {
                    f"{name}, the paper": [
                        (batch, _paper_ratio(1, batch, BENCHMARK, name)) for batch in _ROWS_OF_TABLE1
                    ]
                    for name in (BATON, BATON_PD)
                },
                dashed=frozenset({f"{BATON}, the paper", f"{BATON_PD}, the paper"}),
                log_x=True,
            )
            for title, what, key in (("by steps", "steps", "steps"), ("by time", "seconds", "seconds"))
        ],
        **_common(rows),
    )


def _gains_of_table1(runs: Runs) -> Table:
    """Return the table of Baton-PD against each of the others."""
    lines = []
    for batch in _ROWS_OF_TABLE1:
        for name in (BENCHMARK, PD, BATON):
            less = f"baton-table1-less-{_IN_CLAIMS[name]}-{batch}"
            said = _claim(f"baton-table1-gain-{batch}") if name == BATON else None
            lines.append(
                [
                    batch,
                    name,
                    str(_ratio(runs, batch, name, BATON_PD, "steps")),
                    str(_ratio(runs, batch, name, BATON_PD, "seconds")),
                    f"{said or _paper_ratio(1, batch, name, BATON_PD):.2f}",
                    f"{_saved(runs, batch, name):.1f}",
                    "" if name == BATON else f"{_claim(less):.2f}",
                ]
            )
    columns = ["batch", "Baton-PD over", "x in steps", "x in time", "paper, x", "% less time", "paper, %"]
    return Table(title="Baton-PD against the others", columns=columns, rows=lines)


def table2(asked: Settings, _: object) -> Findings:
    """Compare Benchmark, Baton and Baton-PD on the set of short queries."""
    jobs = [
        job
        for batch in _BATCHES_OF_TABLE2
        for job in baton_runs.jobs_of("table 2", False, batch, _METHODS_OF_TABLE2, asked)
    ]
    rows, runs = _measure(jobs, asked)
    times = [
        [
            batch,
            *(round(_mean(runs[batch, name], "steps")) for name in _METHODS_OF_TABLE2),
            *(f"{_mean(runs[batch, name], 'seconds'):.2f}" for name in _METHODS_OF_TABLE2),
            *(f"{_claim(f'baton-table2-{_IN_CLAIMS[name]}-{batch}'):.2f}" for name in (BENCHMARK, BATON)),
        ]
        for batch in _BATCHES_OF_TABLE2
    ]
    gains = [
        [
            batch,
            *(
                str(_ratio(runs, batch, BENCHMARK, name, key))
                for key in ("steps", "seconds")
                for name in (BATON, BATON_PD)
            ),
            f"{_claim(f'baton-table2-gain-{batch}'):.2f}",
        ]
        for batch in _BATCHES_OF_TABLE2
    ]
    columns = [
        "batch",
        *(f"{name}, {what}" for what in ("steps", "s") for name in _METHODS_OF_TABLE2),
        "Benchmark, paper, s",
        "Baton, paper, s",
    ]
    over = [f"{name} by {what}, x" for what in ("steps", "time") for name in (BATON, BATON_PD)]
    return Findings(
        tables=[
            Table(title="Table 2: completion of 30 short queries", columns=columns, rows=times),
            Table(
                title="Benchmark over Baton: what a method saves",
                columns=["batch", *over, "paper, x"],
                rows=gains,
            ),
        ],
        panels=[_gains_panel(runs)],
        **_common(rows),
    )


def _gains_panel(runs: Runs) -> Panel:
    """Return the gains of the methods over the batch size, with the paper's."""
    curves = {
        f"{name} by {what}": [
            (batch, _ratio(runs, batch, BENCHMARK, name, key).mean) for batch in _BATCHES_OF_TABLE2
        ]
        for what, key in (("steps", "steps"), ("time", "seconds"))
        for name in (BATON, BATON_PD)
    }
    paper = [(batch, _claim(f"baton-table2-gain-{batch}")) for batch in _BATCHES_OF_TABLE2]
    return Panel(
        title="Benchmark over Baton",
        x_label="batch size",
        y_label="Benchmark over method",
        curves=curves | {"the paper": paper},
        dashed=frozenset({"the paper"}),
    )


def _measure(jobs: Sequence[baton_runs.Job], asked: Settings) -> tuple[list[dict[str, Any]], Runs]:
    rows: list[dict[str, Any]] = []
    runs: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for job in baton_runs.shown(jobs, progress=shows_progress()):
        row = baton_runs.figures(job, baton_runs.run(job, small=asked.small))
        rows.append(row)
        runs.setdefault((job.batch, job.method), []).append(row)
    return rows, runs


def _common(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "results": {"points": rows, "costs": baton_runs.described_costs()},
        "origin": baton_runs.origin(),
        "is_simulated": True,
        "units": baton_runs.UNITS,
    }


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the mean over seeds."""
    mean: float = sum(row[key] for row in rows) / len(rows)
    return mean


def _ratio(runs: Runs, batch: int, over: str, name: str, key: str) -> Spread:
    """Return the ratio of `over` to `name`, seed by seed."""
    pairs = zip(runs[batch, over], runs[batch, name], strict=True)
    found = spread([one[key] / other[key] for one, other in pairs])
    assert found is not None
    return found


def _saved(runs: Runs, batch: int, name: str) -> float:
    """Return the percentage of a method's time that Baton-PD saves."""
    pairs = zip(runs[batch, name], runs[batch, BATON_PD], strict=True)
    saved = [1 - other["seconds"] / one["seconds"] for one, other in pairs]
    return 100 * sum(saved) / len(saved)


def _claim(name: str) -> float:
    return {claim.id: claim.value for claim in all_claims()}[name]


def _paper_ratio(table: int, batch: int, over: str, name: str) -> float:
    ids = [f"baton-table{table}-{_IN_CLAIMS[one]}-{batch}" for one in (over, name)]
    return _claim(ids[0]) / _claim(ids[1])
