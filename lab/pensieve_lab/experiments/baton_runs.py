"""Runs of Baton's two sets of queries in virtual time, with the costs of a model on an H200.

Owns: the memory of each method, and what is recorded of a run.
Does not know: tables or figures.
Called by `baton_tables` and `baton_curves`.

The paper's machines had 48 GB and 24 GB; weights left some 34 and 10 for the KV cache. A small
version has shorter sequences and proportionally less memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from tqdm import tqdm

from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_lab.experiments.settings import Settings
from pensieve_lab.rebatching import loads, methods
from pensieve_lab.rebatching.costs import RingCosts
from pensieve_lab.rebatching.simulation import RebatchingResult, simulate

PROFILE = "h200_llama2-7b"
_SMALL_SCALE = {"table 1": 1 / 16, "table 2": 1 / 4}
_KV_BYTES = {"table 1": 34_000_000_000, "table 2": 10_000_000_000}
_HOST_BYTES = 64_000_000_000
UNITS = {
    "seconds": "from the first arrival to the last answer, virtual",
    "steps": "of the batch, those in which a prompt runs included",
    "device_s": "that the device computed",
    "prefills": "programs of prompts beside steps",
    "idle_row_share": "rows of the batch that computed no token of a query, of all rows of all steps",
    "kv_bytes": "the most that ring and rows beside it took of device memory",
}


class Job(NamedTuple):
    """A run.

    Attributes:
      table: set of queries.
      doubled: every sequence is twice as long.
      batch: rows of the batch.
      method: one of `methods.METHODS`.
      seed: of the load.
    """

    table: str
    doubled: bool
    batch: int
    method: str
    seed: int


@lru_cache(maxsize=1)
def costs() -> RingCosts:
    """Return the costs of launches."""
    return RingCosts.load(PROFILE)


def origin() -> str:
    """Return a description of the figures' source."""
    found = costs()
    return f"simulated with {found.source} costs of {found.model} on {found.device}"


def described_costs() -> dict[str, Any]:
    """Return the costs for documents."""
    return costs().as_document()


def load_of(job: Job, *, small: bool) -> loads.Load:
    """Return the queries of a job, which all arrive at the start."""
    scale = _SMALL_SCALE[job.table] if small else 1.0
    if job.table == "table 2":
        return loads.table2(job.seed, scale)
    return loads.table1(job.seed, scale, doubled=job.doubled)


def run(job: Job, *, small: bool, records: bool = False) -> RebatchingResult:
    """Serve the queries of a job."""
    load = load_of(job, small=small)
    base = RebatchingConfig(
        max_batch=job.batch,
        kv_bytes=int(_KV_BYTES[job.table] * (_SMALL_SCALE[job.table] if small else 1)),
        host_bytes=_HOST_BYTES,
        max_context_tokens=load.max_context_tokens,
    )
    config = methods.config_of(job.method, base)
    # Doubled prompts exceed the model's positions, so the model is assumed to have enough of them.
    return simulate(config, costs(), load.queries, max_positions=load.max_context_tokens, records=records)


def figures(job: Job, served: RebatchingResult) -> dict[str, Any]:
    """Return the job and its figures by the keys of `UNITS`."""
    metrics = served.metrics.as_dict()
    return {
        **job._asdict(),
        "seconds": served.completion_s,
        "steps": served.metrics.num_steps,
        "device_s": served.device_s,
        "prefills": served.metrics.num_prefills,
        "idle_row_share": metrics["idle_row_share"],
        "kv_bytes": served.metrics.max_kv_bytes,
    }


def shown(jobs: Iterable[Job], *, progress: bool) -> Iterable[Job]:
    """Return the jobs with a progress bar."""
    every: Sequence[Job] = list(jobs)
    return tqdm(every, "runs", disable=not progress, leave=False)


def jobs_of(table: str, doubled: bool, batch: int, names: Sequence[str], asked: Settings) -> list[Job]:
    """Return a job for every method and seed."""
    return [Job(table, doubled, batch, name, seed) for name in names for seed in asked.seeds]
