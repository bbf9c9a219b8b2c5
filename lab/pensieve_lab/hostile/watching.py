"""The gaps of one client's stream while other clients do something else.

Owns: a client that streams chats one after the other, in a process of its own, and its gaps.
Does not know: what the others send.
"""

from __future__ import annotations

import http.client
import itertools
import json
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Final, NamedTuple, Self

import numpy as np

_TIMEOUT_S: Final = 60.0
_BODY: Final = {
    "model": "chat",
    "messages": [{"role": "user", "content": "Tell me a long story."}],
    "max_tokens": 400,
    "temperature": 0.0,
    "ignore_eos": True,
    "stream": True,
    "logprobs": True,  # otherwise tokens without text, such as half a character, have no piece
}


class Gaps(NamedTuple):
    """The gaps between the pieces of a stream, in ms.

    Attributes:
      num, p50_ms, p99_ms, max_ms: their number, median, 99th percentile and maximum. They are between tokens
        of one reply.
      texts: number of different texts among the stream's replies; they have the same prompt and no sampling.
      failures: what ended streams early.
      first_ms: the longest time to a first token. A prompt waits for those before it, however harmless.
    """

    num: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    texts: int
    failures: tuple[str, ...]
    first_ms: float = 0.0


class StreamWatcher:
    """A client that streams until `stop`; a context manager.

    It is a process of its own, so that the work of other clients does not delay it.
    """

    def __init__(self, host: str, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_watch, args=(host, port, there), daemon=True)
        self._process.start()
        self._here.recv()  # its first piece

    def take(self) -> Gaps:
        """Return the gaps since the last call."""
        self._here.send(True)
        arrivals, firsts, texts, failures = self._here.recv()
        return gaps_of(arrivals, texts, failures)._replace(first_ms=1e3 * max(firsts, default=0.0))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.join()


def gaps_of(arrivals: Sequence[Sequence[float]], texts: int = 1, failures: Sequence[str] = ()) -> Gaps:
    """Return the gaps of streams whose pieces arrived at these times, in seconds; each stream has a list."""
    gaps_s = [later - earlier for times in arrivals for earlier, later in itertools.pairwise(times)]
    if not gaps_s:
        return Gaps(0, 0.0, 0.0, 0.0, texts, tuple(failures))
    p50, p99, most = (1e3 * float(value) for value in np.percentile(gaps_s, (50, 99, 100)))
    return Gaps(len(gaps_s), p50, p99, most, texts, tuple(failures))


def _watch(host: str, port: int, pipe: Connection) -> None:
    """Stream chats one after the other, and answer each message with what arrived since the last one."""
    arrivals: list[list[float]] = []
    firsts: list[float] = []
    texts: set[str] = set()
    failures: list[str] = []
    has_begun = False
    while True:
        connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
        began_s = time.monotonic()
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(_BODY), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                failures.append(f"{answer.status}: {answer.read(200)!r}")
                time.sleep(0.1)
            times: list[float] = []
            arrivals.append(times)
            parts: list[str] = []
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                now_s = time.monotonic()
                piece = json.loads(line.removeprefix(b"data: "))
                if "error" in piece:
                    failures.append(str(piece["error"])[:200])
                    break
                if not times and not any(choice["logprobs"] for choice in piece["choices"]):
                    continue  # the piece before the first token
                if not times:
                    firsts.append(now_s - began_s)
                times.append(now_s)
                parts += [choice["delta"].get("content") or "" for choice in piece["choices"]]
                if not has_begun:
                    has_begun = True
                    pipe.send(True)
                if pipe.poll():
                    pipe.recv()
                    pipe.send((arrivals, firsts, len(texts), failures))
                    times = [times[-1]]
                    arrivals, firsts, failures = [times], [], []
                    # `texts` stays: a reply that differs from an earlier one counts.
            else:
                texts.add("".join(parts))
        except OSError as error:
            failures.append(repr(error))
            time.sleep(0.1)
        finally:
            connection.close()
        if pipe.poll():
            pipe.recv()
            pipe.send((arrivals, firsts, len(texts), failures))
            arrivals, firsts, failures = [], [], []
