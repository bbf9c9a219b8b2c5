"""The loop over training steps.

Owns: what happens in which step, the progress bar, and the throughput that it shows.
Does not know: the model, or what is evaluated.
Called by `programs.train_chat_model`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import optax
from tqdm import tqdm

from pensieve_jax import PensieveError
from pensieve_lab.chat_training.checkpoints import Checkpoints
from pensieve_lab.chat_training.feed import Feed
from pensieve_lab.chat_training.step import Network, Parameters, TrainState, train_step


class TrainingDivergedError(PensieveError):
    """The loss is not finite; the newest checkpoint is from before that."""


class Schedule(NamedTuple):
    """Number of steps, and the intervals in steps of logs, checkpoints and evaluations."""

    num_steps: int
    log_steps: int
    checkpoint_steps: int
    evaluation_steps: int


class StopFlag(Protocol):
    """Flag with which a user requests an early end; `pensieve_jax.commands.launch.Interrupt` is one."""

    requested: bool


class TrainingResult(NamedTuple):
    """State after `num_steps`, and the log of this process as (step, loss, tokens per second)."""

    state: TrainState
    num_steps: int
    log: list[tuple[int, float, float]]


class _Meter:
    """Losses and tokens since the last log line."""

    def __init__(self, num_steps: int, start: int, shown: bool) -> None:
        self.log: list[tuple[int, float, float]] = []
        self._bar = tqdm(total=num_steps, initial=start, desc="training", disable=not shown)
        self.restart()

    def restart(self) -> None:
        """Start a new measurement window."""
        self._losses: list[jax.Array] = []
        self._num_tokens, self._began = 0, time.perf_counter()

    def add(self, loss: jax.Array, num_tokens: int) -> None:
        self._losses.append(loss)
        self._num_tokens += num_tokens

    def line(self, num_steps: int) -> None:
        """Report the window that ends after `num_steps` steps; waits for its last step.

        Raises TrainingDivergedError.
        """
        if not self._losses:
            return
        losses = [float(loss) for loss in jax.device_get(self._losses)]
        loss, rate = sum(losses) / len(losses), self._num_tokens / (time.perf_counter() - self._began)
        if not math.isfinite(loss):
            raise TrainingDivergedError(
                f"The loss is {loss} at step {num_steps}; lower --learning_rate or raise --warmup_steps, "
                "in an empty --work_dir."
            )
        self.log.append((num_steps, loss, rate))
        self._bar.set_postfix_str(f"loss {loss:.3f}, {rate / 1e6:.2f}M tokens/s", refresh=False)
        self._bar.update(num_steps - self._bar.n)
        if self._bar.disable:
            print(f"step {num_steps}: loss {loss:.4f}, {rate:,.0f} tokens/s", flush=True)
        self.restart()

    def close(self) -> None:
        self._bar.close()


def train(
    feed: Feed,
    network: Network,
    optimizer: optax.GradientTransformation,
    start: TrainState,
    checkpoints: Checkpoints,
    schedule: Schedule,
    *,
    num_workers: int,
    evaluate: Callable[[int, Parameters], object],
    stopping: StopFlag,
    progress: bool,
) -> TrainingResult:
    """Train from the newest checkpoint, or from `start` (which is donated), to the last step.

    `num_workers` processes make the batches. Training ends early when `stopping.requested`, and saves a
    checkpoint in either case. `evaluate(step, parameters)` is called every `evaluation_steps`, but not at the
    end. Raises TrainingDivergedError.
    """
    done = checkpoints.last_step
    state = checkpoints.restore(start) if done else start
    meter = _Meter(schedule.num_steps, done, progress)
    pauses = schedule.log_steps, schedule.checkpoint_steps, schedule.evaluation_steps
    with contextlib.closing(feed.batches(done, num_workers=num_workers)) as batches:
        while done < schedule.num_steps and not stopping.requested:
            batch = next(batches)
            state, loss = train_step(state, batch, network=network, optimizer=optimizer)
            meter.add(loss, int((batch.segments > 0).sum()))
            done += 1
            if any(done % steps == 0 for steps in pauses):
                meter.line(done)  # before saving: a checkpoint of a diverged training would be useless
            if done % schedule.checkpoint_steps == 0:
                checkpoints.save(done, state)
            if done % schedule.evaluation_steps == 0 and done < schedule.num_steps:
                evaluate(done, state.parameters)
                meter.restart()
    meter.line(done)
    meter.close()
    checkpoints.save(done, state)
    return TrainingResult(state, done, meter.log)
