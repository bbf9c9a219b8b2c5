"""Available memory of the machine and its control groups, from fake files; and how much jaxlib may pin."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pensieve_jax import LLM, CacheConfig, ConfigError, EngineConfig, RunnerConfig, assembly
from pensieve_jax.runtime import host_memory
from pensieve_jax.runtime.host_memory import (
    VARIABLE,
    allow_pinning,
    available_bytes,
    pinnable_bytes,
    total_bytes,
)
from tests.launching import TINY_MODEL

MEMINFO = "MemTotal:       100000 kB\nMemFree:  10 kB\nMemAvailable:   {} kB\n"


def make_files(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_this_machine():
    assert available_bytes() > 1 << 20


def test_nothing_is_known(tmp_path):
    assert available_bytes(tmp_path) is None and total_bytes(tmp_path) is None


def test_the_machine_alone(tmp_path):
    make_files(tmp_path, {"proc/meminfo": MEMINFO.format(50), "proc/self/cgroup": "0::/user/own\n"})
    assert available_bytes(tmp_path) == 50 * 1024 and total_bytes(tmp_path) == 100_000 * 1024


@pytest.mark.parametrize("path", ["/", "/user/own", "/seen/by/the/host/only"])
def test_version_2(tmp_path, path):
    """The tightest group from this process's own to the root of the mount counts; cached files do not."""
    stat = "anon 700\ninactive_file 250\nactive_file 1\n"
    files = {
        "proc/meminfo": MEMINFO.format(50),
        "proc/self/cgroup": f"0::{path}\n",
        "sys/fs/cgroup/memory.max": "4000\n",
        "sys/fs/cgroup/memory.current": "1000\n",
        "sys/fs/cgroup/memory.stat": stat,
        "sys/fs/cgroup/user/memory.max": "2000\n",
        "sys/fs/cgroup/user/memory.current": "1500\n",
        "sys/fs/cgroup/user/own/memory.max": "max\n",
        "sys/fs/cgroup/user/own/memory.current": "1\n",
    }
    make_files(tmp_path, files)
    assert available_bytes(tmp_path) == (500 if path == "/user/own" else 3250)
    assert total_bytes(tmp_path) == (2000 if path == "/user/own" else 4000)


def test_version_1(tmp_path):
    files = {
        "proc/meminfo": MEMINFO.format(50),
        "proc/self/cgroup": "12:cpu,cpuacct:/x\n5:memory:/jobs/7\n1:name=systemd:/\n",
        "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes": "3000\n",
        "sys/fs/cgroup/memory/jobs/7/memory.usage_in_bytes": "2900\n",
        "sys/fs/cgroup/memory/jobs/7/memory.stat": "cache 5\ntotal_inactive_file 100\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000\n",
    }
    make_files(tmp_path, files)
    assert available_bytes(tmp_path) == 200 and total_bytes(tmp_path) == 3000


def test_a_machine_smaller_than_its_container_counts(tmp_path):
    files = {
        "proc/meminfo": MEMINFO.format(50),
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{10**12}\n",
        "sys/fs/cgroup/memory.current": "100\n",
    }
    make_files(tmp_path, files)
    assert total_bytes(tmp_path) == 100_000 * 1024


def test_a_group_beyond_its_limit_leaves_nothing(tmp_path):
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "100\n",
        "sys/fs/cgroup/memory.current": "130\n",
    }
    make_files(tmp_path, files)
    assert available_bytes(tmp_path) == 0


_GIB = 2**30


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    """Restore the variable afterwards, and unset it first."""
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(host_memory, "_set_here", set())
    monkeypatch.setattr(host_memory, "has_clients", lambda: False)


@pytest.mark.parametrize(
    ("num_bytes", "available", "limit"),
    [
        (50 * _GIB, None, None),  # 60 of 64
        (100 * _GIB, None, "120"),
        (100 * _GIB + 1, None, "121"),
        (100 * _GIB, 200 * _GIB, "120"),
        (90 * _GIB, 100 * _GIB, "95"),  # as much as may be kept there: not all of it is pinned
        (100 * _GIB, 80 * _GIB, "100"),  # and what is too much is refused later
    ],
    ids=["little", "much", "more", "of plenty", "of little", "of too little"],
)
def test_the_limit_is_raised(num_bytes, available, limit):
    allow_pinning(num_bytes, available)
    assert os.environ.get(VARIABLE) == limit


