"""Conversations over HTTP: an OpenAI-compatible server whose conversations are state.

    pensieve serve --model=chat --history=chats.sqlite --port=8000

One line of output says where, once the first request would be answered at once; in a browser there is a page
to chat on. A first start compiles for a minute or more, which the log says. The engine runs in a process of
its own, and is started again if that dies; conversations go on from the history then. Ctrl-C or SIGTERM lets
running turns end, for `--drain_s` seconds at most; a second one ends everything at once.

Without `--history`, conversations are kept in a private file that is removed at the end. Without
`--api_keys_file`, only this machine is served. State that leaves the device goes to host memory, of which
the server takes a gigabyte at its start unless `--cpu_bytes` or `--cpu_pages` says otherwise. docs/server.md
has the rest. It needs more than the library does: `pip install ".[server]"` in the checkout.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags

from pensieve_jax import ConfigError, PensieveError
from pensieve_jax.commands.engine_flags import (
    CACHE_DIR,
    define_engine_flags,
    engine_config,
    shows_progress,
)
from pensieve_jax.history.opening import shown
from pensieve_jax.history.postgres_location import is_postgres

if TYPE_CHECKING:
    from pensieve_jax.server.async_engine import EngineInfo
    from pensieve_jax.server.http.settings import ServerSettings

FLAGS = flags.FLAGS
flags.disclaim_key_flags()
_CPU_BYTES = "1GB"
_HISTORY = "Keeps the conversations: an SQLite file, or postgresql://...; default: a private file."
_EXTRA = ("msgspec", "prometheus_client", "starlette", "uvicorn", "uvloop")
_RAY_EXTRA = ("ray", "psycopg")
_OTEL_EXTRA = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


class MissingPackagesError(PensieveError):
    """What was asked for needs packages of an extra that is not installed."""

    def __init__(self, what: str, packages: Sequence[str], extras: str) -> None:
        """`what` needs all `packages`, which come with `extras`."""
        *most, last = packages
        named = f"{', '.join(most)} and {last}" if most else last
        super().__init__(f"{what} needs {named}: pip install '.[{extras}]' in the checkout.")


def main() -> int:
    """Serve until told to end; the exit status."""
    _need("pensieve serve", _EXTRA, "server")
    if FLAGS.otel_endpoint is not None:
        _need("--otel_endpoint", _OTEL_EXTRA, "server,otel")
    if FLAGS.replicas is not None:
        check_replicas(FLAGS.replicas, FLAGS.history)
        _need("--replicas", _RAY_EXTRA, "server,postgres,ray")
        return serve_many()
    return serve()


def check_replicas(replicas: int, history: str | None) -> None:
    """Raise ConfigError for a number that is none, or a history that replicas cannot share."""
    if replicas < 1:
        raise ConfigError("--replicas", replicas, "an integer of at least 1")
    if not is_postgres(history):
        limit = "postgresql://USER@HOST/DATABASE beside --replicas"
        kept = None if history is None else shown(history)
        raise ConfigError("--history", kept, limit, "a file belongs to one engine")


def _need(what: str, packages: Sequence[str], extras: str) -> None:
    missing = [name for name in packages if not _is_installed(name)]
    if missing:
        raise MissingPackagesError(what, missing, extras)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even what it is a part of
        return False


def serve() -> int:
    """With everything installed; the exit status."""
    from pensieve_jax import AsyncEngine
    from pensieve_jax.server.app import make_application
    from pensieve_jax.server.http.keys import ApiKeys
    from pensieve_jax.server.logs import LOGGER, log_to, log_uncaught
    from pensieve_jax.server.main import bind, history_file, leave
    from pensieve_jax.server.main import serve as serve_until_told

    log_to(log_format=FLAGS.log_format)
    config = engine_config()
    settings = server_settings()
    keys = ApiKeys(settings.api_keys_file)

    def announce(engine: AsyncEngine, address: str) -> None:
        log_uncaught()  # from now on there are prompts, which an error might quote
        LOGGER.info("%s", sizes_in_words(engine.info))
        say_where(engine.info.model_name, address)

    with history_file(FLAGS.history) as history:
        start = functools.partial(
            AsyncEngine.start,
            FLAGS.model,
            dtype=FLAGS.dtype,
            history=history,
            config=config,
            progress=shows_progress(),
            log_format=FLAGS.log_format,
        )
        status = serve_until_told(
            start,
            functools.partial(make_application, settings=settings, keys=keys),
            bind(settings.host, settings.port),
            drain_s=settings.drain_s,
            announce=announce,
            on_hangup=keys.reload,
        )
    return leave(status)  # a private history is gone by now


def serve_many() -> int:
    """Several engines behind one address; the exit status."""
    from pensieve_jax.server.http.keys import ApiKeys
    from pensieve_jax.server.logs import log_to
    from pensieve_jax.server.replicas.plan import ReplicaPlan

    log_to(log_format=FLAGS.log_format)
    settings = server_settings(is_routed=True)
    ApiKeys(settings.api_keys_file)  # a bad file is told before minutes of loading
    plan = ReplicaPlan(
        history=FLAGS.history,
        model=FLAGS.model,
        dtype=FLAGS.dtype,
        config=engine_config(),
        log_format=FLAGS.log_format,
        replicas=FLAGS.replicas,
        num_cpus=0,  # they share this machine, however few processors it has
    )
    from pensieve_jax.server.replicas.local import serve_replicas

    return serve_replicas(plan, settings, functools.partial(say_where, FLAGS.model))


def say_where(model_name: str, address: str) -> None:
    """The line of output, and what somebody at a terminal should know next."""
    from pensieve_jax.server.logs import is_text

    print(f"serving {model_name} at {address}", flush=True)
    if is_text(FLAGS.log_format, sys.stderr):
        print(first_words(address, FLAGS.history), file=sys.stderr, flush=True)


def server_settings(*, is_routed: bool = False) -> ServerSettings:
    """What the flags say of HTTP; raises ConfigError."""
    from pensieve_jax.server.http.settings import ServerSettings

    if FLAGS.max_turns_per_key < 1:  # which the settings have under another name
        raise ConfigError("--max_turns_per_key", FLAGS.max_turns_per_key, "at least 1")
    return ServerSettings(
        host=FLAGS.host,
        port=FLAGS.port,
        api_keys_file=FLAGS.api_keys_file,
        cors_origin=tuple(FLAGS.cors_origin),
        allowed_hosts=tuple(FLAGS.allowed_hosts),
        served_model_name=FLAGS.served_model_name,
        chat_history=FLAGS.chat_history or ("durable" if is_routed else "memory"),
        otel_endpoint=FLAGS.otel_endpoint,
        max_index_bytes=FLAGS.max_index_bytes,
        tools=FLAGS.tools,
        drain_s=FLAGS.drain_s,
        max_in_flight_per_key=FLAGS.max_turns_per_key,
        is_routed=is_routed,
    )


def sizes_in_words(info: EngineInfo) -> str:
    """What sizes of memory are counted in, and how much of it there is."""
    cache = info.description["cache"]
    return (
        f"state of {info.chunk_tokens} tokens takes {info.chunk_bytes:,} bytes on the device, which has room "
        f"for {cache['gpu_pages']} times that, and {info.slot_bytes:,} in host memory, with room for "
        f"{cache['cpu_slots']} times"
    )


def first_words(address: str, history: str | None) -> str:
    """What somebody at a terminal should know next."""
    kept = f"kept in {shown(history)}" if history else "gone when this ends; --history=FILE keeps them"
    return (
        f"open that in a browser to chat; the API is {address}/v1; Ctrl-C ends it\nconversations are {kept}"
    )


def define_flags() -> None:
    """Define the command-line flags of `pensieve serve`."""
    flags.DEFINE_string("host", "127.0.0.1", "Address to listen at.")
    flags.DEFINE_integer("port", 8000, "Port to listen at; 0 takes a free one.")
    flags.DEFINE_string("api_keys_file", None, "Lines of owner:sha256 of a key; without, loopback only.")
    flags.DEFINE_multi_string(
        "cors_origin",
        [],
        "Pages of this origin may ask, such as https://chat.example.com.",
    )
    flags.DEFINE_list("allowed_hosts", [], "Names that clients may call this server by, beside localhost.")
    flags.DEFINE_string("served_model_name", None, "What /v1/models calls the model; default: as --model.")
    flags.DEFINE_enum(
        "chat_history",
        None,
        ["memory", "durable"],
        "Where turns of Chat Completions are kept; default: memory, or durable with --replicas.",
    )
    flags.DEFINE_enum(
        "tools", "refuse", ["refuse", "ignore"], "What becomes of requests that offer tools to the model."
    )
    flags.DEFINE_integer("max_turns_per_key", 64, "Turns that one key may have at a time.")
    flags.DEFINE_integer(
        "max_index_bytes", 256 * 2**20, "Of turns that the server remembers, to recognise resent messages."
    )
    flags.DEFINE_float("drain_s", 30.0, "Seconds that running turns get when the server is told to end.")
    flags.DEFINE_string(
        "otel_endpoint", None, "URL that takes spans of turns over OTLP; default: none are made."
    )
    flags.DEFINE_enum(
        "log_format",
        "auto",
        ["auto", "json", "text"],
        "Lines of the log; auto: text on a terminal, else JSON.",
    )
    flags.DEFINE_string("history", None, _HISTORY)
    flags.DEFINE_integer(
        "replicas",
        None,
        "Engines behind this address, on Ray Serve, each with a GPU of its own where there are any; default: "
        "one, without Ray.",
    )
    define_engine_flags()
    FLAGS.set_default("compilation_cache_dir", str(CACHE_DIR))
    FLAGS.set_default("cpu_bytes", _CPU_BYTES)
