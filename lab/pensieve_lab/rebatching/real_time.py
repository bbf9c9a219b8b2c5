"""A load on an engine of padded batches, in real time, and the figures that are kept of it.

Owns: when queries are sent, what is noted of each and of every step, and the figures' names.
Does not know: methods, flags, or what figures are compared.

One thread sends and steps, as a server's would. Latency counts from when a query was due, so a loop that is
late is charged for it. Replies have the lengths of the load: nothing else ends them.
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
    "seconds": "from the first arrival's zero to the last answer",
    "latency_s": "of a query, from when it was due to its last token",
    "first_token_s": "from when it was due to its first token",
    "tokens_per_s": "of replies",
    "idle": "shares of row-steps: tail: nobody waited; waiting: somebody did; late: its query had ended",
    "read_over_live": "columns that attention reads by its layout, over those that hold a token of their row",
    "series": "over time, seconds: queries completed, tokens of replies computed, bytes of KV state that are "
    "allocated, and of the columns between the first token of the batch and its cursor, of rows in use",
    "batch, length": "of the ring",
    "queries": "in the order of their arrival, what each was like",
    **relayouts.UNITS,
}
_MAX_POINTS = 200
_PERCENTILES = (50, 90, 99)
_MAX_SLEEP_S = 0.05
_DIGITS = 5  # of seconds


class _Seen:
    """What an engine does, as its observer."""

    def __init__(self, token_bytes: int) -> None:
        self._token_bytes = token_bytes
        self.zero_s = time.perf_counter()
        self.rows: list[tuple[float, int, int, int, int]] = []  # time, completed, tokens, allocated, spanned
        self.shapes: set[tuple[int, int]] = set()
        self.relayouts = Relayouts()
        self.silent: set[Query] = set()  # begun, and no token has come
        self._num_completed = self._num_tokens = 0

    def now_s(self) -> float:
        """Since the start of the run."""
        return time.perf_counter() - self.zero_s

    def observe(self, step: StepSeen) -> None:
        """See `metrics.StepSeen`."""
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
    """All of the load to its last answer; figures by the names of `UNITS`.

    Args:
      runner: warm; what it holds is lost.
      config: the engine's, of which `runner` is.
      load: who comes when.
      prompts: the ids of each query.

    Raises:
      PensieveError: a query failed, its reply is too short, or KV state was over the budget.
    """
    runner.reset(())
    seen = _Seen(runner.storage.token_bytes)
    with RebatchingEngine(runner, config, observe=seen.observe) as engine:
        gc.collect()
        gc.freeze()  # models and programs stay: no need to look at them again and again
        try:
            first_s, end_s = _run(engine, seen, load, prompts)
        finally:
            gc.unfreeze()
        stats = engine.stats()
    if stats["max_kv_bytes"] > config.kv_bytes:
        raise PensieveError(f"{stats['max_kv_bytes']:,} bytes of KV state exceed {config.kv_bytes:,}.")
    found = _figures(load, seen, stats, first_s, end_s) | {"peak_bytes_in_use": peak_bytes()}
    return found | {"relayouts": seen.relayouts.replay(runner, found["seconds"])}


def _run(
    engine: RebatchingEngine, seen: _Seen, load: Load, prompts: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """When the first and the last token of each query came."""
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
        raise PensieveError(f"A query was answered with {found} tokens instead of {num_tokens}.")


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
    """Mean and percentiles."""
    shares = np.percentile(values, _PERCENTILES).tolist()
    return {"mean": float(values.mean())} | {
        f"p{one}": share for one, share in zip(_PERCENTILES, shares, strict=True)
    }


def _thinned(rows: Sequence[tuple[float, int, int, int, int]]) -> dict[str, list[float]]:
    """Some of the steps, the first and the last among them."""
    kept = sorted({round(place) for place in np.linspace(0, len(rows) - 1, _MAX_POINTS)})
    names = ("time_s", "completed", "output_tokens", "allocated_bytes", "spanned_bytes")
    columns = zip(*(rows[place] for place in kept), strict=True)
    return {name: list(column) for name, column in zip(names, columns, strict=True)}
