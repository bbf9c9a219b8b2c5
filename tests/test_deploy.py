"""The commands of `deploy/` and of the pages: every flag, file and route in them exists."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from pensieve_jax.commands import serve
from pensieve_jax.commands.launch import EXIT_BAD_INPUT
from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.http.connections import HEAD_S, MAX_HEAD_BYTES
from pensieve_jax.server.http.ledger import DEFAULTS
from pensieve_jax.server.http.settings import MAX_BODY_BYTES, ServerSettings
from pensieve_jax.server.main import EXIT_DAMAGED, EXIT_ENDED
from tests.launching import ROOT, Launch

DEPLOY = ROOT / "deploy"
PAGE = ROOT / "docs" / "server.md"
LIMITS = ROOT / "docs" / "limits.md"
FILES = [*sorted(DEPLOY.iterdir()), PAGE]
_FLAG = re.compile(r"(?<![\w-])--([a-z]+(?:_[a-z]+)+|model|host|port|history)(?==|`|\s)")

_FLAG_OF_ROW = re.compile(r"`--(\w+)[=`]")


@pytest.fixture
def flags_of_serve(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    found: list[str] = []
    monkeypatch.setattr(serve, "serve", lambda: found.extend(serve.FLAGS) or 0)
    assert launch("serve", shared_llm=False) == 0
    return set(found)


def test_every_named_flag_exists_in_the_server(flags_of_serve: set[str]) -> None:
    named = {path.name: set(_FLAG.findall(without_programs(path))) for path in FILES}
    assert len(named["pensieve.service"]) >= 7 and len(named["Containerfile"]) >= 5
    assert {name: flags - flags_of_serve for name, flags in named.items() if flags - flags_of_serve} == {}


def test_the_page_lists_the_flags_that_only_the_server_has(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_anybody, define_engine_flags = set(serve.FLAGS), serve.define_engine_flags
    own: set[str] = set()

    def noted() -> None:
        own.update(set(serve.FLAGS) - of_anybody)
        define_engine_flags()

    monkeypatch.setattr(serve, "define_engine_flags", noted)
    monkeypatch.setattr(serve, "serve", lambda: 0)
    assert launch("serve", shared_llm=False) == 0
    rows = re.findall(r"^\| (`--[^|]*) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert sorted(_FLAG_OF_ROW.findall(" ".join(rows))) == sorted(own)


def without_programs(path: Path) -> str:
    """Return a page without the lab's programs, which have their own flags."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if "-m pensieve_lab.programs." not in line)


def test_the_unit_waits_longer_than_the_server_drains() -> None:
    unit = (DEPLOY / "pensieve.service").read_text(encoding="utf-8")
    drain_s = int(re.search(r"--drain_s=(\d+)", unit)[1])
    assert int(re.search(r"TimeoutStopSec=(\d+)", unit)[1]) > drain_s + 5


def test_the_unit_is_not_restarted_after_a_refused_start() -> None:
    """A damaged history is moved aside: the next start would serve an empty one."""
    unit = (DEPLOY / "pensieve.service").read_text(encoding="utf-8")
    assert re.search(r"^RestartPreventExitStatus=(\d+)$", unit, re.M)[1] == str(EXIT_BAD_INPUT)
    assert EXIT_DAMAGED == EXIT_BAD_INPUT != EXIT_ENDED


def test_a_reload_during_the_start_does_not_stop_the_unit() -> None:
    """systemd counts an end by SIGHUP as success, so `on-failure` would leave the unit down."""
    unit = (DEPLOY / "pensieve.service").read_text(encoding="utf-8")
    assert re.search(r"^ExecStart=/usr/bin/env --ignore-signal=HUP /", unit, re.M)
    assert re.search(r"^Restart=always$", unit, re.M)