def test_what_can_be_pinned_follows_the_limit(monkeypatch):
    assert pinnable_bytes() == 64 * _GIB * 5 // 6
    monkeypatch.setenv(VARIABLE, "120")
    assert pinnable_bytes() == 100 * _GIB


def test_nothing_is_set_when_it_is_too_late_or_already_set(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "has_clients", lambda: True)
        allow_pinning(100 * _GIB, None)
    assert VARIABLE not in os.environ
    monkeypatch.setenv(VARIABLE, "70")
    allow_pinning(100 * _GIB, None)
    assert os.environ[VARIABLE] == "70"


def test_an_own_setting_is_raised_and_not_lowered():
    """An earlier request may have been refused before JAX was used."""
    for num_gib, limit in ((100, "120"), (200, "240"), (100, "240")):
        allow_pinning(num_gib * _GIB, None)
        assert os.environ[VARIABLE] == limit


@pytest.mark.parametrize("sizes", [{"cpu_bytes": 10**15}, {"cpu_pages": 10**10}], ids=["bytes", "pages"])
def test_an_engine_requests_its_host_memory(monkeypatch, sizes):
    """The request includes chunks in transit, and comes before the machine is found to have less."""
    asked = []
    monkeypatch.setattr(assembly, "allow_pinning", lambda num_bytes, available: asked.append(num_bytes))
    config = EngineConfig(cache=CacheConfig(**sizes), runner=RunnerConfig(max_num_staged_pages=100))
    with pytest.raises(ConfigError, match=r"at most [\d,]+ (bytes|pages)"):
        LLM(TINY_MODEL, dtype="float32", config=config)
    page = 2 * 32 * 2 * 2 * 32 * 4  # 2 layers, 32 tokens, keys and values of 2 heads of 32, float32
    assert asked == [sizes.get("cpu_bytes", 10**10 * page) + 100 * page]


@pytest.mark.parametrize(
    ("cache", "num_gib"),
    [(CacheConfig(), 10), (CacheConfig(cpu_memory_fraction=0.25), 5), (CacheConfig(gpu_pages=4), 0)],
    ids=["default", "share", "exact pages"],
)
def test_an_engine_requests_the_share_of_its_host_memory(monkeypatch, cache, num_gib):
    asked = []

    def ask(num_bytes, available):
        asked.append(num_bytes)
        raise KeyboardInterrupt

    monkeypatch.setattr(assembly, "allow_pinning", ask)
    monkeypatch.setattr(assembly, "available_bytes", lambda: 20 * _GIB)
    with pytest.raises(KeyboardInterrupt):
        LLM(TINY_MODEL, dtype="float32", config=EngineConfig(cache=cache))
    assert asked == [num_gib * _GIB]


@pytest.mark.long
def test_the_limit_is_set_before_jax_is_used():
    """Runs in its own process, since this one has already used JAX."""
    code = """
from pensieve_jax import LLM, assembly
from pensieve_jax.rebatching import llm
from pensieve_jax.runtime.asynchronous_launches import has_clients

def asked(num_bytes, available):
    print(num_bytes > 0, available > 0, has_clients())
    raise KeyboardInterrupt

assembly.allow_pinning = llm.allow_pinning = asked
for kind in (LLM, llm.PaddedLLM):
    try:
        kind("random:llama-tiny")
    except KeyboardInterrupt:
        pass
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True True False"] * 2


@pytest.mark.parametrize("value", ["much", "-1", "1.5", "64GiB"])
def test_a_limit_that_is_no_number_is_refused_by_the_name_of_its_variable(monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError, match=f"{VARIABLE} is '{value}', but must be a number of GiB"):
        pinnable_bytes()
    with pytest.raises(ConfigError, match=f"{VARIABLE} is '{value}'"):
        allow_pinning(100 * _GIB, None)
