"""The configuration of a set of replicas: their number, resources, model and history.

Owns: the fields, their validation, and the sizes derived from them for Ray Serve.
Does not know: Ray, command lines, or where the fields come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pensieve_jax.config import MAX_NUM_RUNNING, CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.core.options import is_count, options_of
from pensieve_jax.history.opening import shown
from pensieve_jax.history.postgres_location import is_postgres
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.logs import LogFormat

FLUSH_S: Final = 10.0
"""Time that a replica gets to stop its engine, in addition to the time for its turns."""
_POSTGRES: Final = "postgresql://USER@HOST/DATABASE, which replicas can share"
_NO_KEYS: Final = "allow_no_keys"
"""Field of `server` in a file. It allows every client of Serve's proxies to read and delete everything."""
_PER_KEY: Final = "max_in_flight_per_key"
_GROUPS: Final = {"cache": CacheConfig, "scheduler": SchedulerConfig, "runner": RunnerConfig}


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    """Configuration of the replicas of one model.

    Attributes:
      history: a Postgres URL.
      model, dtype, config, log_format: the arguments of `AsyncEngine.start` for each engine.
      replicas: the number of replicas. A Serve configuration file sets it elsewhere, in `deployments`, where
        it can be changed later.
      num_gpus: GPUs per replica. None means `tensor_parallel_size`, or 0 on a machine without GPUs.
      num_cpus: CPUs that Ray reserves for each replica.
    """

    history: str
    model: str
    dtype: str = "auto"
    config: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    log_format: LogFormat | None = None
    replicas: int = 2
    num_gpus: int | None = None
    num_cpus: float = 1.0

    def __post_init__(self) -> None:
        """Raise ConfigError for an invalid field."""
        if not is_count(self.replicas, 1):
            raise ConfigError("--replicas", self.replicas, "an integer of at least 1")
        if not is_postgres(self.history):
            history = None if self.history is None else shown(self.history)
            raise ConfigError("--history", history, _POSTGRES, "files cannot be shared; see docs/replicas.md")
        size = self.config.runner.tensor_parallel_size
        if self.num_gpus is not None and not (is_count(self.num_gpus, 0) and self.num_gpus in (0, size)):
            raise ConfigError("num_gpus", self.num_gpus, f"0, or tensor_parallel_size, {size}")

    def gpus_each(self, num_there: int) -> int:
        """Return the GPUs that Ray reserves for each replica on machines with `num_there` GPUs in total."""
        size = self.config.runner.tensor_parallel_size
        return self.num_gpus if self.num_gpus is not None else size if num_there or size > 1 else 0

    def check_gpus(self, num_there: int) -> None:
        """Raise ConfigError if there are too few GPUs for the replicas."""
        wanted = self.gpus_each(num_there)
        if wanted * self.replicas > num_there:
            limit = f"at most {num_there // wanted}: there are {num_there} GPUs for {wanted} each"
            raise ConfigError("--replicas", self.replicas, limit, "lower it, or tensor_parallel_size")

    def per_replica(self) -> ReplicaPlan:
        """Return the plan for one replica, without the number of replicas.

        Serve restarts all replicas when their arguments change, so the arguments must not depend on it.
        """
        names = ("history", "model", "dtype", "config", "log_format")
        return ReplicaPlan(**{name: getattr(self, name) for name in names})

    def max_ongoing(self, settings: ServerSettings) -> int:
        """Return the concurrent requests that a replica accepts: running turns, waiting turns, and calls."""
        most = self.config.scheduler.max_num_running or MAX_NUM_RUNNING  # a replica may derive fewer
        return most * (1 + settings.queue_per_running) + 16

    def shutdown_s(self, settings: ServerSettings) -> float:
        """Return how long Serve waits for a replica that it stops."""
        return settings.drain_s + FLUSH_S


def config_of(values: Mapping[str, Any]) -> EngineConfig:
    """Build the configuration from flat field names, which are the flag names; raises ConfigError."""
    left = dict(values)
    buckets = left.get("token_buckets")
    if buckets and "max_num_batched_tokens" not in left:
        left["max_num_batched_tokens"] = buckets[-1]
    groups: dict[str, Any] = {}
    for group, kind in _GROUPS.items():
        groups[group] = kind(**_pop_fields(kind, left))
    own = _pop_fields(EngineConfig, left)
    if left:
        name, value = next(iter(left.items()))
        raise ConfigError(f"engine.{name}", value, "omitted, as there is no such field", "see docs/using.md")
    return EngineConfig(**own, **groups)


def _pop_fields(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of a class from `values` and return them, with lists as tuples."""
    names = [option.name for option in options_of(kind) if option.name not in _GROUPS]
    found = {name: values.pop(name) for name in names if name in values}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def plan_of(arguments: Mapping[str, Any]) -> tuple[ReplicaPlan, ServerSettings]:
    """Parse the `args` of a Serve configuration file: fields of the plan, `engine` and `server`.

    Raises ConfigError. This function does not see the address of the proxies, so it cannot tell whether they
    are public. Therefore it requires API keys, or `allow_no_keys`.
    """
    given = dict(arguments)
    config = config_of(given.pop("engine", None) or {})
    server = {"chat_history": "durable", **(given.pop("server", None) or {})}
    plan_names = {field.name for field in dataclasses.fields(ReplicaPlan)} - {"config", "replicas"}
    setting_names = {field.name for field in dataclasses.fields(ServerSettings)} | {_NO_KEYS}
    for where, names, values in (("args", plan_names, given), ("args.server", setting_names, server)):
        for name in values:
            if name not in names:
                raise ConfigError(f"{where}.{name}", values[name], f"one of {', '.join(sorted(names))}")
    for name in ("history", "model"):
        if name not in given:
            raise ConfigError(f"args.{name}", None, "given", "see deploy/ray_serve.yaml")
    wants_keys = server.pop(_NO_KEYS, False) is not True
    if _PER_KEY in server and server.get("api_keys_file") is None:
        advice = "give args.server.api_keys_file"
        raise ConfigError(f"args.server.{_PER_KEY}", server[_PER_KEY], "left out without it", advice)
    as_tuples: Any = {
        name: tuple(value) if isinstance(value, list) else value for name, value in server.items()
    }
    settings, plan = ServerSettings(**as_tuples), ReplicaPlan(config=config, **given)
    if wants_keys and not settings.needs_keys:
        limit = f"given, or {_NO_KEYS}: true beside it"
        advice = "without keys, every client of Serve's proxies may read and delete everything"
        raise ConfigError("args.server.api_keys_file", None, limit, advice)
    return plan, dataclasses.replace(settings, is_routed=True)