def test_continued_commands_are_complete() -> None:
    """A comment or a blank after a line's backslash would end the command."""
    for path in DEPLOY.iterdir():
        lines = path.read_text(encoding="utf-8").splitlines()
        for line, following in itertools.pairwise(lines):
            assert not line.endswith("\\ "), path
            if line.endswith("\\") and not line.startswith("#"):
                assert following.strip() and not following.lstrip().startswith("#"), (path, line)


def test_the_container_has_the_files_that_it_copies_and_installs() -> None:
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    copied = [name for line in re.findall(r"^COPY (.*)$", text, re.M) for name in line.split()[:-1]]
    assert "pensieve_jax" in copied and all((ROOT / name).exists() for name in copied)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"EXTRAS=([\w,]+)", text)
    assert len(named) == 2 and {extra for words in named for extra in words.split(",")} <= set(extras)


def test_the_container_has_kuberays_probe_commands() -> None:
    """KubeRay runs `wget ... | grep success`: without these no pod gets ready, and each is killed."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    as_root, _, _ = text.partition("\nUSER ")
    assert re.search(r"^RUN apt-get update && apt-get install .*\bwget\b", as_root, re.M)


def test_routes_and_limits_of_the_page_match_the_server() -> None:
    page, limits = PAGE.read_text(encoding="utf-8"), LIMITS.read_text(encoding="utf-8")
    paths = {route.path for route in ROUTES}
    assert set(re.findall(r"^\| `(/\w+)` \|", page, re.M)) <= paths
    settings = ServerSettings()
    for words in (
        f"(`--max_turns_per_key`); no limit without keys | {settings.max_in_flight_per_key} |",
        f"| time in the queue | {settings.queue_timeout_s:g} s |",
        f"| request line and header fields | {MAX_HEAD_BYTES >> 10} KiB, within {HEAD_S:g} s |",
        f"| a body | {MAX_BODY_BYTES >> 20} MiB, within {settings.body_timeout_s:g} s |",
        f"| a client that reads nothing of its stream | {settings.stall_timeout_s:g} s |",
        f"| a silent stream | {settings.heartbeat_s:g} s |",
    ):
        assert words in limits
    for resource, budget in DEFAULTS.items():
        row = re.search(rf"^\| `{resource}`: [^|]* \| ([^|]*) \| ([^|]*) \|$", limits, re.M)
        assert row is not None and [_number(words) for words in row.groups()] == [budget.total, budget.of_key]
    assert settings.queue_per_running == 2, "the page says twice `max_num_running`"


def _number(words: str) -> int:
    number, _, unit = words.replace(",", "").partition(" ")
    return int(number) * {"": 1, "Mi": 2**20, "MiB": 2**20}[unit]


def test_nginx_always_passes_the_servers_name() -> None:
    """With --allowed_hosts, /metrics under the upstream's name gets 403."""
    text = re.sub(r"#.*", "", (DEPLOY / "nginx.conf").read_text(encoding="utf-8"))
    locations = re.findall(r"location [^{]*\{[^}]*\}", text)
    assert sum("proxy_pass" in location for location in locations) == len(locations) == 2
    assert not any("proxy_set_header" in location for location in locations), "it would inherit no other"
    assert "proxy_set_header Host $host;" in text and "proxy_http_version 1.1;" in text


@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
def test_nginx_accepts_its_configuration(tmp_path: Path) -> None:
    """TLS is left out, since its files belong to the operator."""
    text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    text = re.sub(r"^ *ssl_certificate.*\n", "", text, flags=re.M).replace(
        "listen 443 ssl", "listen 127.0.0.1:8443"
    )
    (tmp_path / "site.conf").write_text(text)
    own = f"pid {tmp_path}/pid; events {{}} http {{ access_log off; include {tmp_path}/site.conf; }}"
    (tmp_path / "nginx.conf").write_text(own)
    command = ["nginx", "-t", "-q", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "pensieve.service").read_text(encoding="utf-8")
    (tmp_path / "pensieve.service").write_text(unit.replace("/opt/pensieve/bin/pensieve", "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "pensieve.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
