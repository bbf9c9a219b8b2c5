"""A real front before an engine's process on the fake runner: `python front.py HISTORY PORT`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from pensieve_jax import EngineConfig
from pensieve_jax.commands.launch import EXIT_BAD_INPUT
from pensieve_jax.core.errors import PensieveError
from pensieve_jax.server.application import make_application
from pensieve_jax.server.engine_process import lives
from pensieve_jax.server.engine_process.messages import Start
from pensieve_jax.server.engine_process.public import AsyncEngine
from pensieve_jax.server.engine_process.supervisor import Restarts
from pensieve_jax.server.http.keys import ApiKeys
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.listening import bind, serve
from pensieve_jax.server.logs import log_to

lives._WORKER = "tests.server.faults.worker"


def main(history: str, port: str, keys_file: str | None = None) -> int:
    log_to()
    greeting = Start("fake", "auto", str(Path(history).absolute()), "normal", EngineConfig(), False)
    settings = ServerSettings(api_keys_file=keys_file, max_in_flight_per_key=1000)
    keys = ApiKeys(keys_file)
    return serve(
        lambda: AsyncEngine(
            functools.partial(lives.ProcessLife.begin, greeting),
            restarts=Restarts(most=10**6, first_delay_s=0.0),
        ),
        functools.partial(make_application, settings=settings, keys=keys),
        bind("127.0.0.1", int(port)),
        drain_s=5.0,
        announce=lambda engine, address: print(f"serving at {address}", flush=True),
    )


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except PensieveError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
