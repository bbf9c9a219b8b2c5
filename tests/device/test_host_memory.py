"""What the machine and its control groups leave, read from files of a made-up system."""

from __future__ import annotations

import pytest

from pensieve_jax.device.host_memory import available_bytes

MEMINFO = "MemTotal:       100000 kB\nMemFree:  10 kB\nMemAvailable:   {} kB\n"


def make_files(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_this_machine():
    assert available_bytes() > 1 << 20


def test_nothing_is_known(tmp_path):
    assert available_bytes(tmp_path) is None


def test_the_machine_alone(tmp_path):
    make_files(tmp_path, {"proc/meminfo": MEMINFO.format(50), "proc/self/cgroup": "0::/user/own\n"})
    assert available_bytes(tmp_path) == 50 * 1024


@pytest.mark.parametrize("path", ["/", "/user/own", "/seen/by/the/host/only"])
def test_version_2(tmp_path, path):
    """The tightest group from this process's own to the root of the mount; cached files do not count."""
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
    assert available_bytes(tmp_path) == 200


def test_a_group_beyond_its_limit_leaves_nothing(tmp_path):
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "100\n",
        "sys/fs/cgroup/memory.current": "130\n",
    }
    make_files(tmp_path, files)
    assert available_bytes(tmp_path) == 0
