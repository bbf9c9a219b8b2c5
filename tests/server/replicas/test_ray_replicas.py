"""Questions to all replicas at once, some of them gone or hanging. Ray does not run."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pensieve_jax.core.errors import EngineDiedError
from tests.deadlines import TIMEOUT_S

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from Ray's imports


class ReplicaAnswer:
    """Answer of one replica."""

    def __init__(self, answer: bytes | Exception | None) -> None:
        self._answer = answer
        self.was_left = False

    async def get_async(self) -> bytes:
        try:
            if self._answer is None:  # it hangs
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_left = True
            raise
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Handle:
    """Handle of a deployment whose replicas give these answers, or that raises an error, or that hangs."""

    def __init__(
        self, *answers: bytes | Exception | None, error: Exception | None = None, hangs: bool = False
    ) -> None:
        self.answers = [ReplicaAnswer(answer) for answer in answers]
        self._error, self._hangs = error, hangs

    def options(self, **_: object) -> Handle:
        return self

    def broadcast(self, method: str, question: bytes) -> Handle:
        assert (method, question) == ("ask", b"how are you")
        return self

    async def results_async(self, *, return_exceptions: bool) -> list[object]:
        if self._error is not None:
            raise self._error
        asked = [one.get_async() for one in self.answers]
        return await asyncio.gather(*asked, return_exceptions=return_exceptions)

    async def _fetch_replica_results_async(self) -> list[ReplicaAnswer]:
        if self._hangs:
            await asyncio.Event().wait()
        if self._error is not None:
            raise self._error
        return self.answers


def ask_all(handle, monkeypatch, *, answer_s=TIMEOUT_S):
    from pensieve_jax.server.replicas import ray_replicas

    monkeypatch.setattr(ray_replicas, "ANSWER_S", answer_s)

    async def asked():
        async with asyncio.timeout(TIMEOUT_S):
            return await ray_replicas.RayReplicas(handle, None, None).ask_all(b"how are you")

    return asyncio.run(asked())


def test_all_answer(monkeypatch):
    assert sorted(ask_all(Handle(b"a", b"b"), monkeypatch)) == [b"a", b"b"]


def test_a_hanging_replica_does_not_block_the_others_answers(monkeypatch, caplog):
    for name in ("pensieve_jax", "pensieve_jax.server"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    handle = Handle(b"a", None, b"c")
    assert sorted(ask_all(handle, monkeypatch, answer_s=1.0)) == [b"a", b"c"]
    assert [one.was_left for one in handle.answers] == [False, True, False]
    assert "1 of 3 replicas" in caplog.text


def test_if_all_hang_there_is_no_answer(monkeypatch):
    with pytest.raises(EngineDiedError, match="has answered"):
        ask_all(Handle(None, None), monkeypatch, answer_s=0.01)


def test_if_serve_cannot_list_the_replicas_the_call_does_not_wait(monkeypatch):
    with pytest.raises(EngineDiedError, match="has answered"):
        ask_all(Handle(b"a", hangs=True), monkeypatch, answer_s=0.01)


def test_lost_replicas_give_no_answer(monkeypatch):
    gone = [ray.exceptions.ActorDiedError(), ray.exceptions.WorkerCrashedError(), RuntimeError("a bug")]
    assert ask_all(Handle(*gone, b"d"), monkeypatch) == [b"d"]
    assert ask_all(Handle(*gone), monkeypatch) == []


def test_without_replicas_there_are_no_answers_and_other_errors_are_raised(monkeypatch):
    from ray.serve._private.common import DeploymentID
    from ray.serve.exceptions import DeploymentUnavailableError

    nobody = DeploymentUnavailableError(DeploymentID("EngineReplica", "pensieve"))
    assert ask_all(Handle(error=nobody), monkeypatch) == []
    with pytest.raises(EngineDiedError, match="cannot be asked"):
        ask_all(Handle(error=ray.exceptions.RaySystemError("gone")), monkeypatch)


def test_a_cancelled_question_is_cancelled_at_all_replicas():
    from pensieve_jax.server.replicas.ray_replicas import RayReplicas

    handle = Handle(b"a", None)

    async def leave():
        asking = asyncio.ensure_future(RayReplicas(handle, None, None).ask_all(b"how are you"))
        for _ in range(5):
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert handle.answers[1].was_left


def test_the_installed_ray_has_the_private_interface_that_is_used():
    from ray.serve.handle import DeploymentBroadcastResponse

    assert callable(DeploymentBroadcastResponse._fetch_replica_results_async)
