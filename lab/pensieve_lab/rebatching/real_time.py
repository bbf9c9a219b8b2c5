"""Serves a load on an engine of padded batches in real time.

Owns: when queries are sent, what is recorded of each query and step, and the figures' names.
Does not know: methods, flags, or which figures are compared.

One thread submits and steps, as in a server. Latency counts from when a query was due, so a late loop is
charged for its delay. Only their lengths end replies.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pensieve_jax import SamplingParams
from pensieve_jax.core.errors import PensieveError
from pensieve_jax.rebatching import Query, RebatchingConfig, RebatchingEngine
from pensieve_jax.rebatching.device.runner import DeviceRunner
from pensieve_jax.rebatching.launches import Decode, Prefill, Shape
from pensieve_jax.rebatching.metrics import StepSeen
from pensieve_lab.rebatching import relayouts
from pensieve_lab.rebatching.loads import Load
from pensieve_lab.rebatching.relayouts import Relayouts
from pensieve_lab.rebatching.runners import peak_bytes

UNITS = {
    "seconds": "from the start of the run to the last answer",
    "latency_s": "of a query, from when it was due to its last token",
    "first_token_s": "from when it was due to its first token",
    "tokens_per_s": "output tokens per second",
    "idle": "shares of row-steps; tail: queue empty; waiting: queue not empty; late: its query had ended",
    "read_over_live": "columns that attention reads, over columns that hold a token",
    "series": "over time in seconds: completed queries, output tokens, allocated KV cache bytes, and bytes "
    "of the columns between the first token of the batch and its cursor, of occupied rows",
    "batch, length": "shape of the ring",
    "queries": "priority and times of each query, in order of arrival",
    **relayouts.UNITS,
}
_MAX_POINTS = 200
_PERCENTILES = (50, 90, 99)
_MAX_SLEEP_S = 0.05
_DIGITS = 5  # decimals of seconds


class _Seen:
    """Records an engine's steps as its observer."""

    def __init__(self, token_bytes: int) -> None:
        self._token_bytes = token_bytes
        self.zero_s = time.perf_counter()
        self.rows: list[tuple[float, int, int, int, int]] = []  # time, completed, tokens, allocated, spanned
        self.shapes: set[tuple[int, int]] = set()
        self.relayouts = Relayouts()
        self.silent: set[Query] = set()  # prefilled queries without a token yet
        self._num_completed = self._num_tokens = 0

    def now_s(self) -> float:
        """Return the seconds since the start of the run."""
        return time.perf_counter() - self.zero_s

    def observe(self, step: StepSeen) -> None:
        """Record tokens, completions, memory and changes of shape of a step."""
        for launch in step.launches:
            if isinstance(launch, Prefill | Shape | Decode):
                self._num_tokens += len(launch.samples)
                if not isinstance(launch, Decode):
                    self.silent |= {query for query, _ in launch.samples if not query.token_ids}
        self.relayouts.see(step.launches)
        self._num_completed += len(step.ended)
        spanned = step.ring.num_held * step.ring.span * self._token_bytes
        self.rows.append((self.now_s(), self._num_completed, self._num_tokens, step.kv_bytes, spanned))
        if step.ring.shape is not None:
            self.shapes.add(step.ring.shape)


