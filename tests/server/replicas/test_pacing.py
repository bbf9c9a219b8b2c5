"""The rate limit of all streams together, on a loop whose clock the test advances."""

from __future__ import annotations

import asyncio

from pensieve_jax.server.replicas.serve_middleware import ChunkRateLimiter


class Clock(asyncio.SelectorEventLoop):
    """Event loop whose time passes only when nothing else is left to do."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 100.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now_s = max(self._now_s, self._scheduled[0].when())
        super()._run_once()


def run(work):
    with asyncio.Runner(loop_factory=Clock) as runner:
        return runner.run(work)


def stream(count):
    """Return an application that sends `count` pieces, as fast as they are accepted."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(count):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


async def sent_at(app, scope=None):
    """Return when each message of a body was sent."""
    times = []

    async def send(message):
        if message["type"] == "http.response.body":
            times.append(asyncio.get_running_loop().time() - 100.0)

    await app(scope or {"type": "http"}, None, send)
    return times


def test_streams_take_turns_and_all_of_them_keep_the_pace():
    async def work():
        paced = ChunkRateLimiter(stream(10), pieces_per_s=50)
        return await asyncio.gather(*(sent_at(paced) for _ in range(4)))

    found = run(work())
    times = sorted(time for one in found for time in one[:-1])
    assert len(times) == 40
    assert all(abs(time - number / 50) < 1e-6 for number, time in enumerate(times))
    for one in found:  # no stream is ahead of the others
        assert max(abs(time - number * 4 / 50) for number, time in enumerate(one[:-1])) < 4 / 50
        assert one[-1] == one[-2]  # the end of a stream is not delayed


def test_a_slow_sender_is_not_delayed():
    async def seldom(scope, receive, send):
        for _ in range(3):
            await asyncio.sleep(1.0)
            await send({"type": "http.response.body", "body": b"x", "more_body": True})

    assert run(sent_at(ChunkRateLimiter(seldom, pieces_per_s=2))) == [1.0, 2.0, 3.0]


def test_scopes_other_than_http_pass_through():
    async def app(scope, receive, send):
        for _ in range(3):
            await send({"type": "http.response.body", "more_body": True})

    assert run(sent_at(ChunkRateLimiter(app, pieces_per_s=1), {"type": "lifespan"})) == [0.0, 0.0, 0.0]
