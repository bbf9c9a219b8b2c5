"""Front end and replicas as Ray Serve deployments.

Owns: the two actors, and their deployment options.
Does not know: turns, routes, or command lines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, Final, cast

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp

from pensieve_jax.balance.ring import NUM_VIRTUAL_NODES
from pensieve_jax.core.errors import ConfigError, EngineClosedError
from pensieve_jax.history.reader import HistoryReader
from pensieve_jax.server.app import make_application
from pensieve_jax.server.async_engine import EngineService
from pensieve_jax.server.engine_process.async_llm import AsyncEngine
from pensieve_jax.server.engine_process.messages import Call
from pensieve_jax.server.http.keys import ApiKeys
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.logs import LogFormat, log_to, log_uncaught
from pensieve_jax.server.main import Listening
from pensieve_jax.server.replicas.links import (
    REPORT,
    ReplicaReport,
    decoded_answer,
    decoded_replica_report,
    encoded,
)
from pensieve_jax.server.replicas.placement import RootPlacer
from pensieve_jax.server.replicas.plan import FLUSH_S, ReplicaPlan, plan_of
from pensieve_jax.server.replicas.ray_replicas import RayReplicas, router_hash
from pensieve_jax.server.replicas.replica import Replica
from pensieve_jax.server.replicas.report_stream import ReplyTo, ReportLinks, ReportListener
from pensieve_jax.server.replicas.retry import stored_outputs
from pensieve_jax.server.replicas.routed_engine import RoutedEngine
from pensieve_jax.server.replicas.scaling import QUEUED_TOKENS
from pensieve_jax.server.replicas.serve_middleware import ChunkRateLimiter, ProxyRequestIdMiddleware
from pensieve_jax.server.sockets import bind_in_time
from pensieve_jax.server.watchdog import SILENCE_S, Watchdog

_log = logging.getLogger(__name__)

REPLICA: Final = "EngineReplica"
FRONT: Final = "Front"
_LOOPBACK: Final = "127.0.0.1"
_ROUTER: Final = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
ROUTER_OPTIONS: Final = {"num_virtual_nodes": NUM_VIRTUAL_NODES, "num_fallback_replicas": 1}
_HEALTH_S: Final = 2.0
_SILENCE_S: Final = 10.0
"""Timeout of a health check. Serve replaces an actor after three timeouts in a row. Engines run in separate
processes, so an actor is never busy for that long."""
# Serve and this code share one event loop. They only wait and never compute, and every hop to another thread
# would delay a token.
_ENVIRONMENT: Final = {
    "env_vars": {
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    }
}
_MAX_REQUESTS: Final = 100_000  # practically no limit; the application refuses excess requests itself
_DRAIN_POLL_S: Final = 0.2
"""Interval at which Serve checks whether the requests of a stopping actor have ended. Serve always waits for
at least one interval, which is two seconds by default."""
_LOGGING: Final = LoggingConfig(enable_access_log=False)  # the front end logs requests itself


class EngineReplica:
    """Actor with one engine, which runs in a separate process."""

    async def __init__(self, plan: ReplicaPlan) -> None:  # type: ignore[misc]
        """Start the engine; raises the error of a failed start, and Serve tries again."""
        _log_as(plan.log_format)
        self._engine = AsyncEngine.start(
            plan.model,
            dtype=plan.dtype,
            history=plan.history,
            config=plan.config,
            progress=False,
            log_format=plan.log_format,
        )
        await self._engine.open()
        self._watchdog = Watchdog(self._engine, SILENCE_S)
        self._links = ReportLinks()
        name = serve.get_replica_context().replica_id.unique_id
        self._replica = Replica(cast(EngineService, self._engine), name)

    async def run(self, submission: bytes, front: ReplyTo, number: int) -> None:
        """Run turns as `Replica.run` and send the reports to a stream of the front end; return at its end."""
        link = await self._links.to(front)
        with link.stream(number) as stream:
            async with aclosing(self._replica.run(submission)) as lines:
                async for line in lines:
                    await stream.send(line)
            await stream.send(b"")

    async def ask(self, question: bytes) -> bytes:
        """Return the encoded `Answer` to an encoded `Call` or `Apply`."""
        return await self._replica.ask(question)

    async def check_health(self) -> None:
        """Raise EngineClosedError if the engine is not restarted any more; Serve then replaces this replica.

        A hanging engine is killed and restarted.
        """
        if self._engine.gave_up.is_set():
            raise EngineClosedError("The engine died too often, or its history is unusable; see the log.")
        self._watchdog.look()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metric of the autoscaling policy."""
        return {QUEUED_TOKENS: float(self._replica.queued_tokens)}

    async def __del__(self) -> None:
        """Stop the engine. Serve has already waited for the turns."""
        if hasattr(self, "_engine"):
            await self._engine.close()
        if hasattr(self, "_links"):
            self._links.close()


