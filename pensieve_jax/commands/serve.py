"""OpenAI-compatible HTTP server that keeps the KV cache of conversations.

    pensieve serve --history=chats.sqlite --port=8000
    pensieve serve path/to/model --history=chats.sqlite

When the server is ready, it prints one line with its address. A browser shows a chat page there. The first
start compiles for a minute or more, which the log reports. The engine runs in its own process, which is
restarted if it dies; conversations then continue from the history. Ctrl-C or SIGTERM stops the server when
running turns have finished, or after `--drain_s` seconds; a second one stops it at once.

Without `--history`, conversations are stored in a private file that is removed at the end. Without keys, only
this machine can connect: set PENSIEVE_API_KEY to a key, or give several by `--api_keys_file`. Weights and KV
cache take 90% of a GPU's memory, and on a CPU a part of the machine's (`--gpu_memory_fraction`,
`--gpu_pages`). What leaves the device goes to host memory (`--cpu_memory_fraction`, `--cpu_bytes`). The log
says what was taken. See docs/server.md for more.
The server needs additional packages: `pip install ".[server]"` in the checkout.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from pensieve_jax import ConfigError, PensieveError
from pensieve_jax.commands.api_key import define_api_key_flag, take_api_key
from pensieve_jax.commands.engine_flags import (
    check_engine_flags,
    define_engine_flags,
    engine_config,
    num_bytes,
    set_command_defaults,
    shows_progress,
    take_model_word,
)
from pensieve_jax.history.opening import shown
from pensieve_jax.history.postgres_location import is_postgres

if TYPE_CHECKING:
    import socket

    from pensieve_jax import AsyncEngine, EngineConfig
    from pensieve_jax.server.http.settings import ServerSettings

FLAGS = flags.FLAGS
flags.disclaim_key_flags()
_HISTORY = "Store of the conversations: an SQLite file, or postgresql://...; default: a private file."
_EXTRA = ("msgspec", "prometheus_client", "starlette", "uvicorn", "uvloop")
_RAY_EXTRA = ("ray", "psycopg")
_OTEL_EXTRA = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


class MissingPackagesError(PensieveError):
    """A requested feature needs packages of an extra that is not installed."""

    def __init__(self, what: str, packages: Sequence[str], extras: str) -> None:
        """Name the feature `what`, the missing packages, and the `extras` that install them."""
        *most, last = packages
        named = f"{', '.join(most)} and {last}" if most else last
        super().__init__(f"{what} needs {named}: pip install '.[{extras}]' in the checkout.")


def main() -> int:
    """Serve until stopped; return the exit status."""
    _need("pensieve serve", _EXTRA, "server")
    if FLAGS.otel_endpoint is not None:
        _need("--otel_endpoint", _OTEL_EXTRA, "server,otel")
    if FLAGS.replicas is not None:
        check_replicas(FLAGS.replicas, FLAGS.history)
        _need("--replicas", _RAY_EXTRA, "server,postgres,ray")
        return serve_many()
    return serve()


def check_replicas(replicas: int, history: str | None) -> None:
    """Raise ConfigError for an invalid number, or for a history that replicas cannot share."""
    if replicas < 1:
        raise ConfigError("--replicas", replicas, "an integer of at least 1")
    if not is_postgres(history):
        limit = "postgresql://USER@HOST/DATABASE with --replicas"
        history_shown = None if history is None else shown(history)
        raise ConfigError("--history", history_shown, limit, "several engines cannot share a file")


def _need(what: str, packages: Sequence[str], extras: str) -> None:
    missing = [name for name in packages if not _is_installed(name)]
    if missing:
        raise MissingPackagesError(what, missing, extras)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def serve(engine_class: type[AsyncEngine] | None = None) -> int:
    """Serve with one engine until stopped; return the exit status."""
    from pensieve_jax.server.sockets import bind

    # What can be refused is refused before the imports that take a second.
    settings = server_settings()
    config = check_engine_flags()
    with bind(settings.host, settings.port) as listening:
        return _serve_at(listening, settings, config, engine_class)


def _serve_at(
    listening: socket.socket,
    settings: ServerSettings,
    config: EngineConfig,
    engine_class: type[AsyncEngine] | None,
) -> int:
    from pensieve_jax import AsyncEngine
    from pensieve_jax.server.app import make_application
    from pensieve_jax.server.http.keys import ApiKeys
    from pensieve_jax.server.logs import LOGGER, flush_log, log_to, log_uncaught
    from pensieve_jax.server.main import history_file, leave
    from pensieve_jax.server.main import serve as serve_until_signal

    log_to(log_format=FLAGS.log_format)
    keys = ApiKeys(settings.api_keys_file, settings.api_key_sha256)

    def announce(engine: AsyncEngine, address: str) -> None:
        log_uncaught()  # from now on errors may quote prompts
        LOGGER.info("%s", engine.info.description["cache"]["summary"])
        flush_log()  # a terminal shows both streams, and this line must not end in the address
        announce_address(engine.info.model_name, address)

    with history_file(FLAGS.history) as history:
        start = functools.partial(
            (engine_class or AsyncEngine).start,
            FLAGS.model,
            dtype=FLAGS.dtype,
            history=history,
            config=config,
            progress=shows_progress(),
            log_format=FLAGS.log_format,
        )
        status = serve_until_signal(
            start,
            functools.partial(make_application, settings=settings, keys=keys),
            listening,
            drain_s=settings.drain_s,
            announce=announce,
            on_hangup=keys.reload,
        )
    return leave(status)  # after a private history was removed


def serve_many() -> int:
    """Serve with several engines behind one address; return the exit status."""
    from pensieve_jax.server.http.keys import ApiKeys
    from pensieve_jax.server.logs import log_to
    from pensieve_jax.server.replicas.plan import ReplicaPlan

    log_to(log_format=FLAGS.log_format)
    settings = server_settings(is_routed=True)
    ApiKeys(
        settings.api_keys_file, settings.api_key_sha256
    )  # raises for an invalid file, before minutes of loading
    plan = ReplicaPlan(
        history=FLAGS.history,
        model=FLAGS.model,
        dtype=FLAGS.dtype,
        config=engine_config().with_engines_on_host(FLAGS.replicas),
        log_format=FLAGS.log_format,
        replicas=FLAGS.replicas,
        num_cpus=0,  # so that Ray starts all replicas, even on a machine with few processors
    )
    from pensieve_jax.server.replicas.local import serve_replicas

    return serve_replicas(plan, settings, functools.partial(announce_address, FLAGS.model))


def announce_address(model_name: str, address: str) -> None:
    """Print the address, and to a terminal also the next steps."""
    from pensieve_jax.server.logs import is_text

    print(f"serving {model_name} at {address}", flush=True)
    if is_text(FLAGS.log_format, sys.stderr):
        print(next_steps(address, FLAGS.history), file=sys.stderr, flush=True)


def server_settings(*, is_routed: bool = False) -> ServerSettings:
    """Return the HTTP settings of the flags; raise ConfigError for invalid values."""
    from pensieve_jax.server.http.settings import ServerSettings

    if FLAGS.max_turns_per_key < 1:  # checked here, since the setting has another name
        raise ConfigError("--max_turns_per_key", FLAGS.max_turns_per_key, "at least 1")
    if FLAGS.api_keys_file is None and not FLAGS["max_turns_per_key"].using_default_value:
        limit = "left out without keys"
        raise ConfigError("--max_turns_per_key", FLAGS.max_turns_per_key, limit, "give --api_keys_file")
    return ServerSettings(
        host=FLAGS.host,
        port=FLAGS.port,
        api_keys_file=FLAGS.api_keys_file,
        api_key_sha256=take_api_key(),
        cors_origin=tuple(FLAGS.cors_origin),
        allowed_hosts=tuple(FLAGS.allowed_hosts),
        served_model_name=FLAGS.served_model_name,
        chat_history=FLAGS.chat_history or ("durable" if is_routed else "memory"),
        otel_endpoint=FLAGS.otel_endpoint,
        max_index_bytes=num_bytes("--max_index_bytes", FLAGS.max_index_bytes),
        tools=FLAGS.tools,
        tool_call_parser=FLAGS.tool_call_parser,
        reasoning_parser=FLAGS.reasoning_parser,
        drain_s=FLAGS.drain_s,
        max_in_flight_per_key=FLAGS.max_turns_per_key,
        budgets=_amounts("budgets"),
        key_budgets=_amounts("key_budgets"),
        max_stored_bytes_per_key=_stored_bytes(FLAGS.max_stored_bytes_per_key),
        max_conversations_per_key=FLAGS.max_conversations_per_key,
        max_responses_per_key=FLAGS.max_responses_per_key,
        idle_conversation_days=FLAGS.idle_conversation_days,
        confirm_clock=FLAGS.confirm_clock,
        is_routed=is_routed,
    )


def _stored_bytes(text: str | None) -> int | None:
    return None if text is None else num_bytes("--max_stored_bytes_per_key", text)


def _amounts(flag: str) -> dict[str, int]:
    """Return the numbers of a flag with entries NAME=NUMBER; raise ConfigError for other entries."""
    found: dict[str, int] = {}
    for entry in FLAGS[flag].value or ():
        name, _, amount = entry.partition("=")
        if not amount.isdecimal():
            raise ConfigError(f"--{flag}", entry, "NAME=NUMBER, such as maps=100")
        found[name] = int(amount)
    return found


def next_steps(address: str, history: str | None) -> str:
    """Return the next steps for a user at a terminal."""
    where_stored = (
        f"stored in {shown(history)}" if history else "deleted at the end; --history=FILE stores them"
    )
    return (
        f"open this address in a browser to chat; the API is {address}/v1; Ctrl-C stops the server\n"
        f"conversations are {where_stored}"
    )


def define_flags() -> None:
    """Define the command-line flags of `pensieve serve`."""
    flags.DEFINE_string("host", "127.0.0.1", "Address to listen at.")
    flags.DEFINE_integer("port", 8000, "Port to listen at; 0 takes a free one.")
    define_api_key_flag()
    flags.DEFINE_string("api_keys_file", None, "File with lines owner:sha256-of-key; default: loopback only.")
    flags.DEFINE_multi_string(
        "cors_origin",
        [],
        "Origin whose pages may send requests, such as https://chat.example.com.",
    )
    flags.DEFINE_list("allowed_hosts", [], "Host names that clients may use, besides localhost.")
    flags.DEFINE_string("served_model_name", None, "Model name in /v1/models; default: --model.")
    flags.DEFINE_enum(
        "chat_history",
        None,
        ["memory", "durable"],
        "Store of Chat Completions turns; default: memory, or durable with --replicas.",
    )
    flags.DEFINE_enum(
        "tools",
        "auto",
        ["auto", "functions", "ignore"],
        "Handling of requests that offer tools to the model.",
    )
    flags.DEFINE_integer("max_turns_per_key", 64, "Most concurrent turns of one key of --api_keys_file.")
    flags.DEFINE_list(
        "budgets", [], "What all requests together may hold, as NAME=NUMBER; docs/limits.md has the names."
    )
    flags.DEFINE_list("key_budgets", [], "What the requests of one key may hold, as --budgets.")
    flags.DEFINE_string(
        "max_stored_bytes_per_key",
        None,
        "Most stored bytes of one key, such as 20GiB; 0: no limit. Default with keys: 10 GiB.",
    )
    flags.DEFINE_integer(
        "max_conversations_per_key",
        None,
        "Most stored conversations of one key; 0: no limit. Default with keys: 100,000.",
    )
    flags.DEFINE_integer(
        "max_responses_per_key",
        None,
        "Most stored responses of one key; 0: no limit. Default with keys: 100,000.",
    )
    flags.DEFINE_integer(
        "idle_conversation_days",
        None,
        "Days after which a conversation that was not active is deleted; default: never.",
    )
    flags.DEFINE_string(
        "confirm_clock",
        None,
        "Today's date, such as 2026-11-30: the clock is right although it is far ahead of the history.",
    )
    flags.DEFINE_string(
        "max_index_bytes", "256MiB", "Memory for the index of turns that recognizes resent messages."
    )
    flags.DEFINE_float("drain_s", 30.0, "Seconds that running turns get to finish when the server stops.")
    flags.DEFINE_string("otel_endpoint", None, "OTLP URL that receives spans of turns; default: no spans.")
    flags.DEFINE_enum(
        "log_format",
        "auto",
        ["auto", "json", "text"],
        "Format of the log; auto: text on a terminal, otherwise JSON.",
    )
    flags.DEFINE_string("history", None, _HISTORY)
    flags.DEFINE_integer(
        "replicas",
        None,
        "Number of engines behind this address, on Ray Serve. Each has its own GPU, if there are any. "
        "Default: one engine, without Ray.",
    )
    define_engine_flags()
    set_command_defaults()
    take_model_word()
