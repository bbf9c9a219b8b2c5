"""Command lines that are refused: in one line, with our name of a flag, and before JAX is imported."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from absl import flags

from pensieve_jax import ConfigError
from pensieve_jax.commands import api_key, foreign_flags
from pensieve_jax.commands.main import COMMANDS
from tests.launching import ROOT, Launch, load

_REPORT = """
import json, signal, sys, time
from pensieve_jax.commands.main import main
sys.argv = json.loads(sys.argv[1])
try:
    main()
except SystemExit as ended:
    print(json.dumps([ended.code, "jax" in sys.modules, time.process_time()]))
"""


def refused(*arguments: str, **environment: str) -> str:
    """Return the only lines of a command that is refused without JAX in less than a second of CPU time."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _REPORT, json.dumps(["pensieve", *arguments])],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    status, imported_jax, cpu_s = json.loads(done.stdout)
    assert status == 2 and done.stderr.startswith("error: "), done.stderr
    assert not imported_jax
    assert cpu_s < 1.0
    return done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag(command: str) -> None:
    assert "Unknown command line flag 'nope'" in refused(command, "--nope")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "--max-model-len=4096"), "'max-model-len'. Here it is --max_context_tokens."),
        (("serve", "--api-key=hunter2"), "'api-key'. Here it is --api_key."),
        (("chat", "-c", "4096"), "'c'. Here it is --max_context_tokens."),
        (("chat", "--gpu_pages=0"), "cache.gpu_pages is 0"),
        (("chat", "--top_p=7"), "top_p is 7.0"),
        (("chat", "/no/such/model"), "there is no such directory"),
        (("generate", "--input=/none", "--output=o"), "--input is '/none'"),
        (("serve", "/no/such/model"), "there is no such directory"),
        (("serve", "chat", "--model=chat"), "--model is 'chat', but must be left out"),
        (("serve", "one", "two"), "model is 'one two', but must be one name"),
        (("serve", "--port=99999"), "port is 99999"),
        (("serve", "--max_num_running=0"), "scheduler.max_num_running is 0"),
        (("demo", "--model=/no/such/model"), "there is no such directory"),
        (("demo", "/no/such/model"), "there is no such directory"),
        (("demo", "--gpu_pages=1"), "cache.gpu_pages is 1"),
        (("demo", "--cpu_pages=-1"), "cache.cpu_pages is -1"),
        (("profile", "one", "two"), "model is 'one two', but must be one name"),
        (("profile", "--output=/no/such/file"), "--output is '/no/such/file'"),
    ],
)
def test_what_needs_no_device_is_refused_at_once(arguments: tuple[str, ...], words: str) -> None:
    text = refused(*arguments)
    assert words in text and "hunter2" not in text


def test_a_used_port_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"127.0.0.1:{port}" in refused("serve", f"--port={port}")


def test_the_model_of_a_batch_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"turns": [{"prompt": [5]}]}\n')
    files = f"--input={tmp_path / 'in.jsonl'}", f"--output={tmp_path / 'out.jsonl'}"
    assert "there is no such directory" in refused("generate", "/no/such/model", *files)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    assert "the directory has no config.json and no weights" in refused("chat", str(tmp_path))


@pytest.fixture
def defined(launch: Launch) -> Iterator[None]:
    """Define the flags of `serve`, and forget them afterwards."""
    load("serve").define_flags()
    yield


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("max-model-len", "max_context_tokens"),
        ("gpu-memory-utilization", "gpu_memory_fraction"),
        ("tensor-parallel-size", "tensor_parallel_size"),
        ("max-num-seqs", "max_num_running"),
        ("served-model-name", "served_model_name"),
        ("kv-cache-dtype", "kv_dtype"),
        ("ctx-size", "max_context_tokens"),
        ("mem-fraction-static", "gpu_memory_fraction"),
        ("api_key_file", "api_keys_file"),
        ("num_ctx", "max_context_tokens"),
    ],
)
def test_a_flag_of_another_server_is_translated(defined: None, name: str, ours: str) -> None:
    assert foreign_flags.hint(name) == f"Unknown command line flag '{name}'. Here it is --{ours}."


