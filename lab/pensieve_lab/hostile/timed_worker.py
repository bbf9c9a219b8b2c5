"""The engine's process of a server that notes how long its threads are held.

Owns: which parts of the engine's loop are timed.
Does not know: what clients send.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pensieve_jax.device.model_runner import ModelRunner
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.late_rows import LateRows
from pensieve_jax.engine.loop import EngineLoop
from pensieve_jax.engine.submission import TurnSubmitter
from pensieve_jax.server.engine_process import worker
from pensieve_jax.server.engine_process.engine_server import EngineServer
from pensieve_lab.hostile.slices import DIRECTORY_VARIABLE, PartTimer, SliceLog

DEVICE_PARTS = ("launch", "choose", "fetch")
"""Parts that compute the step itself, where the device is a CPU."""


def main() -> int:
    timer = PartTimer(SliceLog(Path(os.environ[DIRECTORY_VARIABLE]) / "engine"))
    for kind, names in (
        (EngineServer, ("_take_inbox", "_queue", "_tell")),
        (TurnSubmitter, ("submit",)),
        (Engine, ("step", "_finish")),
        (EngineLoop, ("step",)),
        (LateRows, ("words", "accept")),
        (ModelRunner, DEVICE_PARTS),
    ):
        timer.time_methods(kind, names)
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
