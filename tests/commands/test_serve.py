"""`pensieve serve` as a process: its address, answers, shutdown, and refusals in one line."""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from absl import flags

from pensieve_jax import ConfigError, PensieveError
from pensieve_jax.commands import serve
from pensieve_jax.commands.engine_flags import engine_config
from pensieve_jax.commands.launch import EXIT_BAD_INPUT
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.main import EXIT_AT_ONCE, EXIT_INTERRUPTED
from tests.commands.terminal import Terminal
from tests.launching import ROOT, TINY_MODEL, Launch, load
from tests.server.unfinished import unfinished_request

TIMEOUT_S = 120
JSON = {"content-type": "application/json"}
SIZES = (
    "--gpu_pages=24",
    "--cpu_pages=8",
    "--max_num_running=8",
    "--max_num_batched_tokens=64",
    "--token_buckets=64",
)


class Server:
    """A started command and a client of it."""

    def __init__(self, *flags: str, program: Sequence[str] = (str(ROOT / "scripts" / "serve.py"),)) -> None:
        command = [sys.executable, "-W", "ignore", *program, "--port=0", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.line = self.process.stdout.readline()
        address = urlsplit(self.line.split()[-1])
        self.host, self.port = address.hostname, address.port

    def ask(self, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def chat(self, *contents: str, key: str = "") -> tuple[int, Any]:
        roles = ["user", "assistant"] * len(contents)
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
        body = {"messages": messages, "max_completion_tokens": 8, "temperature": 0, "model": TINY_MODEL}
        return self.ask("POST", "/v1/chat/completions", body, key)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.stdout.close()
        return self.process.wait(TIMEOUT_S)


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "keys"
    path.write_text(f"ada:{hashlib.sha256(b'first').hexdigest()}\n")
    return path


@pytest.fixture(scope="module")
def server(compilation_cache: str, keys_file: Path) -> Iterator[Server]:
    server = Server(
        f"--model={TINY_MODEL}",
        "--dtype=float32",
        f"--compilation_cache_dir={compilation_cache}",
        f"--api_keys_file={keys_file}",
        *SIZES,
    )
    yield server
    assert server.end() == 0


def test_it_prints_its_address_and_answers_at_once(server: Server) -> None:
    assert server.line == f"serving {TINY_MODEL} at http://127.0.0.1:{server.port}\n"
    assert server.ask("GET", "/ready")[0] == 200
    status, answer = server.chat("Hello", key="first")
    assert status == 200, answer
    reply = answer["choices"][0]["message"]["content"]
    status, answer = server.chat("Hello", reply, "And now?", key="first")
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_the_front_end_process_does_not_import_jax(server: Server) -> None:
    assert "jaxlib" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_keys_are_reloaded_on_sighup(server: Server, keys_file: Path) -> None:
    assert server.chat("Hello", key="second")[0] == 401
    with keys_file.open("a") as file:
        file.write(f"bob:{hashlib.sha256(b'second').hexdigest()}\n")
    server.process.send_signal(signal.SIGHUP)
    while server.chat("Hello", key="second")[0] == 401:
        pass
    assert server.chat("Hello", key="second")[0] == 200


def test_sighup_does_not_end_a_server_that_starts(compilation_cache: str, keys_file: Path) -> None:
    """A reload of the keys may come at any import; it must not end the process."""
    server = Server(
        f"--model={TINY_MODEL}",
        "--dtype=float32",
        f"--compilation_cache_dir={compilation_cache}",
        f"--api_keys_file={keys_file}",
        *SIZES,
        program=("-m", "tests.commands.hangups", "serve"),
    )
    assert server.ask("GET", "/ready")[0] == 200
    assert server.chat("Hello", key="first")[0] == 200
    assert server.end() == 0


@pytest.mark.long  # a separate start
def test_a_key_of_the_environment_is_required_and_not_inherited(
    compilation_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSIEVE_API_KEY", "only-key")
    cache = f"--compilation_cache_dir={compilation_cache}"
    server = Server(TINY_MODEL, "--dtype=float32", cache, *SIZES)
    assert server.line.startswith(f"serving {TINY_MODEL} at ")
    assert server.chat("Hello")[0] == server.chat("Hello", key="other")[0] == 401
    status, answer = server.chat("Hello", key="only-key")
    assert status == 200, answer
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    assert children
    for child in children:
        assert b"only-key" not in Path(f"/proc/{child}/environ").read_bytes()
    server.process.send_signal(signal.SIGINT)
    server.process.stdout.close()
    assert server.process.wait(TIMEOUT_S) == EXIT_INTERRUPTED


@pytest.mark.parametrize("most", [0, -1])
def test_a_limits_error_names_its_flag(launch: Launch, most: int) -> None:
    with pytest.raises(ConfigError, match=f"--max_turns_per_key is {most}, but must be at least 1"):
        launch("serve", shared_llm=False, max_turns_per_key=most)


def test_a_limit_of_keys_needs_keys(launch: Launch) -> None:
    """Without keys it would do nothing."""
    with pytest.raises(
        ConfigError, match="--max_turns_per_key is 9, but must be left out without keys; give"
    ):
        launch("serve", shared_llm=False, max_turns_per_key=9, port=0, model="/no/such/model")


def settings_of(launch: Launch, **values: str) -> ServerSettings:
    module = load("serve")
    module.define_flags()
    flags.FLAGS(["test", *(f"--{name}={value}" for name, value in values.items())])
    return module.server_settings()


@pytest.mark.parametrize(("text", "num_bytes"), [("2GiB", 2**31), ("70000", 70_000), ("1.5 MB", 1_500_000)])
@pytest.mark.parametrize("name", ["max_stored_bytes_per_key", "max_index_bytes"])
def test_numbers_of_bytes_have_units(launch: Launch, name: str, text: str, num_bytes: int) -> None:
    assert getattr(settings_of(launch, **{name: text}), name) == num_bytes


def test_a_number_of_bytes_that_is_none_names_its_flag(launch: Launch) -> None:
    with pytest.raises(
        ConfigError, match="--max_stored_bytes_per_key is 'much', but must be a number of bytes"
    ):
        settings_of(launch, max_stored_bytes_per_key="much")


def test_invalid_options_are_refused(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            launch("serve", shared_llm=False, port=port)
    with pytest.raises(ConfigError, match="api_keys_file"):
        launch("serve", shared_llm=False, host="0.0.0.0")
    for given, words in (
        ({"replicas": 0}, "--replicas is 0, but must be an integer of at least 1"),
        ({"replicas": 2}, "--history is None, but must be postgresql://"),
        (
            {"replicas": 2, "history": "chats.sqlite"},
            "--history is 'chats.sqlite', but must be postgresql://",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            launch("serve", shared_llm=False, **given)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find_spec(name)
    )
    words = r"^pensieve serve needs uvicorn: pip install '\.\[server\]' in the checkout\.$"
    with pytest.raises(PensieveError, match=words):
        launch("serve", shared_llm=False)


@pytest.mark.parametrize("origin", ["foo", "http://", "https://a.example/", "http://a b", "null"])
def test_an_origin_is_one_that_a_browser_sends(launch: Launch, origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origin"):
        launch("serve", shared_llm=False, cors_origin=origin)


@pytest.mark.parametrize(
    "origin", ["*", "https://a.example", "http://localhost:3000", "http://[::1]:80", "app://x"]
)
def test_origins_that_browsers_send_are_taken(origin: str) -> None:
    assert ServerSettings(cors_origin=(origin,)).cors_origin == (origin,)


@pytest.mark.long
def test_an_engines_refusal_is_reported_in_a_line() -> None:
    command = [sys.executable, "-W", "ignore", "scripts/serve.py", "--model=/no/such/model", "--port=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == EXIT_BAD_INPUT and done.stdout == ""
    (told,) = done.stderr.splitlines()
    assert "/no/such/model" in told


@pytest.mark.parametrize(
    ("given", "cpu_bytes", "cpu_pages"),
    [
        ({}, None, None),
        ({"cpu_bytes": "2GiB"}, 2**31, None),
        ({"cpu_pages": 7}, None, 7),
        ({"cpu_pages": 0}, None, 0),
        ({"cpu_pages": 0, "cpu_bytes": "2GiB"}, 2**31, 0),
    ],
)
def test_host_memory_is_derived_unless_it_is_given(
    launch: Launch,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    cpu_bytes: int | None,
    cpu_pages: int | None,
) -> None:
    configs = []
    monkeypatch.setattr(serve, "serve", lambda: configs.append(engine_config()) or 0)
    assert launch("serve", shared_llm=False, **given) == 0
    assert (configs[0].cache.cpu_bytes, configs[0].cache.cpu_pages) == (cpu_bytes, cpu_pages)


@pytest.mark.long  # a separate start
def test_on_a_terminal_the_log_is_readable_and_a_second_interrupt_is_quiet(compilation_cache: str) -> None:
    flags = [f"--model={TINY_MODEL}", "--dtype=float32", f"--compilation_cache_dir={compilation_cache}"]
    command = [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "serve.py"), "--port=0", *flags, *SIZES]
    with Terminal(command, root=ROOT, environment=os.environ) as terminal:
        told = terminal.see("serving ")
        assert "KV cache: " in told and " in host memory (256 tokens)" in told
        found = re.search(r"http://([\d.]+):(\d+)", terminal.see("conversations are deleted at the end"))
        assert found is not None
        connection = http.client.HTTPConnection(found[1], int(found[2]), timeout=TIMEOUT_S)
        fields = {"max_tokens": 400, "ignore_eos": True, "stream": True}
        body = {"messages": [{"role": "user", "content": "Hello"}], **fields}
        for number in (1, 2):
            connection.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
            response = connection.getresponse()
            assert response.status == 200
            if number == 1:
                response.read()
                terminal.see("POST /v1/chat/completions 200, ")
        with unfinished_request(found[1], int(found[2])):  # the turn may end before the second key
            terminal.type("\x03")
            terminal.see("draining: running turns get 30 s")
            terminal.type("\x03")
            connection.close()
            assert terminal.wait() == EXIT_AT_ONCE
        assert "Traceback" not in terminal.shown and "rror" not in terminal.shown