def test_every_translation_is_a_flag_of_a_command(launch: Launch) -> None:
    known: set[str] = set()
    for command in ("serve", "chat", "generate"):
        before = set(flags.FLAGS)
        load(command).define_flags()
        known |= set(flags.FLAGS)
        for name in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, name)
    assert set(foreign_flags.OURS.values()) <= known
    assert not foreign_flags.OURS.keys() & known, "these need no translation"
    assert not foreign_flags.OURS.keys() & foreign_flags.EXPLAINED.keys()


def test_what_needs_no_flag_and_what_is_unknown(defined: None) -> None:
    assert "--nostateful keeps none" in (foreign_flags.hint("enable-prefix-caching") or "")
    assert "model stays loaded" in (foreign_flags.hint("keep-alive") or ""), "--idle_ttl_s deletes histories"
    assert foreign_flags.hint("max_new_tokens") is None, "serve has no --max_tokens"
    assert foreign_flags.hint("colour") is None


@pytest.fixture
def key(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Return the function that reads the key, given flags and the variable."""

    def key(variable: str | None = None, **values: str) -> str | None:
        monkeypatch.delenv(api_key.VARIABLE, raising=False)
        if variable is not None:
            monkeypatch.setenv(api_key.VARIABLE, variable)
        load("serve").define_flags()
        flags.FLAGS(["test", *(f"--{name}={value}" for name, value in values.items())])
        return api_key.take_api_key()

    return key


_SHA256_OF_SECRET = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"


def test_the_key_is_read_once_and_only_its_digest_remains(key: Launch) -> None:
    assert key("secret") == _SHA256_OF_SECRET
    assert api_key.VARIABLE not in os.environ, "an engine process would inherit it"


def test_the_key_of_the_flag(key: Launch) -> None:
    assert key(api_key="secret") == _SHA256_OF_SECRET


def test_no_key(key: Launch) -> None:
    assert key() is None


@pytest.mark.parametrize(
    ("variable", "values", "words"),
    [
        ("secret", {"api_key": "secret"}, "--api_key is .* left out while PENSIEVE_API_KEY is set"),
        ("secret", {"api_keys_file": "keys"}, "PENSIEVE_API_KEY is .* left out beside --api_keys_file"),
        ("", {}, "PENSIEVE_API_KEY is .* at least one character"),
        ("two secrets", {}, "none of them blank"),
        (None, {"api_key": "secret\u00e9"}, "--api_key is .* all of them ASCII"),
    ],
)
def test_a_key_that_cannot_be_used_is_refused_and_not_shown(
    key: Launch, variable: str | None, values: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        key(variable, **values)
    assert "secret" not in str(refusal.value)


def test_ctrl_c_while_a_command_imports_is_one_line() -> None:
    """The imports of a command take seconds; a KeyboardInterrupt there would show a trace."""
    code = (
        "import signal, sys; from pensieve_jax.commands import main\n"
        "sys.argv = ['pensieve', 'chat']\n"
        "main.importlib.import_module = lambda name: signal.raise_signal(signal.SIGINT)\n"
        "main.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "interrupted\n")


@pytest.mark.parametrize("name", ["_xla_gc_callback", "__del__"])
def test_ctrl_c_is_not_lost_where_python_drops_exceptions(name: str) -> None:
    """Once, `pensieve generate` continued: the interrupt fell into JAX's callback of garbage collections."""
    code = (
        "import gc, signal, threading\n"
        "from pensieve_jax.commands.launch import run\n"
        f"def {name}(*_): signal.raise_signal(signal.SIGINT)\n"
        "def main():\n"
        f"    {'gc.callbacks.append(_xla_gc_callback)' if name[1] == 'x' else 'class A: pass'}\n"
        f"    {'gc.collect()' if name[1] == 'x' else 'A.__del__ = __del__; A()'}\n"
        "    threading.Event().wait(60)\n"
        "    print('not interrupted')\n"
        "run(main)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "interrupted\n")


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_within_the_work_is_one_line(times: int) -> None:
    """A second one, while the first unwinds, changes nothing."""
    code = (
        "import signal, sys, threading\n"
        "from pensieve_jax.commands.launch import run\n"
        "def main():\n"
        "    threading.Thread(target=threading.Event().wait).start()  # a normal exit would wait for it\n"
        "    try: signal.raise_signal(signal.SIGINT)\n"
        f"    finally: {'signal.raise_signal(signal.SIGINT)' if times == 2 else 'pass'}\n"
        "run(main)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "interrupted\n")
