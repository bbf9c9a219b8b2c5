"""Steps of a model on several devices, timed and traced, each with its roofline bound.

Owns: the cases, the engine's sizes that follow from them, and the figures of each.
Does not know: variants, or other processes.
Called by `programs.profile_parallel`.

Decoding sequences and prompts use the page pool one after the other, so that it only needs the size of the
larger case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from pensieve_jax import EngineConfig
from pensieve_jax.assembly import Assembled
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.device.row_steps import RowSteps, StepRow, Timed
from pensieve_lab.common.spread import Spread
from pensieve_lab.parallel.time_line import time_line
from pensieve_lab.steps.bounds import bound_s, operations
from pensieve_lab.steps.ceilings import Ceilings
from pensieve_lab.steps.device_trace import trace_devices

_BUCKET_STEP = 16
_NUM_TRACED_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Cases:
    """Cases of decoding sequences over a context, and of prompts."""

    decodes: tuple[int, ...]
    prompts: tuple[int, ...]
    context_tokens: int

    def __iter__(self) -> Iterator[tuple[str, list[StepRow], int]]:
        """Yield name, rows, and the number of sequences that share the pool."""
        for count in self.decodes:
            rows = [StepRow(i, self.context_tokens - 1, self.context_tokens) for i in range(count)]
            yield f"decode {count} x {self.context_tokens}", rows, max(self.decodes)
        for count in self.prompts:
            yield f"prompt of {count}", [StepRow(0, 0, count)], 1

    def sized(self, config: EngineConfig) -> EngineConfig:
        """Return the engine configuration with pages and buckets for exactly these cases."""
        chunk = config.cache.chunk_tokens
        decoding = max(self.decodes, default=1)
        buckets = {-(-count // _BUCKET_STEP) * _BUCKET_STEP for count in (*self.decodes, *self.prompts)}
        largest = max(*buckets, -(-(decoding + chunk) // _BUCKET_STEP) * _BUCKET_STEP)
        longest = max(self.context_tokens, *self.prompts, 1)
        num_pages = max(decoding * -(-self.context_tokens // chunk), -(-longest // chunk))
        return dataclasses.replace(
            config,
            cache=dataclasses.replace(config.cache, gpu_pages=num_pages),
            scheduler=dataclasses.replace(
                config.scheduler,
                max_num_running=decoding,
                max_num_rows=None,
                max_num_batched_tokens=largest,
                token_buckets=tuple(sorted(buckets | {largest})),
                max_context_tokens=longest,
            ),
        )


def measure_steps(
    parts: Assembled,
    cases: Cases,
    ceilings: Ceilings,
    *,
    repeats: int,
    num_launches: int,
    num_events: int,
) -> dict[str, Any]:
    """Measure every case: step time, share of the bound, and a trace of a few steps."""
    runner, found = parts.runner, {}
    num_devices = parts.config.runner.tensor_parallel_size
    for name, rows, num_sequences in cases:
        runner.reset()
        steps = RowSteps(parts.config, runner, parts.model_config.vocab_size, num_sequences)
        steps.fill()
        step = steps.whole(steps.plan(rows, SamplingParams()))
        spread = Spread.of([step.sample_s(num_launches) for _ in range(repeats + 1)][1:])
        todo = operations(
            parts.model_config,
            rows,
            num_samples=len(rows),
            bytes_per_number=runner.dtype.itemsize,
            kv_token_bytes=runner.storage.page_bytes * num_devices / runner.storage.page_size,
            num_devices=num_devices,
            bytes_per_weight=None if runner.weights_dtype is None else 1,
        )
        bound = bound_s(todo, ceilings)
        found[name] = {
            "step_s": spread.as_dict(),
            "dispatch_s": step.dispatch_s(num_launches),
            "bound_s": bound,
            "share_of_bound": bound / spread.median,
            "trace": _traced(step, num_events),
        }
    return found


def _traced(step: Timed, num_events: int) -> dict[str, Any]:
    """Return the traced time line; empty without GPUs."""
    # the first traced step precedes these
    traces = trace_devices(lambda: step.sample_s(_NUM_TRACED_STEPS - 1))
    kernels = {device: trace.kernels for device, trace in traces.items()}
    return time_line(kernels, _NUM_TRACED_STEPS, num_events)
