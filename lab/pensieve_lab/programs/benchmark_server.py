"""Times the socket between a server's two processes, without a device.

    python -m pensieve_lab.programs.benchmark_server [--num_running=256]

The real engine runs on a runner that computes nothing, served over a real socket pair; at the other end the
real client hands deltas to a task per turn. Both ends alternate in one thread, so that the CPU time of each
can be measured. Replies end and new turns begin all the time, as in a closed loop of clients. Rounds have the
same steps, and the minimum over the rounds counts for each step, because delays on a shared host vary.
  engine     `Engine.submit` and `Engine.step`, which a program without a server needs as well
  wire       the rest of the engine's thread: inbox, deltas, encoding, sending
  front      the client's side, until each task has its delta
  submit     the client's side of one turn, from `submit` to its acceptance, without its deltas
The target is at most 0.25 ms of the engine's thread per step. Prints a table, and one JSON document (see
`--json`) as the last line. The exit status is 0 even if the target is missed, since that depends on the
machine.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from model_defs import PRESETS, preset
from pensieve_jax import CacheConfig, EngineConfig, SamplingParams, SchedulerConfig
from pensieve_jax.assembly import estimated_cost_model
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.decoding.turn_spec import ModelLimits, TurnSpec
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.turn import Turn
from pensieve_jax.history import SQLiteHistoryStore
from pensieve_jax.server.engine_process.client import EngineConnection
from pensieve_jax.server.engine_process.engine_server import EngineServer
from pensieve_jax.server.engine_process.messages import sent_spec
from pensieve_jax.server.engine_process.running_turn import RunningTurn
from pensieve_jax.text import byte_tokenizer
from pensieve_jax.text.grammar import Grammar
from pensieve_lab.steps.null_runner import NullRunner

FLAGS = flags.FLAGS
TARGET_MS = 0.25
_PROMPT_TOKENS, _REPLY_TOKENS = 38, 205  # means of a turn in the traces
_SETTINGS = ("num_running", "num_steps", "num_rounds", "model")
_UNITS = {
    "*_ms": "milliseconds of CPU time per step",
    "front_us_per_delta": "microseconds of CPU time, including the event loop and the waiting task",
    "submit_us": "microseconds of CPU time per turn",
    "num_deltas": "deltas per step",
    "num_begun": "turns begun per step",
}


class Times(NamedTuple):
    """Times of one step in milliseconds of CPU time, and its contents."""

    engine_ms: float
    wire_ms: float
    front_ms: float
    submit_ms: float
    num_deltas: int
    num_begun: int


class TimedEngine(Engine):
    """Engine that adds up the time in `step` and `submit` since its total was last reset."""

    spent_s = 0.0

    def step(self) -> list[Turn]:
        return self._timed(super().step)

    def submit(
        self, specs: Sequence[TurnSpec], grammars: Mapping[StructuredOutput, Grammar] | None = None
    ) -> list[Turn]:
        return self._timed(lambda: super(TimedEngine, self).submit(specs, grammars))

    def _timed[T](self, work: Callable[[], T]) -> T:
        start_s = time.thread_time()
        done = work()
        self.spent_s += time.thread_time() - start_s
        return done


class Load:
    """Both ends of a socket, and clients that send a new turn when theirs has ended."""

    def __init__(self) -> None:
        """Let every client send a turn."""
        model = preset(FLAGS.model)
        num_running, context_tokens = FLAGS.num_running, 4 * _REPLY_TOKENS
        config = EngineConfig(
            cache=CacheConfig(gpu_pages=num_running * (context_tokens // 32 + 2)),
            scheduler=SchedulerConfig(
                max_num_running=num_running,
                max_num_batched_tokens=8 * num_running + 32,
                max_context_tokens=context_tokens,
            ),
        )
        self.engine = TimedEngine(
            NullRunner(config, model, context_tokens, "pallas_triton"),
            config,
            ModelLimits(vocab_size=model.vocab_size, max_context_tokens=context_tokens),
            SQLiteHistoryStore(None, fingerprint="benchmark"),
            cost_model=estimated_cost_model(model, config.cache.chunk_tokens),
            tokenizer=byte_tokenizer(),
        )
        front, engine_end = socket.socketpair()
        self.server = EngineServer(self.engine, byte_tokenizer(), engine_end)
        self.front = front
        self.numbers = itertools.count(1)
        self.random = np.random.default_rng(0)
        self.num_deltas = self.num_begun = 0
        self.submit_s = 0.0
        self.tasks: set[asyncio.Task[None]] = set()

    async def measure(self, num_steps: int) -> list[Times]:
        """Return `num_steps` steps, after a warm-up that desynchronizes the clients."""
        loop = asyncio.get_running_loop()
        numbers = self.numbers
        _, self.connection = await loop.create_unix_connection(
            lambda: EngineConnection(numbers), sock=self.front
        )
        self.tasks.update(asyncio.create_task(self._client()) for _ in range(FLAGS.num_running))
        times = []
        for number in range(num_steps + 2 * _REPLY_TOKENS):
            if number == 2 * _REPLY_TOKENS:
                gc.collect()
                gc.freeze()  # as a server does with its start-up objects
            times.append(await self._step())
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        self.connection.close()
        await self.connection.lost.wait()
        self.server.run()
        return times[-num_steps:]

    async def _client(self) -> None:
        """Send one-off requests one after the other, without end."""
        while True:
            async for _ in self._submit():
                self.num_deltas += 1

    def _submit(self) -> RunningTurn:
        start_s = time.thread_time()
        prompt = self.random.integers(3, 30_000, _PROMPT_TOKENS).tolist()
        params = SamplingParams(max_tokens=int(self.random.integers(1, 2 * _REPLY_TOKENS)), ignore_eos=True)
        (turn,) = self.connection.submit([(sent_spec(next(self.numbers), TurnSpec(prompt, params)), None)])
        self.num_begun += 1
        self.submit_s += time.thread_time() - start_s
        return turn

    async def _step(self) -> Times:
        num_deltas, num_begun, submit_s = self.num_deltas, self.num_begun, self.submit_s
        self.engine.spent_s = 0.0
        start_s = time.thread_time()
        self.server.run_once()
        turned_s = time.thread_time()
        # Reading, dispatching to tasks and the tasks themselves take one round of the event loop each.
        for _ in range(3):
            await asyncio.sleep(0)
        end_s = time.thread_time()
        submitting_s = self.submit_s - submit_s
        return Times(
            1e3 * self.engine.spent_s,
            1e3 * (turned_s - start_s - self.engine.spent_s),
            1e3 * (end_s - turned_s - submitting_s),
            1e3 * submitting_s,
            self.num_deltas - num_deltas,
            self.num_begun - num_begun,
        )


def summary(rounds: Sequence[Sequence[Times]]) -> dict[str, Any]:
    """Return means, and median and 99th percentile of figures with a target, from each step's minimum.

    Raises:
      AssertionError: rounds differ in the contents of their steps.
    """
    columns = {}
    for name in Times._fields:
        values = np.array([[getattr(one, name) for one in times] for times in rounds])
        assert not name.startswith("num_") or (values == values[0]).all(), f"rounds differ in {name}"
        columns[name] = values.min(axis=0)
    wire = columns["wire_ms"]
    return {
        "engine_ms": float(columns["engine_ms"].mean()),
        "wire_ms": float(wire.mean()),
        "wire_p50_ms": float(np.median(wire)),
        "wire_p99_ms": float(np.percentile(wire, 99)),
        "front_ms": float(columns["front_ms"].mean()),
        "front_us_per_delta": float(1e3 * columns["front_ms"].sum() / columns["num_deltas"].sum()),
        "submit_us": float(1e3 * columns["submit_ms"].sum() / max(columns["num_begun"].sum(), 1)),
        "num_deltas": float(columns["num_deltas"].mean()),
        "num_begun": float(columns["num_begun"].mean()),
    }


def main() -> int:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rounds = [asyncio.run(Load().measure(FLAGS.num_steps)) for _ in range(FLAGS.num_rounds)]
    results: Mapping[str, Any] = summary(rounds)
    print(table(list(results), [list(results.values())]))
    is_met = results["wire_ms"] <= TARGET_MS
    print(f"target: wire at most {TARGET_MS} ms per step, on average: {'met' if is_met else 'missed'}")
    settings = {name: FLAGS[name].value for name in _SETTINGS}
    document = {"target_ms": TARGET_MS, "target_met": is_met, "settings": settings, **results}
    print_document(json_line("server", document, units=_UNITS, device="none (host only, one core)"))
    return 0


def define_flags() -> None:
    flags.DEFINE_integer("num_running", 256, "Clients, each with one turn at a time.", lower_bound=1)
    flags.DEFINE_integer("num_steps", 1000, "Measured steps per round.", lower_bound=1)
    flags.DEFINE_integer(
        "num_rounds", 5, "Number of rounds; the minimum counts for each step.", lower_bound=1
    )
    flags.DEFINE_enum("model", "llama2-13b-gqa10", list(PRESETS), "Preset whose heads shape the tile list.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
