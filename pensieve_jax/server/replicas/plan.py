"""What whoever starts replicas chooses: how many, on what, over which history; and what follows from that.

Owns: the fields, which of them do not go together, and sizes that Ray Serve is told.
Does not know: Ray, command lines, or where the fields come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pensieve_jax.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.core.options import is_count, options_of
from pensieve_jax.history.opening import shown
from pensieve_jax.history.postgres_location import is_postgres
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.logs import LogFormat

FLUSH_S: Final = 10.0
"""What a replica gets beside its turns' time to end its engine."""
_POSTGRES: Final = "postgresql://USER@HOST/DATABASE, which replicas can share"
_NO_KEYS: Final = "allow_no_keys"
"""Of `server` in a file: that whoever reaches Serve's proxies may read and delete everything."""
_GROUPS: Final = {"cache": CacheConfig, "scheduler": SchedulerConfig, "runner": RunnerConfig}


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    """Replicas of one model.

    Attributes:
      history: a URL of Postgres.
      model, dtype, config, log_format: of each engine, as `AsyncEngine.start` takes them.
      replicas: how many there are; a configuration file of Serve says so where it can be changed later.
      num_gpus: of each replica; None: as many as share a layer, and none where there is no GPU.
      num_cpus: that Ray keeps for each replica.
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
        """Raise ConfigError for what cannot be."""
        if not is_count(self.replicas, 1):
            raise ConfigError("--replicas", self.replicas, "an integer of at least 1")
        if not is_postgres(self.history):
            history = None if self.history is None else shown(self.history)
            raise ConfigError("--history", history, _POSTGRES, "files are one engine's; see docs/replicas.md")
        size = self.config.runner.tensor_parallel_size
        if self.num_gpus is not None and not (is_count(self.num_gpus, 0) and self.num_gpus in (0, size)):
            raise ConfigError("num_gpus", self.num_gpus, f"0, or tensor_parallel_size, {size}")

    def gpus_each(self, num_there: int) -> int:
        """GPUs that Ray is to keep for a replica, where there are so many."""
        size = self.config.runner.tensor_parallel_size
        return self.num_gpus if self.num_gpus is not None else size if num_there or size > 1 else 0

    def check_gpus(self, num_there: int) -> None:
        """Raise ConfigError for more replicas than there are GPUs for."""
        wanted = self.gpus_each(num_there)
        if wanted * self.replicas > num_there:
            limit = f"at most {num_there // wanted}: there are {num_there} GPUs for {wanted} each"
            raise ConfigError("--replicas", self.replicas, limit, "lower it, or tensor_parallel_size")

    def of_one(self) -> ReplicaPlan:
        """What one replica must know: the same however many there are, or Serve would start all anew."""
        names = ("history", "model", "dtype", "config", "log_format")
        return ReplicaPlan(**{name: getattr(self, name) for name in names})

    def max_ongoing(self, settings: ServerSettings) -> int:
        """Requests that a replica takes: what runs, what waits for it, and questions beside them."""
        return self.config.scheduler.max_num_running * (1 + settings.queue_per_running) + 16

    def shutdown_s(self, settings: ServerSettings) -> float:
        """How long Serve waits for a replica that is to go."""
        return settings.drain_s + FLUSH_S


def config_of(values: Mapping[str, Any]) -> EngineConfig:
    """The configuration of fields by name, as flags name them, whatever group they are of; or ConfigError."""
    left = dict(values)
    buckets = left.get("token_buckets")
    if buckets and "max_num_batched_tokens" not in left:
        left["max_num_batched_tokens"] = buckets[-1]
    groups: dict[str, Any] = {}
    for group, kind in _GROUPS.items():
        groups[group] = kind(**_taken(kind, left))
    own = _taken(EngineConfig, left)
    if left:
        name, value = next(iter(left.items()))
        raise ConfigError(f"engine.{name}", value, "left out: there is no such field", "see docs/using.md")
    return EngineConfig(**own, **groups)


def _taken(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a class, which are no longer among the values then."""
    names = [option.name for option in options_of(kind) if option.name not in _GROUPS]
    found = {name: values.pop(name) for name in names if name in values}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def plan_of(arguments: Mapping[str, Any]) -> tuple[ReplicaPlan, ServerSettings]:
    """What a Serve configuration file says: fields of the plan, `engine` and `server`; raises ConfigError.

    Where the proxies listen stands elsewhere in the file, if at all, and is not told here: so there must be
    keys, or a word that nobody wants any.
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
    as_tuples: Any = {
        name: tuple(value) if isinstance(value, list) else value for name, value in server.items()
    }
    settings, plan = ServerSettings(**as_tuples), ReplicaPlan(config=config, **given)
    if wants_keys and settings.api_keys_file is None:
        limit = f"given, or {_NO_KEYS}: true beside it"
        advice = "without keys whoever reaches Serve's proxies may read and delete everything"
        raise ConfigError("args.server.api_keys_file", None, limit, advice)
    return plan, dataclasses.replace(settings, is_routed=True)
