"""`pensieve serve` that notes how long its event loop and its engine's thread are held.

    python -m pensieve_lab.hostile.timed_server --slices=DIRECTORY --model=chat

The flags are those of `pensieve serve`. `pensieve_lab.hostile.slices` describes the files in the directory.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import ClassVar

import uvloop
from absl import flags

from pensieve_jax import AsyncEngine
from pensieve_jax.commands import serve
from pensieve_jax.commands.launch import run
from pensieve_jax.server.logs import LOGGER
from pensieve_lab.hostile.slices import DIRECTORY_VARIABLE, LoopTimer, SliceLog

FLAGS = flags.FLAGS


class TimedEngine(AsyncEngine):
    """Engine whose process notes the parts of its loop."""

    worker: ClassVar[str] = "pensieve_lab.hostile.timed_worker"


def main() -> int:
    directory = Path(FLAGS.slices)
    os.environ[DIRECTORY_VARIABLE] = str(directory)  # the engine's process inherits it
    LOGGER.addFilter(lambda record: record.levelno > logging.INFO)  # a line for each request is of no use
    timer = LoopTimer(SliceLog(directory / "front"))
    uvloop.new_event_loop = timer.wrap(uvloop.new_event_loop)  # type: ignore[assignment]
    return serve.serve(TimedEngine)


def define_flags() -> None:
    serve.define_flags()
    flags.DEFINE_string("slices", None, "Directory for the files of slices.", required=True)


if __name__ == "__main__":
    define_flags()
    run(main)