def serve(
    runner: DeviceRunner, config: RebatchingConfig, load: Load, prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Serve a load to its last answer; return figures by the names of `UNITS`.

    Args:
      runner: warm runner; its contents are lost.
      config: configuration of the engine, for which `runner` was compiled.
      load: queries and their arrivals.
      prompts: ids of each query.

    Raises:
      PensieveError: a query failed, a reply was too short, or the KV cache exceeded the budget.
    """
    runner.reset(())
    seen = _Seen(runner.storage.token_bytes)
    with RebatchingEngine(runner, config, observe=seen.observe) as engine:
        gc.collect()
        gc.freeze()  # models and programs live on, so the collector need not scan them
        try:
            first_s, end_s = _run(engine, seen, load, prompts)
        finally:
            gc.unfreeze()
        stats = engine.stats()
    if stats["max_kv_bytes"] > config.kv_bytes:
        raise PensieveError(
            f"The KV cache took {stats['max_kv_bytes']:,} bytes; at most {config.kv_bytes:,} fit."
        )
    found = _figures(load, seen, stats, first_s, end_s) | {"peak_bytes_in_use": peak_bytes()}
    return found | {"relayouts": seen.relayouts.replay(runner, found["seconds"])}


def _run(
    engine: RebatchingEngine, seen: _Seen, load: Load, prompts: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Serve the load; return when the first and the last token of each query came."""
    places: dict[Query, int] = {}
    num = len(load.queries)
    first_s, end_s = np.full(num, np.nan), np.full(num, np.nan)
    arrival_s = np.array([one.arrival_s for one in load.queries])
    seen.zero_s = time.perf_counter()
    num_ended = 0
    while num_ended < num:
        num_sent, num_due = len(places), int(np.searchsorted(arrival_s, seen.now_s(), "right"))
        if num_due > num_sent:
            due = load.queries[num_sent:num_due]
            params = [SamplingParams(max_tokens=one.output_tokens, ignore_eos=True) for one in due]
            priorities = [one.priority for one in due]
            handles = engine.submit_many(prompts[num_sent:num_due], params, priorities)
            places |= {handle: num_sent + index for index, handle in enumerate(handles)}
        if not engine.has_unfinished:
            time.sleep(min(max(float(arrival_s[num_due]) - seen.now_s(), 0.0), _MAX_SLEEP_S))
            continue
        ended, now_s = engine.step(), seen.now_s()
        for query in [query for query in seen.silent if query.token_ids or query.done]:
            seen.silent.remove(query)
            first_s[places[query]] = now_s
        for query in ended:
            _check(query, load.queries[places[query]].output_tokens)
            end_s[places[query]] = now_s
        num_ended += len(ended)
    return first_s, end_s


def _check(query: Query, num_tokens: int) -> None:
    if (found := len(query.result().token_ids)) != num_tokens:
        raise PensieveError(f"A reply has {found} tokens; it must have {num_tokens}.")


def _figures(
    load: Load, seen: _Seen, stats: dict[str, Any], first_s: np.ndarray, end_s: np.ndarray
) -> dict[str, Any]:
    arrival_s = np.array([one.arrival_s for one in load.queries])
    priority = np.array([one.priority for one in load.queries])
    groups = {"all": np.full(len(priority), True)}
    if len(set(priority.tolist())) > 1:
        groups |= {f"priority {one}": priority == one for one in sorted(set(priority.tolist()))}
    seconds = float(end_s.max())
    row_steps = stats["row_steps"]
    return {
        "num_queries": len(load.queries),
        "seconds": seconds,
        "steps": stats["num_steps"],
        "tokens_per_s": load.output_tokens / seconds,
        "queries_per_s": len(load.queries) / seconds,
        "latency_s": {name: spread((end_s - arrival_s)[which]) for name, which in groups.items()},
        "first_token_s": {name: spread((first_s - arrival_s)[which]) for name, which in groups.items()},
        "idle": {
            why: stats[f"idle_{why}"] / row_steps if row_steps else 0.0 for why in ("tail", "waiting", "late")
        },
        "read_over_live": stats["read_columns"] / stats["live_columns"] if stats["live_columns"] else None,
        "shapes": sorted(seen.shapes),
        "stats": stats,
        "series": _thinned(seen.rows),
        "queries": {
            "priority": priority.tolist(),
            "latency_s": (end_s - arrival_s).round(_DIGITS).tolist(),
            "first_token_s": (first_s - arrival_s).round(_DIGITS).tolist(),
        },
    }


def spread(values: np.ndarray) -> dict[str, float]:
    """Return mean and percentiles."""
    shares = np.percentile(values, _PERCENTILES).tolist()
    return {"mean": float(values.mean())} | {
        f"p{one}": share for one, share in zip(_PERCENTILES, shares, strict=True)
    }


def _thinned(rows: Sequence[tuple[float, int, int, int, int]]) -> dict[str, list[float]]:
    """Keep at most `_MAX_POINTS` steps, including the first and the last."""
    kept = sorted({round(place) for place in np.linspace(0, len(rows) - 1, _MAX_POINTS)})
    names = ("time_s", "completed", "output_tokens", "allocated_bytes", "spanned_bytes")
    columns = zip(*(rows[place] for place in kept), strict=True)
    return {name: list(column) for name, column in zip(names, columns, strict=True)}
