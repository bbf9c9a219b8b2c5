"""A start of the library in its own process, with its costs: `python -m tests.runtime.start_process`.

The one argument is a `Start` as JSON; the last line of the output is a `Started` as JSON.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "traced",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowered",
    "/jax/core/compile/backend_compile_duration": "compiled",
}


@dataclasses.dataclass(frozen=True)
class Start:
    """The start to run: a model that serves two turns of a conversation.

    Attributes:
        may_save: if False, storing another executable is an error.
    """

    cache_dir: str
    model: str = "random:llama-tiny"
    dtype: str = "float32"
    buckets: Sequence[int] = (32,)
    may_save: bool = True


@dataclasses.dataclass(frozen=True)
class Started:
    """The result of a start.

    Attributes:
        events: counts during preparation, by name.
        warnings: of the library.
        token_ids: generated ids.
    """

    events: dict[str, int]
    warnings: list[str]
    token_ids: list[list[int]]


def run_start(start: Start, **environment: str) -> Started:
    """Run a start in a fresh process, with these environment variables in addition."""
    command = [sys.executable, "-m", "tests.runtime.start_process", json.dumps(dataclasses.asdict(start))]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return Started(**json.loads(done.stdout.splitlines()[-1]))


def main(start: Start) -> Started:
    """Start the library, and serve two turns."""
    import jax

    from pensieve_jax import LLM, CacheConfig, EngineConfig, RunnerConfig, SamplingParams, SchedulerConfig
    from pensieve_jax.device.model_runner import ModelRunner
    from pensieve_jax.runtime.executable_store import ExecutableStore

    events: collections.Counter[str] = collections.Counter()
    warnings: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    def count(event: str, _: float, **__: Any) -> None:
        if event in _EVENTS:
            events[_EVENTS[event]] += 1

    def refuse(*_: object) -> None:
        raise AssertionError("an executable was made")

    warm_up = ModelRunner.warm_up

    def counted_warm_up(*arguments: Any) -> None:
        events.clear()
        warm_up(*arguments)
        counted.update(events)

    counted: dict[str, int] = {}
    ModelRunner.warm_up = counted_warm_up  # type: ignore[method-assign, assignment]
    if not start.may_save:
        ExecutableStore.save = refuse  # type: ignore[method-assign]
    logging.getLogger("pensieve_jax").addHandler(Collector(logging.WARNING))
    jax.monitoring.register_event_duration_secs_listener(count)
    config = EngineConfig(
        cache=CacheConfig(gpu_pages=12, cpu_pages=4, chunk_tokens=16),
        scheduler=SchedulerConfig(
            max_num_running=2,
            max_num_batched_tokens=start.buckets[-1],
            max_context_tokens=160,
            token_buckets=tuple(start.buckets),
        ),
        runner=RunnerConfig(compilation_cache_dir=start.cache_dir, num_layer_groups=2),
    )
    token_ids: list[list[int]] = []
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM(start.model, dtype=start.dtype, config=config, progress=False) as llm:
        for length in (40, 5):
            [output] = llm.generate([list(range(10, 10 + length))], params, conversation_ids=["a"])
            token_ids.append(list(output.token_ids))
    return Started(counted, warnings, token_ids)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(main(Start(**json.loads(sys.argv[1]))))))
