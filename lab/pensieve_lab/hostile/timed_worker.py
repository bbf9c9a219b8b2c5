"""The engine's process of a server that notes how long its threads are held.

Owns: which parts of the engine's loop are timed.
Does not know: what clients send.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pensieve_jax.device.model_runner import ModelRunner
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.late_rows import LateRows
from pensieve_jax.engine.loop import EngineLoop
from pensieve_jax.engine.submission import TurnSubmitter
from pensieve_jax.server.engine_process import worker
from pensieve_jax.server.engine_process.engine_server import EngineServer
from pensieve_lab.hostile.slices import DIRECTORY_VARIABLE, PartTimer, SliceLog

PARTS: Final[Mapping[type[Any], tuple[str, ...]]] = {
    EngineServer: ("_take_inbox", "_submit", "_tell"),
    TurnSubmitter: ("submit",),
    Engine: ("step", "_finish"),
    EngineLoop: ("step",),
    LateRows: ("words", "accept"),
    ModelRunner: ("launch", "choose", "fetch"),
}
"""The parts that are timed. Those of `ModelRunner` compute the step itself, where the device is a CPU."""


def main() -> int:
    timer = PartTimer(SliceLog(Path(os.environ[DIRECTORY_VARIABLE]) / "engine"))
    for kind, names in PARTS.items():
        timer.time_methods(kind, names)
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