class Front:
    """Actor that serves HTTP: the same application as a single server, over all replicas."""

    async def __init__(  # type: ignore[misc]
        self,
        handle: Any,
        settings: ServerSettings,
        log_format: LogFormat | None,
        address: tuple[str, int] | None = None,
    ) -> None:
        """Wait until a replica is ready, and listen at `address`. Without one, Serve's proxies listen.

        Raises ConfigError for invalid keys or an address in use, HistoryError, and OSError if it cannot
        listen for the replicas' reports.
        """
        _log_as(log_format)
        self._settings = settings
        self._keys = ApiKeys(settings.api_keys_file, settings.api_key_sha256)
        # A front end that hung may still hold the address, for as long as Serve waits for its end.
        socket_ = None if address is None else await bind_in_time(*address, settings.drain_s + FLUSH_S)
        self._listener = ReportListener()
        # With an address, all actors are on this machine.
        host = _LOOPBACK if address is not None else ray.util.get_node_ip_address()
        replicas = RayReplicas(handle, self._listener, await self._listener.listen(host))
        first = await _first_report(replicas)
        assert first.info is not None
        info = first.info
        reader = HistoryReader(info.history, fingerprint=info.fingerprint)
        self._placer = RootPlacer(router_hash)
        self._engine = RoutedEngine(replicas, first, stored_outputs(reader), self._placer)
        await self._engine.refresh()
        self._watch = asyncio.ensure_future(self._engine.watch())
        self._http = None
        if socket_ is not None:  # per chunk of a stream, a proxy would cost more than the whole front end
            self._http = Listening(self._application(), socket_)
            await self._http.begun()

    async def check_health(self) -> None:
        """Raise if the replica watch or the HTTP server has ended; Serve then replaces this front end."""
        if self._watch.done():
            raise EngineClosedError("The front end stopped watching its replicas; see the log.")
        if self._http is not None:
            self._http.check()

    async def __del__(self) -> None:
        """Drain when Serve replaces this front end; Serve does not count requests that bypass its proxies."""
        if hasattr(self, "_http"):
            await self.drain(self._settings.drain_s)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the ASGI application for Serve's proxies."""
        return ProxyRequestIdMiddleware(ChunkRateLimiter(self._application()))

    async def drain(self, seconds: float) -> None:
        """Accept no more turns and wait for the running ones; cancel them after `seconds`."""
        await self._engine.drain(seconds)
        if self._http is not None:
            await self._http.end()
        self._listener.close()

    async def memory_in_words(self) -> list[str]:
        """Return a line about the KV cache of each ready replica."""
        return self._engine.memory_in_words

    async def reload_keys(self) -> str | None:
        """Reload the keys file. Return None, or the error, in which case the keys are unchanged."""
        try:
            self._keys.reload()
        except ConfigError as error:
            return str(error)
        return None

    # Private methods

    def _application(self) -> ASGIApp:
        engine = cast(EngineService, self._engine)
        return make_application(engine, self._settings, self._keys, root_for=self._placer.new_root)


def _log_as(log_format: LogFormat | None) -> None:
    if log_format is not None:
        log_to(log_format=log_format)
        log_uncaught()


async def _first_report(replicas: RayReplicas) -> ReplicaReport:
    """Return the report of the first ready replica, for which Serve's router waits."""
    answer = decoded_answer(await replicas.ask("", encoded(Call(0, REPORT, []))))
    return decoded_replica_report(answer.value)


def application(
    plan: ReplicaPlan, settings: ServerSettings, num_gpus: int, address: tuple[str, int] | None = None
) -> serve.Application:
    """Return the Serve application of front end and replicas; see `Front` for `address`."""
    max_ongoing = plan.max_ongoing(settings)
    replica = _deployment(EngineReplica, REPLICA).options(
        num_replicas=plan.replicas,
        max_ongoing_requests=max_ongoing,
        graceful_shutdown_timeout_s=plan.shutdown_s(settings),
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_SILENCE_S,
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTER,  # type: ignore[arg-type]  # Ray accepts an import path
            request_router_kwargs=ROUTER_OPTIONS,
        ),
        ray_actor_options={"num_cpus": plan.num_cpus, "num_gpus": num_gpus, "runtime_env": _ENVIRONMENT},
        logging_config=_LOGGING,
    )
    front = _deployment(serve.ingress()(Front) if address is None else Front, FRONT).options(
        num_replicas=1,
        max_ongoing_requests=_MAX_REQUESTS,
        graceful_shutdown_timeout_s=settings.drain_s,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_SILENCE_S,
        ray_actor_options={"num_cpus": 0, "runtime_env": _ENVIRONMENT},
        logging_config=_LOGGING,
    )
    return front.bind(replica.bind(plan.per_replica()), settings, plan.log_format, address)


def _deployment(actor: type, name: str) -> serve.Deployment:
    """Return a deployment of an actor class. The cast is needed because its constructor is asynchronous."""
    return cast(serve.Deployment, serve.deployment(actor, name=name))


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """Build the application for a Serve configuration file; raises ConfigError for invalid `args`.

    The file sets the number of replicas in `deployments`, because a change of `args` restarts all replicas.
    """
    plan, settings = plan_of(args)
    return application(plan, settings, plan.gpus_each(int(ray.cluster_resources().get("GPU", 0))))
