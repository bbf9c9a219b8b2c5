"""`pensieve serve` as a benchmark server: the same engine, behind HTTP and in its own processes.

Owns: starting the server with the flags of the run, the clients' event loop, and reading its answers.
Does not know: users or figures.

A turn is a streamed completion of token ids that continues its predecessor's id, so only the transport
differs from a turn of the in-process engine. Histories from before the run are computed in the order of their
last answers. They are as old as their computation, because the server uses the wall clock.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from absl import flags

from pensieve_jax import EngineConfig, Usage
from pensieve_jax.commands.engine_flags import engine_flag_names
from pensieve_lab.common.systems import HTTP
from pensieve_lab.serving.clock import RunClock
from pensieve_lab.serving.http_client import HttpClient, HttpError, RequestTiming
from pensieve_lab.serving.served import ServedProcess
from pensieve_lab.workload import Answer, History, Steps, UserTurn

FLAGS = flags.FLAGS
_PATIENCE_S = 0.002  # longest wait for answers, by which new turns may be delayed
# Fields of `Usage`, by the server's names.
_SOURCES = {
    "prompt_tokens": "new_tokens",
    "reused_gpu_tokens": "gpu_tokens",
    "swapped_in_tokens": "cpu_tokens",
    "recomputed_tokens": "recomputed_tokens",
    "prefilled_tokens": "prefilled_tokens",
}


class HttpServer:
    """`Server` over a socket."""

    def __init__(self, served: ServedProcess, clock: RunClock, max_in_flight: int) -> None:
        """Take a server that is ready."""
        self._served = served
        self.clock = clock
        self._max_in_flight = max_in_flight
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="clients", daemon=True)
        self._thread.start()
        self._client = HttpClient(served.host, served.port)
        self._ended: queue.SimpleQueue[tuple[UserTurn, RequestTiming | BaseException]] = queue.SimpleQueue()
        self._last: dict[str, str] = {}  # the id that a conversation's next turn goes on from
        self._num_unfinished = 0

    @property
    def num_unfinished(self) -> int:
        return self._num_unfinished

    @property
    def has_unfinished(self) -> bool:
        return self._num_unfinished > 0

    def remember(self, histories: Iterable[History]) -> None:
        """Send every history once, with an answer of one token."""
        running: list[tuple[str, Future[RequestTiming]]] = []
        for history in histories:
            if len(running) >= self._max_in_flight:
                self._remembered(*running.pop(0))
            asked = self._ask(history.conversation_id, history.token_ids[:-1], 1)
            running.append((history.conversation_id, self._start(asked)))
        for one in running:
            self._remembered(*one)

    def submit(self, turn: UserTurn) -> None:
        self._num_unfinished += 1
        asked = self._ask(turn.conversation_id, turn.token_ids, turn.output_tokens)
        self._start(self._answered(turn, asked))

    def step(self, until_s: float) -> list[Answer]:
        """Wait up to `_PATIENCE_S` and return the answers of that time."""
        ended = []
        try:
            ended.append(self._ended.get(timeout=_PATIENCE_S))
            while True:
                ended.append(self._ended.get_nowait())
        except queue.Empty:
            return [self._answer(turn, result) for turn, result in ended]

    def counters(self) -> Mapping[str, float]:
        return {name: value for name, value in self._stats().items() if isinstance(value, int | float)}

    def steps(self) -> Steps:
        """Return nothing: the server does not report steps."""
        return {}

    def close(self) -> None:
        """Stop the server and its running turns."""
        self._start(self._client.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._served.close()

    @property
    def device(self) -> str:
        """Platform and kind of its device."""
        device = self._stats()["device"]
        return f"{device['platform']}: {device['kind']}"

    def _stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self._start(self._client.get("/v1/pensieve/stats")).result().last[-1]
        return stats

    def _start[T](self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _ask(
        self, conversation_id: str, token_ids: Iterable[int], num_tokens: int
    ) -> Coroutine[Any, Any, RequestTiming]:
        body: dict[str, Any] = {
            "model": FLAGS.model,
            "prompt": list(token_ids),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "store": True,  # the in-process engine stores its turns as well
        }
        if conversation_id in self._last:
            body["previous_response_id"] = self._last[conversation_id]
        return self._client.post("/v1/completions", body)

    async def _answered(self, turn: UserTurn, asked: Coroutine[Any, Any, RequestTiming]) -> None:
        try:
            self._ended.put((turn, await asked))
        except (HttpError, OSError) as error:
            self._ended.put((turn, error))

    def _remembered(self, conversation_id: str, asked: Future[RequestTiming]) -> None:
        self._last[conversation_id] = asked.result().last[-1]["id"]

    def _answer(self, turn: UserTurn, result: RequestTiming | BaseException) -> Answer:
        self._num_unfinished -= 1
        if isinstance(result, BaseException):
            raise result
        last = result.last[-1]
        sources = {name: last["usage"]["pensieve"][theirs] for name, theirs in _SOURCES.items()}
        usage = Usage(**sources, output_tokens=last["usage"]["completion_tokens"])
        if usage.output_tokens != turn.output_tokens:
            raise HttpError(f"A reply has {usage.output_tokens} tokens; {turn.output_tokens} were requested.")
        self._last[turn.conversation_id] = last["id"]
        return Answer(turn, 0, self.clock.at(result.first_s), self.clock.at(result.end_s), usage)


class HttpSystem:
    """A server per load point, started anew so that it has no conversations.

    Attributes:
      label: label of reports.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start nothing yet; `config` must match the flags, which the server gets unchanged."""
        self.label = HTTP
        self._config = config
        self._server: HttpServer | None = None

    def start(self, clock: RunClock) -> HttpServer:
        """Start a server and wait until it is ready; raises ServerEndedError if it ends before."""
        self.close()
        served = ServedProcess(_engine_flags())
        self._server = HttpServer(served, clock, self._config.scheduler.running_limit)
        return self._server

    def describe(self) -> dict[str, Any]:
        """Return what a report says of the server."""
        return {"server": "pensieve serve, front and engine in processes of their own"}

    def device_name(self) -> str:
        """Return platform and kind of the device, as the server reports it."""
        assert self._server is not None, "start a server first"
        return self._server.device

    def close(self) -> None:
        """Stop the running server, if any."""
        if self._server is not None:
            self._server.close()
            self._server = None


def _engine_flags() -> list[str]:
    """Return the engine's flags as this command was given them.

    The server's default includes host memory, so `--cpu_pages=0` comes first to match the engine's default.
    """
    named = [FLAGS[name] for name in engine_flag_names()]
    return ["--cpu_pages=0", *(flag.serialize() for flag in named if flag.present and flag.serialize())]
